"""Runs the fast part of the suite with several versions of Python, torch and the libraries on top: `make test-matrix`.

    make test-matrix                  all environments that this machine can make; those that passed before are left out
    make test-matrix ONLY=torch-2.15  those whose name contains a text
    make test-matrix AGAIN=1          also those that passed
    make test-matrix TESTS=tests/ops  these tests alone; the page names them, and the environment has not passed yet

Results are kept in .matrix/ beside the environments, so an interrupted run goes on where it was. The page
docs/reference/versions.md is written again after every environment. An index with CPU builds of torch saves gigabytes:
name it in PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / ".matrix"
PAGE = ROOT / "docs" / "reference" / "versions.md"
# What breaks with other versions: private names, dispatch, hooks, collectives, and the libraries on top.
FAST = (
    "tests/accelerator tests/ops tests/precision tests/schedulers tests/zero/gather tests/zero/gradient "
    "tests/zero/construction tests/zero/access tests/comm/transports tests/comm/codecs tests/device tests/oracle "
    "tests/activation_checkpointing tests/parallel/pipe/test_split.py tests/profiling tests/surface tests/ecosystem "
    "tests/project/test_other_libraries.py"
).split()
LIBRARIES = ("transformers", "accelerate", "lightning", "peft", "trl")


@dataclass(frozen=True)
class Environment:
    """One combination of versions; a library without a version is the newest, "-" leaves all of them out."""

    python: str
    torch: str
    transformers: str = ""

    @property
    def name(self) -> str:
        """The name of its folder."""
        transformers = f"-transformers-{self.transformers}" if self.transformers not in ("", "-") else ""
        return f"python-{self.python}-torch-{self.torch}{transformers}"


# Each Python, each torch and each end of the range of Transformers at least once. Transformers and what stands on it
# publish nothing for Python 3.10 any more.
MATRIX = (
    Environment("3.10", "2.11.0", "-"),
    Environment("3.11", "2.12.1", "5.17.0"),
    Environment("3.11", "2.13.0"),
    Environment("3.12", "2.14.1"),
    Environment("3.13", "2.15.0"),
    Environment("3.14", "2.15.0"),
)


def install(environment: Environment, python: str) -> subprocess.CompletedProcess[str]:
    """Installs what the tests need; pins of constraints.txt hold for what is not varied."""
    varied = {"torch", *LIBRARIES, "pytorch-lightning", "datasets"}
    pins = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line]
    kept = [line for line in pins if re.split(r"==", line)[0].lower() not in varied]
    constraints = FOLDER / f"{environment.name}.txt"
    constraints.write_text("\n".join([*kept, f"torch=={environment.torch}"]) + "\n", encoding="utf-8")
    named = [f"{ROOT}[test]", f"torch=={environment.torch}"]
    if environment.transformers not in ("", "-"):
        named.append(f"transformers=={environment.transformers}")
    # By the variable, which replaces constraints that the machine may set for all of pip.
    variables = {**os.environ, "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    command = [python, "-m", "pip", "install", "-q", "-e", *named]
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def run(environment: Environment, tests: list[str]) -> dict[str, object]:
    """Makes one environment, runs ``tests`` in it (empty: the fast part) and returns the result."""
    interpreter = shutil.which(f"python{environment.python}")
    works = interpreter and subprocess.run([interpreter, "-c", ""], capture_output=True).returncode == 0
    if not works:
        return {"result": f"not run: no python{environment.python} here"}
    folder = FOLDER / environment.name
    python = str(folder / "bin" / "python")
    began = time.monotonic()
    if not (folder / ".installed").exists():
        subprocess.run([str(interpreter), "-m", "venv", "--clear", str(folder)], check=True)
        done = install(environment, python)
        if done.returncode:
            return {"result": f"not installed: {last_line(done.stderr)}"}
        (folder / ".installed").touch()
    installed = time.monotonic() - began
    code = (
        "import importlib.metadata as m, json, platform\n"
        "def v(n):\n    try: return m.version(n)\n    except m.PackageNotFoundError: return '-'\n"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: v(n) for n in {('torch', *LIBRARIES)!r}}}}}))"
    )
    versions = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
    log = FOLDER / f"{environment.name}.log"
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", str(os.cpu_count()), "--dist", "worksteal"]
    command += tests or FAST
    with log.open("w") as output:
        done = subprocess.run(command, cwd=ROOT, env=variables, stdout=output, stderr=subprocess.STDOUT)
    text = log.read_text(errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, flags=re.MULTILINE)
    passed = f"passed: {' '.join(tests)}" if tests else "passed"
    outcome = passed if done.returncode == 0 else f"{len(failed)} failed" if failed else "did not finish"
    seconds = {"installing": round(installed), "tests": round(time.monotonic() - began - installed)}
    return {"result": outcome, "line": last_line(text), "versions": versions, "failed": failed, "seconds": seconds}


def last_line(text: str) -> str:
    """Returns the last line that is not empty."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


