"""Times schedules of pipelines on CPU ranks: this project, torch.distributed.pipelining and the published package.

Workloads:

- sleep: layers that sleep, so that few cores are enough and only the schedule matters. Beside each time is the makespan
  that the simulator computes without any overhead.
- transfer: the same with large activations between the stages.
- gpt: a small language model that computes, eight blocks on two stages.

The contestants of a workload take turns, a step each per round, in a new order each round. With ``--apart`` each is
started and ended alone, which needs less memory. A step's time is that of its slowest rank; reported are the median and
the fastest. A contestant that ends, or does not answer within ``--time-limit``, is reported so, and the others
continue. ``--help`` shows the options.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from contest.extensions import ExtensionFolder
from rich.console import Console
from rich.table import Table

from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES, make_schedule
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.ports import free_port

T = TypeVar("T")
COMPILE_SECONDS = 600.0  # time limit for the start of the published package where it has to compile
ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).parent / "contest" / "pipeline_rank.py"
# Sizes of each workload, and its contestants.
WORKLOADS: dict[str, dict[str, Any]] = {
    "sleep": {"stages": 4, "micro_batches": 8, "megabytes": 0},
    "transfer": {"stages": 4, "micro_batches": 8, "megabytes": 32},
    "gpt": {"stages": 2, "micro_batches": 8, "hidden": 256, "length": 128, "rows": 4},
}
ENTERED = {
    "sleep": [
        *(f"ours:{name}" for name in TRAIN_SCHEDULES),
        *(f"torch:{name}" for name in TRAIN_SCHEDULES),
        "torch:interleaved-zb",
    ],
    "transfer": ["ours:1f1b", "torch:1f1b"],
    "gpt": ["ours:1f1b", "torch:1f1b"],
}
# Those of the published package need --peer-python.
UPSTREAM = {"sleep": ["upstream:1f1b", "upstream:dualpipev"], "transfer": ["upstream:1f1b"], "gpt": ["upstream:1f1b"]}


class ContestantFailed(Exception):
    """A contestant has ended, or does not answer."""


class Contestant:
    """The processes of one contestant.

    Attributes:
        name: Kind and schedule.
        steps: Results of its counted steps.
        failure: Why it takes no further turn; empty while it does.
    """

    def __init__(
        self,
        name: str,
        setup: dict[str, Any],
        peer_python: str | None,
        extensions: ExtensionFolder | None,
        time_limit: float,
    ) -> None:
        self.name = name
        self.steps: list[dict[str, float]] = []
        self.failure = ""
        self._time_limit = time_limit
        kind, _, schedule = name.partition(":")
        self._compiles = kind == "upstream" and extensions is not None and not extensions.is_built
        port = free_port()
        self._ranks = []
        for rank in range(setup["stages"]):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": setup["stages"], "LOCAL_WORLD_SIZE": setup["stages"],
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "DS_ACCELERATOR": "cpu",
            }  # fmt: skip
            python = peer_python if kind == "upstream" else sys.executable
            message = {**setup, "kind": kind, "schedule": schedule, "environment": environment}
            paths = {"PYTHONPATH": str(ROOT)} if kind == "ours" else {}
            if kind == "upstream" and extensions is not None:
                paths["TORCH_EXTENSIONS_DIR"] = str(extensions.path)
            self._ranks.append(
                subprocess.Popen(
                    [str(python), str(RANK), json.dumps(message)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**{k: v for k, v in os.environ.items() if k != "PYTHONPATH"}, **paths},
                    cwd=RANK.parent,
                )
            )

    def get_ready(self) -> None:
        """Waits until all ranks have built their stages."""
        for line in self._answers(COMPILE_SECONDS if self._compiles else self._time_limit):
            assert line == "ready\n", line

    def step(self) -> dict[str, float]:
        """Runs a step; returns the seconds of the slowest rank, processor seconds of the busiest, and the loss."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write("step\n")
            rank.stdin.flush()
        answers = [json.loads(line) for line in self._answers(self._time_limit)]
        return {
            "seconds": max(answer["seconds"] for answer in answers),
            "busy": max(answer["busy"] for answer in answers),
            "loss": max((answer["loss"] for answer in answers), key=abs),
        }

    def _answers(self, limit: float) -> list[str]:
        deadline = time.monotonic() + limit
        return [self._answer(rank, deadline, limit) for rank in self._ranks]

    def _answer(self, rank: subprocess.Popen[str], deadline: float, limit: float) -> str:
        assert rank.stdout is not None
        if not select.select([rank.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise ContestantFailed(f"did not answer in {limit:.0f} s")
        if line := rank.stdout.readline():
            return line
        raise ContestantFailed("ended before it answered")

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()


def measure(names: list[str], setup: dict[str, Any], options: argparse.Namespace) -> list[Contestant]:
    """Runs all contestants in turns. The first two steps of each connect and allocate, and are not counted."""
    shuffle = random.Random(0)
    extensions = ExtensionFolder(options.peer_python) if options.peer_python else None
    groups = [[name] for name in names] if options.apart else [names]
    measured = []
    for group in groups:
        started: list[Contestant] = []
        if extensions is not None:
            extensions.remove_left_over()
        try:
            started += [Contestant(name, setup, options.peer_python, extensions, options.time_limit) for name in group]
            for contestant in started:
                _try(contestant, contestant.get_ready)
            for number in range(options.rounds + 2):
                for contestant in shuffle.sample(started, len(started)):
                    step = _try(contestant, contestant.step)
                    if step is not None and number >= 2:
                        contestant.steps.append(step)
        finally:
            for contestant in started:
                contestant.end()
        measured += started
    return measured


def _try(contestant: Contestant, turn: Callable[[], T]) -> T | None:
    """Returns the result of a turn; None if the contestant fails or has failed before."""
    if contestant.failure:
        return None
    try:
        return turn()
    except (ContestantFailed, BrokenPipeError) as error:
        contestant.failure = str(error)
        contestant.steps.clear()
        contestant.end()
        return None


def report(workload: str, measured: list[Contestant], setup: dict[str, Any]) -> Table:
    """Returns the table of a workload, with a row per contestant."""
    table = Table(title=f"{workload}: {setup['stages']} stages, {setup['micro_batches']} micro-batches (ms)")
    table.add_column("contestant")
    for column in ("median", "fastest", "simulated", "over it (%)", "busiest cpu", "ratio to torch", "to upstream"):
        table.add_column(column, justify="right")
    medians = {c.name: 1000 * statistics.median(step["seconds"] for step in c.steps) for c in measured if c.steps}
    for contestant in measured:
        if contestant.failure:
            table.add_row(contestant.name, contestant.failure)
            continue
        kind, _, schedule = contestant.name.partition(":")
        median = medians[contestant.name]
        cells = [f"{median:.0f}", f"{1000 * min(step['seconds'] for step in contestant.steps):.0f}"]
        if workload == "gpt" or schedule not in TRAIN_SCHEDULES:
            cells += ["", ""]
        else:
            # With two layers per stage, a schedule with chunks has two.
            times = Times(setup["forward"], setup["backward"], setup["weight"])
            simulated = simulate(make_schedule(schedule, setup["stages"], setup["micro_batches"]), times).makespan
            cells += [f"{simulated:.0f}", f"{100 * (median / simulated - 1):.1f}"]
        cells.append(f"{1000 * statistics.median(step['busy'] for step in contestant.steps):.0f}")
        for other in ("torch", "upstream"):
            peer = medians.get(f"{other}:{schedule}")
            cells.append(f"{median / peer:.3f}" if peer and kind == "ours" else "")
        table.add_row(contestant.name, *cells)
    losses = {contestant.steps[-1]["loss"] for contestant in measured if contestant.steps}
    table.caption = f"losses of the last step: {', '.join(f'{loss:.6g}' for loss in sorted(losses))}"
    return table


def main() -> None:
    """Prints a table per workload, or JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workload", choices=[*WORKLOADS], nargs="+", default=[*WORKLOADS])
    parser.add_argument("--only", help="contestants, separated by commas: ours:zbv,torch:zbv,upstream:1f1b")
    parser.add_argument("--peer-python", help="Python of an environment with the published deepspeed")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="time limit in seconds, for the start and for each step"
    )
    parser.add_argument("--apart", action="store_true", help="measure one contestant at a time")
    parser.add_argument("--json", action="store_true")
    sizes = parser.add_argument_group("sizes; times in milliseconds per stage and micro-batch")
    sizes.add_argument("--stages", type=int, help="default: 4, gpt: 2")
    sizes.add_argument("--micro-batches", type=int, help="default: 8")
    sizes.add_argument("--megabytes", type=int, help="size of an activation in workload transfer, default 32")
    sizes.add_argument("--forward", type=float, default=40.0)
    sizes.add_argument("--backward", type=float, default=80.0)
    sizes.add_argument("--weight", type=float, default=40.0, help="time of the part of the backward for weights")
    options = parser.parse_args()
    for workload in options.workload:
        chosen = {name: getattr(options, name) for name in ("stages", "micro_batches", "megabytes")}
        setup = {
            **WORKLOADS[workload],
            **{name: value for name, value in chosen.items() if value is not None and name in WORKLOADS[workload]},
            **{name: getattr(options, name) for name in ("forward", "backward", "weight")},
            "workload": workload,
        }
        names = ENTERED[workload] + (UPSTREAM[workload] if options.peer_python else [])
        if options.only:
            names = options.only.split(",")
        measured = measure(names, setup, options)
        if options.json:
            for contestant in measured:
                row = {"workload": workload, "name": contestant.name, "steps": contestant.steps}
                sys.stdout.write(json.dumps({**row, "failure": contestant.failure}) + "\n")
        else:
            Console(width=max(110, Console().width)).print(report(workload, measured, setup))


if __name__ == "__main__":
    main()
