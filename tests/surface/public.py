"""The public surface of the package as lines of text, and what may change between two versions of it.

``python -m tests.surface.public`` writes the lines that are new since the last version to ``unreleased.txt``, beside
this file. ``python -m tests.surface.public --release`` writes all lines to the file of
:data:`~deepspeed.release.RELEASE`, which is never written again.

A line is one of::

    name deepspeed.initialize(args=None, model=None)
    name deepspeed.DeepSpeedEngine.backward(self, loss)
    alias deepspeed.runtime.engine.DeepSpeedEngine = deepspeed.DeepSpeedEngine
    key zero_optimization.stage = 0
    option ds_plan --sweep
"""

import ast
import enum
import importlib
import inspect
import json
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.release import RELEASE
from tests.project.graph import ROOT, modules, nodes_of

HERE = Path(__file__).parent
NEW = HERE / "unreleased.txt"
CHANGES = ROOT / "CHANGELOG.md"
DECLARED = "Changes of what was public"
"""The heading in ``CHANGELOG.md`` below which the next version states what it does not keep of the last one."""
SCHEMA = ROOT / "docs" / "reference" / "ds_config.schema.json"
# Modules with the options of each command; sub-commands share the file of their command.
COMMANDS = {
    "deepspeed": "launcher",
    "ds_report": "cli.report",
    "ds_inspect": "cli.inspect_checkpoint",
    "ds_plan": "cli.plan",
    "ds_ssh": "cli.ssh",
    "ds_bench": "cli.bench",
    "ds_io": "cli.io_speed",
    "ds_nvme_tune": "cli.nvme_tune",
    "ds_elastic": "cli.elastic",
    "ds_report_run": "cli.report_run",
    "ds_trace": "cli.trace",
}


def lines() -> list[str]:
    """Returns the public surface of the present code, sorted."""
    return sorted({*_names(), *_keys(), *_options()})


def file_of(version: str) -> Path:
    """Returns where the surface of a version is written down."""
    return HERE / f"public-{version}.txt"


def last_file() -> Path:
    """Returns the file of the newest version that is written down."""
    written = HERE.glob("public-*.txt")
    return max(written, key=lambda path: tuple(map(int, path.stem.removeprefix("public-").split("."))))


# -- names -------------------------------------------------------------------------------------------------------------


def _names() -> Iterator[str]:
    """Yields what modules state in ``__all__``, with the signatures of functions and of public methods."""
    shortest: dict[int, str] = {}
    objects = sorted(_stated(), key=_as_it_is_called)
    classes = {value for _, value in objects if inspect.isclass(value)}
    for path, value in objects:
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not _is_ours(value):
            yield f"name {path}"
        elif id(value) in shortest:
            yield f"alias {path} = {shortest[id(value)]}"
        else:
            shortest[id(value)] = path
            yield f"name {path}{_signature(value)}"
            if inspect.isclass(value):
                yield from _methods(path, value, classes - {value})


