"""Imports point one way, communication goes through two packages, nothing prints, and `import deepspeed` is light."""

from __future__ import annotations

import ast
import subprocess
import sys

from tests.project import graph

# Lowest first; a module may import from its own row and from the rows above it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "logging", "features", "lazy", "ports", "release", "uncompiled", "plain_attributes"),
    ("config",),
    ("accelerator", "comm"),
    # Optimizers and the loss scaler work on plain tensors and know nothing of sharding; `zero` drives them.
    ("ops", "precision", "schedulers"),
    ("zero",),
    ("offload", "data", "dropping", "activation_checkpointing"),
    ("checkpoint",),
    # Sinks, timers and counters that know nothing of the engine, which drives them.
    ("monitor", "profiling"),
    # Layers, schedules and groups of further axes, which the engine puts into a model.
    ("parallel",),
    # Layers of few bits, and what makes a model smaller: the engine advances its schedule.
    ("linear",),
    ("compression",),
    ("engine",),
    ("plan",),
    ("pipe", "moe", "sequence", "tensor", "inference", "autotuning", "elasticity"),
    ("compile", "io", "datastates"),
    ("launcher", "cli"),
    # Only re-exports, at the paths that the ecosystem imports.
    ("runtime", "utils", "module_inject", "model_implementations", "constants", "env_report", "git_version_info"),
)
MAY_IMPORT_TORCH_DISTRIBUTED = ("comm", "parallel")


def _part(module: str) -> str | None:
    """The package right under the root; None for the root itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def _row(part: str) -> int:
    for row, parts in enumerate(LAYERS):
        if part in parts:
            return row
    raise AssertionError(f"deepspeed/{part} has no place in LAYERS of {__file__}; give it one")


def test_no_cycles():
    knots = graph.cycles(graph.edges())
    assert not knots, "modules that import each other:\n" + "\n".join(" <-> ".join(knot) for knot in knots)


def test_cycles_are_found():
    assert graph.cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert graph.cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert graph.cycles({"a": {"a"}}) == [["a"]]


def test_imports_point_one_way():
    wrong = []
    for entry in graph.imports():
        importer, imported = _part(entry.importer), _part(entry.imported)
        if not entry.imported.startswith("deepspeed.") or importer is None or imported is None:
            continue
        if _row(imported) > _row(importer):
            wrong.append(str(entry))
    assert not wrong, "imports of a higher layer:\n" + "\n".join(wrong)


def test_only_two_packages_know_torch_distributed():
    wrong = [
        str(entry)
        for entry in graph.imports()
        if (entry.imported + ".").startswith("torch.distributed.")
        and _part(entry.importer) not in MAY_IMPORT_TORCH_DISTRIBUTED
    ]
    for module in graph.modules():
        if _part(module) in MAY_IMPORT_TORCH_DISTRIBUTED:
            continue
        for node in ast.walk(graph.tree_of(module)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                wrong.append(f"{graph.path_of(module)}:{node.lineno} uses torch.distributed")
    assert not wrong, "torch.distributed outside deepspeed/comm and deepspeed/parallel:\n" + "\n".join(wrong)


def test_nothing_prints():
    wrong = [
        f"{graph.path_of(module)}:{node.lineno}"
        for module in graph.modules()
        for node in ast.walk(graph.tree_of(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("print", "pprint")
    ]
    assert not wrong, "use deepspeed.logging or a rich Console instead of print:\n" + "\n".join(wrong)


LIGHT_IMPORT = """
import sys, torch
before = set(sys.modules)
import deepspeed
heavy = {"transformers", "accelerate", "lightning", "tensorboard", "matplotlib", "wandb", "scipy", "pandas", "triton"}
print(sorted({name.split(".")[0] for name in set(sys.modules) - before} & heavy))
print(torch.cuda.is_initialized(), torch.distributed.is_initialized())
"""


def test_import_is_silent_and_light():
    done = subprocess.run([sys.executable, "-c", LIGHT_IMPORT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["[]", "False False"]
    assert done.stderr == ""
