"""The distribution: a pure-Python wheel that installs from a folder of wheels into an empty environment."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deepspeed.release import COMMIT_FILE, RELEASE, _commit_and_branch
from tests.project.graph import PACKAGE, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = None

COMMANDS = [
    "deepspeed",
    "deepspeed.pt",
    "ds",
    "ds_report",
    "dsr",
    "ds_trace",
    "ds_report_run",
    "ds_inspect",
    "ds_plan",
    "ds_ssh",
    "ds_bench",
    "ds_io",
    "ds_nvme_tune",
    "ds_elastic",
]
SOURCES_TO_COMPILE = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".so", ".pyx", ".pyd", ".dll", ".hip"}


def test_torch_is_pinned_exactly_and_bounded_only_from_below():
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in pins if line.startswith("torch==")] == ["torch==2.13.0"]
    if tomllib is None:
        pytest.skip("reading pyproject.toml needs the tomllib of Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [line for line in project["dependencies"] if line.startswith("torch")] == ["torch>=2.11"]
    assert sorted(project["scripts"]) == sorted(COMMANDS)
    assert all("<" not in line for line in project["dependencies"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", ["3.10.2", "3.11.2", "3.12.1", "3.13.0"])
def test_every_pin_exists_for_every_python(tmp_path, python):
    """Of a pin without a version for its Python, pip only prints that it looks for others, for an hour."""
    given = {"python_version": python.rpartition(".")[0], "python_full_version": python}
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = [Requirement(line) for line in lines if line]
    wanted = [f"{pin.name}{pin.specifier}" for pin in pins if pin.marker is None or pin.marker.evaluate(given)]
    assert len(wanted) >= 20
    dry_run = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed"]
    chosen = ["--only-binary=:all:", "--python-version", python, "--target", str(tmp_path), *wanted]
    done = subprocess.run([*dry_run, *chosen], capture_output=True, text=True)
    wrong = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
    if any("onnection" in line or "retries" in line for line in wrong):
        pytest.skip(f"the package index cannot be reached: {wrong[-1]}")
    assert not wrong and done.returncode == 0, wrong[-1:] or done.stderr


def test_nothing_needs_a_compiler():
    found = [path for path in PACKAGE.rglob("*") if path.suffix in SOURCES_TO_COMPILE]
    assert not found


def _built(folder: Path) -> dict[str, Path]:
    """Builds from a copy, so that no build folder appears in the checkout. Returns the files by suffix."""
    copy = folder / "source"
    copy.mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "SECURITY.md", "hatch_build.py"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(PACKAGE, copy / "deepspeed", ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "deepspeed" / COMMIT_FILE).write_text("0123456789abcdef\n")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", str(folder / "dist")]
    _run(command, {**os.environ, "SOURCE_DATE_EPOCH": "1577836800"}, cwd=str(copy))
    return {path.suffix: path for path in (folder / "dist").iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return _built(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(built):
    return built[".whl"]


def test_the_same_bytes_from_another_folder_time_zone_and_times_of_files(built, tmp_path, monkeypatch):
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    before = os.umask(0o077)
    try:
        again = _built(tmp_path)  # copied now: other times, and with this mask other modes
    finally:
        os.umask(before)
    assert {suffix: path.name for suffix, path in again.items()} == {s: path.name for s, path in built.items()}
    assert {path.read_bytes() for path in again.values()} == {path.read_bytes() for path in built.values()}


def test_the_installed_wheel_imports_and_says_its_commit(wheel, tmp_path):
    target = tmp_path / "installed"
    _run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(wheel)])
    code = "import deepspeed; print(deepspeed.__version__, deepspeed.__git_hash__, deepspeed.__file__)"
    shown = _run([sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(target)}).split()
    assert shown == [f"{RELEASE}+g01234567", "0123456789abcdef", str(target / "deepspeed" / "__init__.py")]


def test_the_version_names_the_commit_of_a_checkout_and_of_a_wheel(tmp_path):
    package = tmp_path / "deepspeed"
    package.mkdir()
    assert _commit_and_branch(package) == ("unknown", "unknown")

    def git(*arguments: str, folder: Path = tmp_path) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(["git", *author, *arguments], cwd=folder, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    assert _commit_and_branch(package)[0] == "unknown", "no commit yet"
    git("commit", "-q", "--allow-empty", "-m", "one")
    commit = git("rev-parse", "HEAD")
    assert _commit_and_branch(package) == (commit, "main")
    git("pack-refs", "--all")
    assert _commit_and_branch(package) == (commit, "main")
    git("worktree", "add", "-q", "-b", "other/branch", "second")
    assert _commit_and_branch(tmp_path / "second" / "deepspeed") == (commit, "other/branch")
    git("checkout", "-q", "--detach")
    assert _commit_and_branch(package) == (commit, "unknown")
    (package / COMMIT_FILE).write_text("0123456789abcdef\n")
    assert _commit_and_branch(package) == ("0123456789abcdef", "unknown")


def test_the_wheel_is_pure_python(wheel):
    version = f"{RELEASE}+g01234567"
    assert wheel.name == f"deepspeed-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(_only(names, "METADATA")).decode())
        entry_points = archive.read(_only(names, "entry_points.txt")).decode()
    assert (metadata["Name"], metadata["Version"]) == ("deepspeed", version)
    assert {name.split("/")[0] for name in names} == {"deepspeed", f"deepspeed-{version}.dist-info"}
    assert not [name for name in names if Path(name).suffix in SOURCES_TO_COMPILE]
    assert {"deepspeed/py.typed", f"deepspeed-{version}.dist-info/licenses/LICENSE"} <= {*names}
    assert metadata["License-Expression"] == "Apache-2.0"
    packed = {name for name in names if name.startswith("deepspeed/") and name.endswith(".py")}
    assert packed == {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert all(f"{command} = " in entry_points for command in COMMANDS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_installs_without_an_index(wheel, tmp_path):
    """Downloads the dependencies into a folder, then installs from that folder alone."""
    folder = tmp_path / "wheels"
    download = [sys.executable, "-m", "pip", "download", "-q", "-d", str(folder), "-c", str(ROOT / "constraints.txt")]
    done = subprocess.run([*download, "--only-binary=:all:", str(wheel)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the dependencies cannot be downloaded here: {done.stderr.strip().splitlines()[-1]}")
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    isolated = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    isolated["PIP_CONFIG_FILE"] = os.devnull
    _run([str(python), "-m", "pip", "install", "-q", "--no-index", "--find-links", str(folder), "deepspeed"], isolated)
    shown = _run([str(python), "-c", "import deepspeed; print(deepspeed.__version__, deepspeed.__file__)"], isolated)
    assert shown.startswith(f"{RELEASE}+g01234567 {environment}")
    for command in COMMANDS:
        assert (environment / "bin" / command).exists(), command
    assert "usage" in _run([str(environment / "bin" / "deepspeed"), "--help"], isolated).lower()
    assert "torch" in _run([str(environment / "bin" / "ds_report")], isolated)


def _only(names: list[str], ending: str) -> str:
    (found,) = [name for name in names if name.endswith(ending)]
    return found


def _run(command: list[str], environ: dict[str, str] | None = None, cwd: str = os.sep) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=cwd, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout
