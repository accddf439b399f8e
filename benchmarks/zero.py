"""Times ZeRO 0-3 of this project beside DDP, FSDP2 and the published package, interleaved in one run, on the CPU.

Run ``python benchmarks/zero.py --help``; ``benchmarks/README.md`` describes what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

from contest import report
from contest.arena import Arena
from contest.contestants import CONTESTANTS
from contest.workloads import WORKLOADS
from rich.console import Console

_HERE = Path(__file__).resolve().parent
_STAGES = range(4)
_ENGINES = [*(f"upstream-{stage}" for stage in _STAGES), *(f"ours-{stage}" for stage in _STAGES)]
DEFAULT_ENTRIES = {
    "gpt": ["floor", "floor-0", "ddp", "ddp-bf16", "fsdp2", *_ENGINES],
    "offload": [
        "ours-2",
        "ours-3",
        *(f"{who}-{tier}" for tier in ("2-host", "3-host", "3-host-all") for who in ("upstream", "ours")),
    ],
    "thin": ["hand", "autocast", "fsdp2", *_ENGINES],
    "small": ["hand", "ddp", "ddp-bf16", "fsdp2", *_ENGINES],
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--workload",
        action="append",
        choices=[*WORKLOADS],
        help="workload to run; may be repeated; default: all",
    )
    parser.add_argument("--only", help=f"contestants, separated by commas; known: {', '.join(CONTESTANTS)}")
    parser.add_argument(
        "--peer-python", help="Python of an environment with the published deepspeed; needed for upstream-*"
    )
    parser.add_argument("--rounds", type=int, default=10, help="blocks per contestant (default 10)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per block (default 5)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before the first round (default 6)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--write-report", action="store_true", help="also write benchmarks/results/NAME-DATE.md and .json"
    )
    parser.add_argument("--report-name", metavar="NAME", default="zero", help="NAME of the report (default zero)")
    parser.add_argument("--check", action="store_true", help="exit with code 1 unless every goal is met")
    parser.add_argument(
        "--profile", metavar="CONTESTANT", help="profile this one (rank 0, five steps) instead of timing"
    )
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else []
    names += [arguments.profile] if arguments.profile else []
    if unknown := [name for name in names if name not in CONTESTANTS]:
        parser.error(f"unknown contestant {', '.join(unknown)}; known: {', '.join(CONTESTANTS)}")
    if not arguments.peer_python and any(CONTESTANTS[name].peer for name in names):
        parser.error("upstream-* runs in its own environment: give its interpreter with --peer-python")
    return arguments


def _entries(workload: str, arguments: argparse.Namespace) -> list[str]:
    names = arguments.only.split(",") if arguments.only else DEFAULT_ENTRIES[workload]
    return [name for name in names if arguments.peer_python or not CONTESTANTS[name].peer]


def _profile(workload: str, arguments: argparse.Namespace, console: Console) -> None:
    contestant = CONTESTANTS[arguments.profile]
    with Arena(
        WORKLOADS[workload], [contestant], peer_python=arguments.peer_python, report_progress=console.log
    ) as arena:
        arena.run_rounds(rounds=1, steps=2, warmup=arguments.warmup)
        if failure := arena.results[contestant.name].failure:
            sys.exit(failure)
        texts = arena.profile(contestant.name, 5)
    sys.stdout.write(f"{texts['operators']}\n{texts['functions']}\n")


def main() -> int:
    """Runs what the command line requests; the exit code shows whether goals were met (with ``--check``)."""
    arguments = _arguments()
    progress = Console(stderr=True)
    chosen = arguments.workload or [*WORKLOADS]
    if arguments.profile:
        for workload in chosen:
            _profile(workload, arguments, progress)
        return 0
    facts: dict[str, Any] = {"date": datetime.date.today().isoformat(), "hardware": report.hardware()}
    contests = []
    for workload in chosen:
        entered = [CONTESTANTS[name] for name in _entries(workload, arguments)]
        with (
            progress.status(workload) as line,
            Arena(
                WORKLOADS[workload],
                entered,
                peer_python=arguments.peer_python,
                report_progress=lambda text, line=line, workload=workload: line.update(f"{workload}: {text}"),  # type: ignore[misc]
            ) as arena,
        ):
            arena.run_rounds(rounds=arguments.rounds, steps=arguments.steps, warmup=arguments.warmup)
        contests.append(report.Contest(workload, arena.results))
    versions = {"python": platform.python_version()}
    for contest in contests:
        for result in contest.results.values():
            if result.versions:
                versions["torch of peers" if CONTESTANTS[result.name].peer else "torch"] = result.versions["torch"]
            if result.versions.get("deepspeed"):
                versions["upstream" if CONTESTANTS[result.name].peer else "ours"] = result.versions["deepspeed"]
    facts["versions"] = versions
    facts["hardware"]["load_at_end"] = report.load()
    facts["settings"] = report.settings(rounds=arguments.rounds, steps=arguments.steps, warmup=arguments.warmup)
    console = Console(width=max(Console().width, 132))
    if arguments.json:
        sys.stdout.write(json.dumps(report.as_dict(contests, facts)) + "\n")
    else:
        for contest in contests:
            report.show(console, contest)
    if arguments.write_report:
        progress.print(f"wrote {report.write(_HERE / 'results', contests, facts, arguments.report_name)}")
    failed = any(result.failure for contest in contests for result in contest.results.values())
    unmet = any(verdict.met is not True for c in contests for verdict in c.verdicts if verdict.goal.at_most is not None)
    return 1 if failed or (arguments.check and unmet) else 0


if __name__ == "__main__":
    sys.exit(main())
