"""Measures what monitors, progress lines and logs cost per step, beside a training without them.

    deepspeed --num_gpus 2 benchmarks/monitoring.py [--rounds 12] [--write-report]

Every setting has an engine of its own on the same model. The engines take turns of a few steps, in a new order each
round, so that other load of the machine affects all alike. Two figures per setting:

- *ratio*: median step time divided by that of the setting "nothing"; as noisy as the machine.
- *inside*: time per step inside `ProgressLog` and its trackers, as a share of the step of "nothing". It does not
  include other threads (TensorBoard's writer) and what the comms logger adds around each transfer.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.comm.base.counters import waiting
from deepspeed.comm.base.recorder import log

HERE = Path(__file__).parent
STEPS = 6  # per turn; the first is not timed
GOAL = 0.01


def settings(folder: str) -> dict[str, dict[str, Any]]:
    """Returns the sections of every setting, by its name."""

    def files(name: str) -> dict[str, Any]:
        return {"enabled": True, "output_path": folder, "job_name": name}

    return {
        "nothing": {},
        "csv_monitor": {"csv_monitor": files("csv")},
        "tensorboard": {"tensorboard": files("tensorboard")},
        "steps_per_print: 1": {"steps_per_print": 1},
        "wall_clock_breakdown, printed every 10 steps": {"wall_clock_breakdown": True, "steps_per_print": 10},
        "comms_logger": {"comms_logger": {"enabled": True}},
        "run_report": {"run_report": {"path": f"{folder}/run"}},
        "run_report.stragglers without a folder": {"run_report": {"stragglers": True}},
        "csv, tensorboard, breakdown, steps_per_print: 10": {
            "csv_monitor": files("all"),
            "tensorboard": files("all"),
            "wall_clock_breakdown": True,
            "steps_per_print": 10,
        },
    }


class Contestant:
    """One setting with its engine."""

    def __init__(self, name: str, sections: dict[str, Any], stage: int) -> None:
        self.name = name
        torch.manual_seed(0)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        model = nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, **options) for _ in range(6)))
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
            **sections,
        }
        waiting.is_running, trackers_before = False, len(waiting._trackers)
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        self._times_waits, self._wait_trackers = waiting.is_running, waiting._trackers[trackers_before:]
        self.x = torch.randn(4, 64, 256, device=self.engine.device)
        self.times: list[float] = []
        self.inside: list[float] = []
        self._inside_step = 0.0
        progress = self.engine._progress
        for method in ("before", "after", "loss", "inputs", "step"):
            setattr(progress, method, self._timed(getattr(progress, method)))
        for tracker in progress._trackers:
            for method in ("wait_begins", "wait_ends"):
                setattr(tracker, method, self._timed(getattr(tracker, method)))

    def _timed(self, method: Any) -> Any:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            self._inside_step += time.perf_counter() - started
            return result

        return call

    def turn(self) -> None:
        """Runs a few steps with this setting's timing of waits and its log of transfers only."""
        waiting.is_running, waiting._trackers = self._times_waits, list(self._wait_trackers)
        log.enabled = self.name == "comms_logger"
        for number in range(STEPS):
            comm.barrier()
            self._inside_step, started = 0.0, time.perf_counter()
            self.engine.backward(self.engine(self.x).square().mean())
            self.engine.step()
            if number:
                self.times.append(time.perf_counter() - started)
                self.inside.append(self._inside_step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--write-report", action="store_true")
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    arguments = parser.parse_args()
    comm.init_distributed()
    with tempfile.TemporaryDirectory() as folder:
        contestants = [Contestant(name, sections, arguments.stage) for name, sections in settings(folder).items()]
        trackers = waiting._trackers
        order = random.Random(0)
        for _ in range(arguments.rounds):
            for contestant in order.sample(contestants, len(contestants)):
                contestant.turn()
        waiting._trackers = trackers  # of all engines: each removes its own
        for contestant in contestants:
            contestant.engine.destroy()
    if comm.get_rank() == 0:
        text = report(contestants, arguments)
        print(text)
        if arguments.write_report:
            (HERE / "results" / f"monitoring-{date.today()}.md").write_text(text, encoding="utf-8")


def report(contestants: list[Contestant], arguments: argparse.Namespace) -> str:
    """Returns the report in Markdown."""
    base = statistics.median(contestants[0].times)
    device = contestants[0].engine.device
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(device),
        "ranks": comm.get_world_size(),
        "stage": arguments.stage,
        "load at the end": round(os.getloadavg()[0], 1),
        "timed steps per setting": len(contestants[0].times),
    }
    lines = [
        "# What monitoring costs",
        "",
        "`benchmarks/monitoring.py` describes the figures: *ratio* is that of whole steps (noisy), *inside* the time",
        f"in the code of monitoring alone, on rank 0. Goal: at most {GOAL:.0%} of the step.",
        "",
        f"`{json.dumps(facts)}`",
        "",
        "| setting | median step ms | quartiles | ratio | inside, us per step | inside, share of a step | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for contestant in contestants:
        low, middle, high = statistics.quantiles(contestant.times, n=4, method="inclusive")
        inside = statistics.mean(contestant.inside)
        share = inside / base
        lines.append(
            f"| {contestant.name} | {middle * 1e3:.1f} | {low * 1e3:.1f}-{high * 1e3:.1f} | {middle / base:.3f} | "
            f"{inside * 1e6:.0f} | {share:.2%} | {'met' if share <= GOAL else 'missed'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