def commit() -> str:
    """Returns the commit of the checkout, short."""
    done = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def results() -> Iterator[tuple[Environment, dict[str, object]]]:
    """Yields every environment with what is known of it."""
    for environment in MATRIX:
        kept = FOLDER / f"{environment.name}.json"
        yield environment, json.loads(kept.read_text()) if kept.exists() else {"result": "not run"}


def write_page() -> None:
    """Writes the page of versions from the results."""
    rows = []
    for environment, known in results():
        versions = known.get("versions") or {**asdict(environment)}
        cells = [str(versions.get(name) or "newest") for name in ("python", "torch", *LIBRARIES)]
        when = f"{known.get('date', '')} {known.get('commit', '')}".strip()
        rows.append(f"| {' | '.join(cells)} | {known['result']} | {known.get('line', '')} | {when} |")
    page = (
        "# Versions\n\n<!-- Written by `make test-matrix`; only the text below the table is by hand. -->\n\n"
        "The fast part of the tests (which folders: `FAST` in `.ci/matrix.py`) with other versions than those of\n"
        "`constraints.txt`, which `make test` uses. Supported are torch 2.11 to 2.15, Python 3.10 to 3.14, and\n"
        "Transformers from 5.17 on.\n\n"
        f"| Python | torch | {' | '.join(LIBRARIES)} | result | tests | when |\n|{'---|' * (len(LIBRARIES) + 5)}\n"
        + "\n".join(rows)
        + "\n"
    )
    by_hand = PAGE.read_text(encoding="utf-8").partition("\n## ")[2] if PAGE.exists() else ""
    PAGE.write_text(page + (f"\n## {by_hand}" if by_hand else ""), encoding="utf-8")


def main() -> None:
    """Runs the environments that have not passed yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="environments whose name contains this text")
    parser.add_argument("--again", action="store_true", help="also those that passed")
    parser.add_argument("--tests", default="", help="these files or folders instead of the fast part")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    failed = []
    for environment, known in results():
        if arguments.only not in environment.name or (known["result"] == "passed" and not arguments.again):
            sys.stdout.write(f"{environment.name}: {known['result']} (kept)\n")
            continue
        sys.stdout.write(f"{environment.name} ... ")
        sys.stdout.flush()
        done = run(environment, arguments.tests.split())
        done |= {"date": datetime.date.today().isoformat(), "commit": commit()}
        (FOLDER / f"{environment.name}.json").write_text(json.dumps(done, indent=2))
        write_page()
        sys.stdout.write(f"{done['result']}: {done.get('line', '')}\n")
        if str(done["result"]).endswith(("failed", "did not finish")):
            failed.append(environment.name)
    write_page()
    if failed:
        sys.exit(f"test-matrix: failures in {', '.join(failed)}; the output is in {FOLDER.name}/NAME.log")


if __name__ == "__main__":
    main()