def _stated() -> Iterator[tuple[str, Any]]:
    """Yields every name in an ``__all__`` of the package with its value, without placeholders of missing features."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        listed = ["deepspeed", *(entry.name for entry in pkgutil.walk_packages(deepspeed.__path__, "deepspeed."))]
        for module_name in listed:
            if module_name.endswith("__main__"):
                continue
            module = importlib.import_module(module_name)
            for name in getattr(module, "__all__", None) or _reexported(module_name):
                value = getattr(module, name)
                if not inspect.ismodule(value) and "not supported yet" not in repr(value):
                    yield f"{module_name}.{name}", value


def _reexported(module: str) -> list[str]:
    """Returns what a module imports for its users: ``from deepspeed.schedulers import WarmupLR as WarmupLR``."""
    imports = nodes_of(module, ast.ImportFrom) if module in modules() else ()
    return [alias.name for node in imports for alias in node.names if alias.asname == alias.name]


def _as_it_is_called(entry: tuple[str, Any]) -> tuple[int, bool, str]:
    """Sorts the shortest path first, and of these the one under which a class or function is defined."""
    path, value = entry
    return path.count("."), path.rpartition(".")[2] != getattr(value, "__name__", ""), path


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("deepspeed")


def _methods(path: str, kind: type, listed: set[type]) -> Iterator[str]:
    """Yields the public methods and properties that the package defines, except those of a base that is public too."""
    for name in sorted(dir(kind)):
        owner = next((base for base in kind.__mro__ if name in vars(base)), None)
        if name.startswith("_") or owner is None or not _is_ours(owner) or owner in listed:
            continue
        value = vars(owner)[name]
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        yield f"name {path}.{name}{_signature(value) if inspect.isroutine(value) else ''}"


def _signature(value: Any) -> str:
    """Returns names, kinds and defaults of the parameters; annotations may change freely.

    A constructor that is torch's changes with torch's version and is left out.
    """
    if inspect.isclass(value):
        makers = {
            str(getattr(maker, "__module__", None)).partition(".")[0] for maker in (value.__new__, value.__init__)
        }
        is_torchs = "torch" in makers and "deepspeed" not in makers
        if is_torchs or issubclass(value, (enum.Enum, BaseException)) or _takes_fields(value):
            return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        entry.replace(annotation=entry.empty, default=entry.empty if entry.default is entry.empty else _Shown(entry))
        for entry in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def _takes_fields(kind: type) -> bool:
    """Returns whether a class is a section of the configuration; its keys are listed as keys, not as attributes."""
    return hasattr(kind, "model_fields")


class _Shown:
    """A default value in a signature: shown by value if it is plain, otherwise by its type."""

    def __init__(self, parameter: inspect.Parameter):
        self._default = parameter.default

    def __repr__(self) -> str:
        value = self._default
        if isinstance(value, enum.Enum):
            return f"{type(value).__name__}.{value.name}"
        if value is None or isinstance(value, (bool, int, float, str)):
            return repr(value)
        return f"<{type(value).__name__}>" if not isinstance(value, (tuple, list, dict)) else type(value).__name__


# -- keys and options --------------------------------------------------------------------------------------------------


def _keys() -> Iterator[str]:
    """Yields the keys of the configuration with their defaults, from the published schema."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    yield from _keys_of(schema, schema.get("$defs", {}), "", ())


def _keys_of(node: Any, definitions: Any, path: str, above: tuple[str, ...]) -> Iterator[str]:
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        if name not in above:
            yield from _keys_of(definitions[name], definitions, path, (*above, name))
    for choice in (*node.get("anyOf", ()), *node.get("allOf", ()), *node.get("oneOf", ())):
        yield from _keys_of(choice, definitions, path, above)
    for key, entry in node.get("properties", {}).items():
        inner = f"{path}.{key}" if path else key
        default = f" = {json.dumps(entry['default'], sort_keys=True)}" if "default" in entry else ""
        yield f"key {inner}{default}"
        yield from _keys_of(entry, definitions, inner, above)


def _options() -> Iterator[str]:
    """Yields the options of the commands, as the calls of ``add_argument`` name them."""
    for command, place in COMMANDS.items():
        prefix = f"deepspeed.{place}"
        for module in _modules_below(prefix):
            for node in nodes_of(module, ast.Call):
                if isinstance(node.func, ast.Attribute):
                    if node.func.attr == "add_argument":
                        for word in node.args:
                            if isinstance(word, ast.Constant) and str(word.value).startswith("--"):
                                yield f"option {command} {word.value}"


def _modules_below(prefix: str) -> list[str]:
    from tests.project.graph import modules

    found = [name for name in modules() if name == prefix or name.startswith(prefix + ".")]
    assert found, f"no module {prefix}: COMMANDS of {__file__} names it"
    return found


# -- what may change ---------------------------------------------------------------------------------------------------


def promised() -> list[str]:
    """Returns the lines of the last version."""
    return last_file().read_text(encoding="utf-8").splitlines()


def new_lines(present: list[str]) -> list[str]:
    """Returns the lines of ``present`` that the last version does not have."""
    return sorted({*present} - {*promised()})


