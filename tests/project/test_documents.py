"""README and docs against the tree: links lead somewhere, commands exist, the example is valid."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.project.graph import ROOT

pytestmark = pytest.mark.docs

DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])


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


def test_make_targets_of_the_readme_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = set(re.findall(r"\bmake ([a-z][a-z-]*)", _readme()))
    assert {"quickstart", "test"} <= named
    missing = [target for target in named if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)]
    assert not missing, missing


def test_paths_of_the_readme_exist():
    paths = re.findall(r"`((?:deepspeed|tests|docs|examples|benchmarks)/[\w./-]+)`", _readme())
    assert len(paths) >= 6
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing, missing


def test_python_of_the_readme_parses():
    blocks = re.findall(r"```python\n(.*?)```", _readme(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        ast.parse(block)
