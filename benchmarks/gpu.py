"""Tests and measures the package on a GPU.

``python benchmarks/gpu.py --write-report`` runs six parts, each in a process of its own with a time limit, and then
shows all tables. A part writes its JSON file after every row. ``--dry`` runs all parts at small sizes without a GPU, in
a few minutes.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from on_gpu.part import ROOT, Report, Settings, child_environment
from on_gpu.show import markdown, picture, tables
from rich.console import Console

# Part -> module below on_gpu, and its time limit in minutes on a GPU; all together about half an hour.
PARTS = {
    "A": ("facts", 3),
    "B": ("ranks", 10),
    "C": ("simulated_ranks", 8),
    "D": ("speed", 6),
    "E": ("kernels", 4),
    "F": ("sanitizer", 4),
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="".join(PARTS), help=f"letters, in order (default {''.join(PARTS)})")
    parser.add_argument("--dry", action="store_true", help="small sizes and no GPU, to test the program itself")
    parser.add_argument("--out", type=Path, help="folder of the JSON files (default: a temporary one)")
    parser.add_argument("--minutes", type=float, help="time limit of every part, instead of its own")
    parser.add_argument("--peer-python", help="Python of an environment with the published deepspeed")
    parser.add_argument("--nccl", help="NCCL library to load for part B, if torch's own is older than 2.30")
    parser.add_argument("--jobs", type=int, default=1, help="trainings of part B at once (default 1); none is timed")
    parser.add_argument("--cells", default="", help="regular expression: only those trainings of parts B, C and D")
    parser.add_argument("--write-report", action="store_true", help="also write benchmarks/results/gpu-DATE.*")
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    found = parser.parse_args()
    if unknown := set(found.parts) - set(PARTS):
        parser.error(f"--parts {found.parts}: expected letters of {''.join(PARTS)}, found {', '.join(sorted(unknown))}")
    return found


def _run_part(letter: str, settings: Settings, path: Path) -> None:
    """Runs one part in this process."""
    module = importlib.import_module(f"on_gpu.{PARTS[letter][0]}")
    report = Report(path, module.TITLE)
    report.attempt(module.TITLE, lambda: module.run(settings, report))


def _start_part(letter: str, arguments: argparse.Namespace, path: Path) -> str:
    """Runs one part in a process group of its own; returns its failure as text, empty if there is none."""
    minutes = arguments.minutes or PARTS[letter][1]
    words = [sys.executable, str(Path(__file__).resolve()), "--part", letter, "--json", str(path)]
    words += ["--jobs", str(arguments.jobs), "--cells", arguments.cells]
    words += ["--dry"] if arguments.dry else []
    words += ["--peer-python", arguments.peer_python] if arguments.peer_python else []
    nccl = arguments.nccl if letter == "B" else None
    words += ["--nccl", nccl] if nccl else []
    settings = Settings(arguments.dry, nccl=nccl)
    process = subprocess.Popen(words, env=child_environment(settings), start_new_session=True)
    try:
        code = process.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        return f"stopped at the time limit of {minutes:g} minutes; the tables have the rows until then"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return f"ended with {code}" if code else ""


def main() -> int:
    """Runs the parts; returns 1 if any of them found a problem."""
    arguments = _arguments()
    if arguments.part:
        settings = Settings(arguments.dry, arguments.peer_python, arguments.nccl, arguments.jobs, arguments.cells)
        _run_part(arguments.part, settings, arguments.json)
        return 0
    folder = arguments.out or Path(tempfile.mkdtemp(prefix="gpu-benchmark-"))
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for letter in arguments.parts:
        path = folder / f"{letter}.json"
        path.unlink(missing_ok=True)
        sys.stderr.write(f"part {letter}, at most {arguments.minutes or PARTS[letter][1]:g} minutes\n")
        failure = _start_part(letter, arguments, path)
        content = json.loads(path.read_text()) if path.exists() else {"title": letter, "tables": [], "problems": []}
        content["problems"] += [failure] if failure else []
        path.write_text(json.dumps(content, indent=1) + "\n")
        found[letter] = content
    console = Console(width=max(Console().width, 120))
    tables(console, found)
    sys.stderr.write(f"JSON: {folder}\n")
    if arguments.write_report:
        name = f"gpu-{'dry-' if arguments.dry else ''}{datetime.date.today().isoformat()}"
        results = ROOT / "benchmarks" / "results"
        (results / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        drawn = picture(results / f"{name}.png", found)
        (results / f"{name}.md").write_text(markdown(found, name if drawn else None))
    return 1 if any(content["problems"] for content in found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