def declared() -> list[str]:
    """Returns the names and keys that the next version changes or removes, as ``CHANGELOG.md`` states them.

    Each is the first word in backticks of an item below the heading :data:`DECLARED` of the unreleased version.
    """
    unreleased = CHANGES.read_text(encoding="utf-8").split("\n## ")[1]
    section = unreleased.partition(f"\n### {DECLARED}\n")[2].partition("\n### ")[0]
    return re.findall(r"^- `([^`]+)`", section, re.MULTILINE)


def is_released() -> bool:
    """Returns whether ``CHANGELOG.md`` dates the version in hand."""
    heading = CHANGES.read_text(encoding="utf-8").split("\n## ")[1].partition("\n")[0]
    if heading == f"{RELEASE} (not released)":
        return False
    assert re.fullmatch(re.escape(RELEASE) + r" \(\d{4}-\d\d-\d\d\)", heading), f"{CHANGES.name}: ## {heading}"
    return True


def path_of(line: str) -> str:
    """Returns the dotted path of a name, alias or key, or a command and its option, without its signature or value."""
    return _name_of(line).partition(" ")[2]


def breaks(old: list[str], new: list[str]) -> list[str]:
    """Returns the lines of ``old`` that ``new`` no longer keeps.

    Kept is a line that stands there unchanged, or a name whose signature only gained defaults and parameters that calls
    may leave out: at the end, or by keyword. An alias is kept where the name exists, whatever it stands for. A method
    of a class that has become another name of a second class is kept where that one has it.
    """
    present = set(new)
    signatures = {_name_of(line): line for line in new}
    aliases = dict(line.removeprefix("alias ").split(" = ") for line in new if line.startswith("alias "))

    def found(line: str) -> str | None:
        name = _name_of(line)
        owner, _, method = name.removeprefix("name ").rpartition(".")
        if name not in signatures and owner in aliases:
            name = f"name {aliases[owner]}.{method}"
        return signatures.get(name)

    return [line for line in old if line not in present and not _still_callable(line, found(line))]


def _name_of(line: str) -> str:
    kind, _, rest = line.partition(" ")
    path = rest.partition("(")[0].partition(" = ")[0]
    return f"{'name' if kind == 'alias' else kind} {path}"


def _still_callable(old: str, new: str | None) -> bool:
    if new is None or old.startswith("key "):
        return False
    if old.startswith("alias ") or new.startswith("alias ") or "(" not in old:
        return True
    if "(" not in new:  # no callable any more
        return False
    before, after = _parameters(old), _parameters(new)
    after = [_without_new_default(entry, before) for entry in after]
    kept = [entry for entry in after if entry in before]
    if kept != before:
        return False
    added = [entry for entry in after if entry not in before]
    starred = [entry for entry in after if entry.startswith("*")]
    last = max((after.index(entry) for entry in before if not entry.startswith("*")), default=-1)
    may_be_left_out = all("=" in entry or entry.startswith("*") for entry in added)
    first_star = after.index(starred[0]) if starred else len(after)
    return may_be_left_out and all(after.index(entry) > min(last, first_star) for entry in added)


def _without_new_default(entry: str, before: list[str]) -> str:
    """Returns a parameter as it was before, if all that it has gained is a default."""
    name = entry.partition("=")[0]
    return name if name in before else entry


def _parameters(line: str) -> list[str]:
    inside = line[line.index("(") + 1 : line.rindex(")")]
    return [entry.strip() for entry in inside.split(", ") if entry.strip()]


if __name__ == "__main__":
    present, target = lines(), NEW
    if sys.argv[1:] == ["--release"]:
        target = file_of(RELEASE)
        if target.exists():
            sys.exit(f"{target.name}: the file of a version is written once; raise RELEASE in deepspeed/release.py")
        NEW.write_text("", encoding="utf-8")
    else:
        present = new_lines(present)
    target.write_text("".join(f"{line}\n" for line in present), encoding="utf-8")
    sys.stdout.write(f"{target.name}: {len(present)} lines\n")
