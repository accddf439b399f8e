"""Compares the lower bounds of simulated plans with the step times of published runs: no bound may exceed its time.

Every timed run of ``benchmarks.scale`` is planned by ``deepspeed.plan``: the engine runs on tensors without values, and
the operations and exchanges that it counts take at least the time that the maker's rates give. Run:
``python -m benchmarks.scale_bounds [--out FILE] [--only NAME ...] [--jobs N]``; it takes about 8 minutes of processor
time. The exit code is 1 if a bound exceeds its time.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
from benchmarks.published_runs import RECORDS, PublishedRun, predicted, read_runs
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.prediction.layout import ParallelLayout

HOW = (
    "Made by `python -m benchmarks.scale_bounds --out FILE`. Each run of `benchmarks/data/scale-public.json` with a "
    "published time is simulated with its ranks along all axes, schedule, batch and ZeRO stage (with a pipeline at "
    "most stage 1). Recomputation of single operations is left out; without it there are fewer operations, so the "
    "bound is lower. Where a source leaves numbers open, the setup of the fastest prediction is used."
)


class SimulatedBound(NamedTuple):
    """The lower bound of one run.

    Attributes:
        name: Name of the run.
        measured: Published seconds of a step.
        bound: Least seconds of a step; None: the run cannot be simulated.
        cause: Which of the bounds is the highest, or why the run cannot be simulated.
        processor: Processor seconds of the plan.
    """

    name: str
    measured: float
    bound: float | None
    cause: str
    processor: float


def config_of(layout: ParallelLayout) -> dict[str, Any]:
    """Returns the configuration of a layout, for this engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": layout.micro_batch,
        "gradient_accumulation_steps": layout.accumulation,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": layout.stage},
    }
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor, "sequence_parallel_norms": layout.cuts_norms}
    return config


def bound_of(run: PublishedRun) -> SimulatedBound:
    """Returns the bound of a run with a published time."""
    setup, start = predicted(run).setup, time.process_time()
    layout, machine = setup.layout, setup.machine
    sizes = {"pipe": layout.pipe, "tensor": layout.tensor, "sequence": layout.context, "ep": layout.experts}
    options: dict[str, Any] = {name: size for name, size in sizes.items() if size > 1}
    if layout.pipe > 1:
        options |= {"schedule": layout.schedule, "num_chunks": layout.chunks if layout.chunks > 1 else None}
    assert run.seconds is not None
    try:
        plan = deepspeed.plan(
            setup.shape,
            config_of(layout),
            nodes=machine.nodes,
            devices_per_node=machine.devices_per_node,
            device=machine.device,
            network=machine.network,
            sequence_length=setup.tokens,
            activation_checkpointing=layout.recompute == "full",
            fp8=layout.is_fp8,
            compare_checkpointing=False,
            suggest=False,
            **options,
        )
    except DeepSpeedConfigError as error:
        return SimulatedBound(run.name, run.seconds, None, str(error), time.process_time() - start)
    bounds = plan.lower_bounds
    highest = max(bounds, key=bounds.__getitem__)
    return SimulatedBound(run.name, run.seconds, plan.step_seconds, highest, time.process_time() - start)


def report(found: Iterable[SimulatedBound]) -> str:
    """Returns the table of all runs."""
    rows = list(found)
    shares = {row.name: row.bound / row.measured for row in rows if row.bound is not None}
    above = [name for name, share in shares.items() if share > 1]
    lines = ["# Bounds of simulated plans beside published times", "", HOW, ""]
    lines += [f"{len(shares)} of {len(rows)} runs simulated. "]
    if shares:
        lines[-1] += f"The highest bound is {max(shares.values()):.0%} of its time. "
    lines[-1] += f"Above their times: {', '.join(above) or 'none'}."
    lines += ["", "| run | measured s | bound s | share | highest bound | processor s |", "|---|---|---|---|---|---|"]
    for row in rows:
        bound = "not simulated | |" if row.bound is None else f"{row.bound:.4g} | {row.bound / row.measured:.0%} |"
        lines.append(f"| {row.name} | {row.measured:.4g} | {bound} {row.cause} | {row.processor:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--only", nargs="+", help="names of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each in a process")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of records to use instead")
    options = parser.parse_args()
    runs = [run for run in read_runs(options.records) if run.seconds and run.name in (options.only or [run.name])]
    found = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=4) as pool:
        for bound in pool.imap(bound_of, runs):
            found.append(bound)
            print(bound, file=sys.stderr, flush=True)
    text = report(found)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return int(any(bound.bound is not None and bound.bound > bound.measured for bound in found))


if __name__ == "__main__":
    sys.exit(main())
