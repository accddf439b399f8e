"""What lies in the repository: every test is collected, nothing names the machine it was written on."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.project.graph import ROOT

TESTS = ROOT / "tests"
BINARY = {".png", ".jpg", ".gif", ".pt", ".safetensors", ".bin", ".zip"}

# Each pattern is spelt so that this file does not contain what it looks for.
MACHINE = {
    "a path of the machine it was written on": r"/wor[k]/(main|shared|notes)|/op[t]/(pypi|whe)|/hom[e]/\w+/|/User[s]/",
    "the address of a package registry": r"index-ur[l]\s*[= ]|pypi\.or[g]/simple|files\.pythonhoste[d]|artifactor[y]",
}


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs the git checkout: it lists the files that belong to the project")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_names_a_machine_or_a_registry():
    found = []
    for path in tracked_files():
        if path.suffix in BINARY:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for what, pattern in MACHINE.items():
                if re.search(pattern, line):
                    found.append(f"{path.relative_to(ROOT)}:{number} has {what}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_every_folder_of_tests_is_a_package():
    """Otherwise workers cannot import the test modules, and two files of one name shadow each other."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    missing = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").exists()]
    assert not missing, f"add an __init__.py to {missing}"


def _tests_in(path: Path) -> list[str]:
    names = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            names.append(node.name)
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names += [f"{node.name}.{sub.name}" for sub in node.body if getattr(sub, "name", "").startswith("test_")]
    return names


def test_no_test_is_orphaned():
    """A test in a file that pytest does not collect, or a test file without a test."""
    uncollected, empty = [], []
    for path in sorted(TESTS.rglob("*.py")):
        is_collected = path.name.startswith("test_")
        names = _tests_in(path)
        if names and not is_collected:
            uncollected.append(f"{path.relative_to(ROOT)}: {names[0]}")
        if is_collected and not names:
            empty.append(str(path.relative_to(ROOT)))
    assert not uncollected, f"pytest collects only test_*.py: {uncollected}"
    assert not empty, f"no test in {empty}"


def test_no_test_hides_another_of_its_name():
    twice = []
    for path in sorted(TESTS.rglob("test_*.py")):
        names = _tests_in(path)
        twice += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(set(names)) if names.count(name) > 1]
    assert not twice, twice
