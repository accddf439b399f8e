"""Times schedules of pipelines on CPU ranks: this project, torch.distributed.pipelining and the published package.

Workloads:

- sleep: layers that sleep, so that few cores show what many devices would do: the schedule and nothing else. Beside
  each time stands what the simulator computes for a machine that loses nothing.
- transfer: the same with large activations between the stages.
- gpt: a small language model, eight blocks on two stages, which computes.

Contestants of a workload are alive together and take turns, a step each per round, in an order that changes from round
to round; with ``--apart`` one after the other is started and ended, which needs less memory. A step's time is that of
its slowest rank; reported is the median, with the fastest beside it. A contestant that ends or does not answer within
``--time-limit`` has that in its row, and the others continue. Run ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import socket
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

T = TypeVar("T")
COMPILE_SECONDS = 600.0  # the longest that the published package may take to get ready where it has to compile
ROOT = Path(__file__).resolve().parents[1]
RANK = Path(__file__).parent / "contest" / "pipeline_rank.py"
# What each workload's contestants get beside the options, and which of them take part.
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
# The published package has these; they enter where --peer-python gives its interpreter.
UPSTREAM = {"sleep": ["upstream:1f1b", "upstream:dualpipev"], "transfer": ["upstream:1f1b"], "gpt": ["upstream:1f1b"]}


class OutOfTheRace(Exception):
    """A contestant has ended, or does not answer."""


class Contestant:
    """The processes of one contestant.

    Attributes:
        name: Kind and schedule.
        took: What its counted steps took.
        why_out: Why it takes no further turn; empty while it does.
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
        self.took: list[dict[str, float]] = []
        self.why_out = ""
        self._time_limit = time_limit
        kind, _, schedule = name.partition(":")
        self._compiles = kind == "upstream" and extensions is not None and not extensions.is_built
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
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
        """Waits until all ranks have built their part."""
        for line in self._answers(COMPILE_SECONDS if self._compiles else self._time_limit):
            assert line == "ready\n", line

    def step(self) -> dict[str, float]:
        """One step of all ranks: the seconds of the slowest, processor seconds of the busiest, the loss."""
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
            raise OutOfTheRace(f"did not answer in {limit:.0f} s")
        if line := rank.stdout.readline():
            return line
        raise OutOfTheRace("ended before it answered")

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.wait()


def measure(names: list[str], setup: dict[str, Any], options: argparse.Namespace) -> list[Contestant]:
    """Runs all contestants in turns. Does not count the first steps, which connect and allocate."""
    shuffle = random.Random(0)
    extensions = ExtensionFolder(options.peer_python) if options.peer_python else None
    groups = [[name] for name in names] if options.apart else [names]
    measured = []
    for group in groups:
        alive: list[Contestant] = []
        if extensions is not None:
            extensions.remove_left_over()
        try:
            alive += [Contestant(name, setup, options.peer_python, extensions, options.time_limit) for name in group]
            for contestant in alive:
                _try(contestant, contestant.get_ready)
            for number in range(options.rounds + 2):
                for contestant in shuffle.sample(alive, len(alive)):
                    took = _try(contestant, contestant.step)
                    if took is not None and number >= 2:
                        contestant.took.append(took)
        finally:
            for contestant in alive:
                contestant.end()
        measured += alive
    return measured


def _try(contestant: Contestant, turn: Callable[[], T]) -> T | None:
    """Returns the result of a turn; None if the contestant has dropped out or drops out in it."""
    if contestant.why_out:
        return None
    try:
        return turn()
    except (OutOfTheRace, BrokenPipeError) as error:
        contestant.why_out = str(error)
        contestant.took.clear()
        contestant.end()
        return None


def report(workload: str, measured: list[Contestant], setup: dict[str, Any]) -> Table:
    """One row per contestant."""
    table = Table(title=f"{workload}: {setup['stages']} stages, {setup['micro_batches']} micro-batches (ms)")
    table.add_column("contestant")
    for column in ("median", "fastest", "simulated", "over it (%)", "busiest cpu", "ratio to torch", "to upstream"):
        table.add_column(column, justify="right")
    medians = {c.name: 1000 * statistics.median(took["seconds"] for took in c.took) for c in measured if c.took}
    for contestant in measured:
        if contestant.why_out:
            table.add_row(contestant.name, contestant.why_out)
            continue
        kind, _, schedule = contestant.name.partition(":")
        median = medians[contestant.name]
        cells = [f"{median:.0f}", f"{1000 * min(took['seconds'] for took in contestant.took):.0f}"]
        if workload == "gpt" or schedule not in TRAIN_SCHEDULES:
            cells += ["", ""]
        else:
            # As this project has them, with two layers per stage and so two chunks where there are several.
            times = Times(setup["forward"], setup["backward"], setup["weight"])
            simulated = simulate(make_schedule(schedule, setup["stages"], setup["micro_batches"]), times).makespan
            cells += [f"{simulated:.0f}", f"{100 * (median / simulated - 1):.1f}"]
        cells.append(f"{1000 * statistics.median(took['busy'] for took in contestant.took):.0f}")
        for other in ("torch", "upstream"):
            peer = medians.get(f"{other}:{schedule}")
            cells.append(f"{median / peer:.3f}" if peer and kind == "ours" else "")
        table.add_row(contestant.name, *cells)
    losses = {contestant.took[-1]["loss"] for contestant in measured if contestant.took}
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
        given = {name: getattr(options, name) for name in ("stages", "micro_batches", "megabytes")}
        setup = {
            **WORKLOADS[workload],
            **{name: value for name, value in given.items() if value is not None and name in WORKLOADS[workload]},
            **{name: getattr(options, name) for name in ("forward", "backward", "weight")},
            "workload": workload,
        }
        names = ENTERED[workload] + (UPSTREAM[workload] if options.peer_python else [])
        if options.only:
            names = options.only.split(",")
        measured = measure(names, setup, options)
        if options.json:
            for contestant in measured:
                row = {"workload": workload, "name": contestant.name, "took": contestant.took}
                sys.stdout.write(json.dumps({**row, "why_out": contestant.why_out}) + "\n")
        else:
            Console(width=max(110, Console().width)).print(report(workload, measured, setup))


if __name__ == "__main__":
    main()
