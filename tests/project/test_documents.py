"""README and docs against the tree: links lead somewhere, commands exist, the example is valid."""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.graph import ROOT

pytestmark = pytest.mark.docs

GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PROJECT = [ROOT / name for name in ("AGENTS.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
DOCUMENTS = sorted([*GUIDES, *PROJECT, *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


def _anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+\s+(.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (document.parent / name).resolve() if name else document
        has_anchor = not anchor or path.suffix != ".md" or (path.exists() and anchor in _anchors(path))
        if not path.exists() or not has_anchor:
            broken.append(target)
    assert not broken, f"{document.relative_to(ROOT)}: {broken}"


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_make_targets_exist(guide):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", guide.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert "test" in named
    missing = [target for target in named if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)]
    assert not missing, missing


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_paths_exist(guide):
    paths = re.findall(r"`((?:deepspeed|tests|docs|examples|benchmarks)/[\w./-]+)`", guide.read_text(encoding="utf-8"))
    assert len(paths) >= 6
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing


def test_a_version_of_the_change_log_is_short_and_begins_with_what_breaks():
    for version in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]:
        headings = re.findall(r"^### (.*)$", version, flags=re.MULTILINE)
        name = version.partition("\n")[0]
        assert len(version.strip().splitlines()) <= 60, f"{name}: say what users notice in 60 lines"
        assert len(set(headings)) == len(headings), f"{name}: one section per heading"
        assert not headings or headings[0] == "Changes of what was public", f"{name}: begin with what breaks"


def test_the_table_of_benchmarks_names_every_script():
    table = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in (ROOT / "benchmarks").glob("*.py") if f"`{path.name}`" not in table]
    assert not missing, missing


def test_design_pages_name_files_that_exist():
    """``comm/job/job.py`` or ``job.py`` alone; the script that a save writes beside a checkpoint is none of ours."""
    files = [path.as_posix() for top in ("deepspeed", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    missing = []
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        names = set(re.findall(r"`([\w./]+\.py)`", page.read_text(encoding="utf-8"))) - {"zero_to_fp32.py"}
        missing += [f"{page.name}: {name}" for name in names if not any(file.endswith(f"/{name}") for file in files)]
    assert not missing, sorted(missing)


@cache
def _words_of_the_code() -> set[str]:
    files = [path for top in ("deepspeed", "tests", "benchmarks") for path in (ROOT / top).rglob("*.py")]
    return {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}


OF_OTHER_SOFTWARE = {"Auto", "ByteSize", "PR_SET_PDEATHSIG", "cudaFree", "memfd"}


def test_design_pages_name_what_is_there():
    """A name counts where the code, a test or a benchmark has it; those of libraries are not looked up."""
    words, missing = _words_of_the_code(), []
    for page in sorted((ROOT / "docs" / "design").glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for span in re.findall(r"`([A-Za-z_][\w.]*\w)(?:\(\))?`", text):
            is_ours = not span.startswith(("transformers.", "accelerate.", "torchdata."))
            if is_ours and span.rpartition(".")[2] not in words | OF_OTHER_SOFTWARE and not span.endswith(".md"):
                missing.append(f"{page.name}: {span}")
    assert not missing, missing


def test_worked_examples_name_what_is_there():
    """Files, names and commands of CONTRIBUTING.md; a name counts where the code or a test has it."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sources = [*(ROOT / "deepspeed").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    words = _words_of_the_code()
    spans = set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    files = {span for span in spans if re.fullmatch(r"[\w/]+\.py", span)}
    missing = {file for file in files if not any(path.as_posix().endswith(f"/{file}") for path in sources)}
    missing |= {span for span in spans if re.fullmatch(r"[A-Za-z_]\w+", span) and span not in words}
    for module in re.findall(r"python -m (deepspeed[\w.]*|tests[\w.]*)", text):
        missing |= {module} if importlib.util.find_spec(module) is None else set()
    for path, word in re.findall(r"pytest (tests/\S+\.py) -k (\w+)", text):
        if not re.search(rf"def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8")):
            missing.add(f"{path} -k {word}")
    assert len(files) > 8 and not missing, sorted(missing)


def test_python_of_the_readme_parses():
    blocks = re.findall(r"```python\n(.*?)```", _readme(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)
