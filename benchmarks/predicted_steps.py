"""Compares predicted steps with measured ones on this machine's processors, along every axis.

For each number of ranks the machine is measured first (as ``ds_plan --measure`` does), then the same ranks train and
time every case. Afterwards each case is planned with the measured figures.

Other programs may use the machine, more at one time than at another. So a block of the probe runs before and after
every step. Its time divided by the time that the measured figures predict for it is the load, by which the step's time
is divided. Reported is the median over steps of the slowest rank's time. Run: ``python -m benchmarks.predicted_steps
[--ranks 1 2 4] [--steps 5] [--out FILE]``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import deepspeed
from deepspeed import comm
from deepspeed.pipe import PipelineModule
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder, layers_of, token_loss
from deepspeed.plan.machine import read_machine_file, write_machine_file
from deepspeed.plan.measuring.block_probe import block_runner, predict_block
from deepspeed.plan.measuring.machine import CPU_SIZES, measure_device
from deepspeed.ports import free_port

SHAPE = DecoderShape(layers=4, hidden=384, heads=8, vocab=2048)
EXPERTS = replace(SHAPE, experts=4, intermediate=384)
TOKENS, SAMPLES, WARMUPS = 128, 2, 2
GOAL = 0.15
HOW = (
    "Made by `python -m benchmarks.predicted_steps --out FILE`. The load is the time of a block of the probe before "
    "and after a step divided by the time that the measured figures predict for it. Measured steps are divided by the "
    "load, which removes an error that block and step have in common: the error shown is that of cases relative to "
    "each other. Medians, slowest rank. Where ranks share cores all are slower, and a stage is faster while others "
    "wait."
)


@dataclass(frozen=True)
class StepCase:
    """One training.

    Attributes:
        name: In the table.
        zero: Section ``zero_optimization``.
        shape: The model.
        degrees: Ranks along axes other than data, by the argument of :func:`deepspeed.plan`.
        accumulation: Micro-batches of a step.
    """

    name: str
    zero: dict[str, Any] = field(default_factory=lambda: {"stage": 0})
    shape: DecoderShape = SHAPE
    degrees: dict[str, int] = field(default_factory=dict)
    accumulation: int = 1

    def config(self) -> dict[str, Any]:
        """Returns the configuration."""
        made: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": self.zero,
            "steps_per_print": 10**6,
        }
        if "tensor" in self.degrees:
            made["tensor_parallel"] = {"autotp_size": self.degrees["tensor"]}
        return made


def cases(ranks: int) -> list[StepCase]:
    """Returns the trainings on ``ranks`` ranks."""
    found = [StepCase(f"stage {stage}", {"stage": stage}) for stage in range(4)]
    offload = {"offload_optimizer": {"device": "cpu"}}
    found.append(StepCase("stage 2, optimizer offloaded", {"stage": 2, **offload}))
    found.append(StepCase("stage 3, all offloaded", {"stage": 3, **offload, "offload_param": {"device": "cpu"}}))
    found.append(StepCase(f"experts over {ranks}", shape=replace(EXPERTS, expert_ranks=ranks), degrees={"ep": ranks}))
    if ranks > 1:
        found.append(StepCase(f"pipe {ranks}", degrees={"pipe": ranks}, accumulation=4))
        found.append(StepCase(f"tensor {ranks}", degrees={"tensor": ranks}))
    return found


def predict_case(case: StepCase, machine: Path, ranks: int) -> float:
    """Returns the predicted seconds of a step with the figures of a machine file."""
    plan = deepspeed.plan(
        replace(case.shape, expert_ranks=1),
        case.config(),
        devices_per_node=ranks,
        device=read_machine_file(machine),
        sequence_length=TOKENS,
        compare_checkpointing=False,
        suggest=False,
        **case.degrees,
    )
    assert plan.timed_step is not None
    return plan.timed_step.seconds


def _make_step(case: StepCase) -> Callable[[], Any]:
    """Returns a function that trains one step."""
    torch.manual_seed(0)
    batch = torch.randint(0, case.shape.vocab, (SAMPLES, TOKENS))
    if "pipe" in case.degrees:
        module = PipelineModule(layers_of(case.shape), num_stages=case.degrees["pipe"], loss_fn=token_loss)
        engine = deepspeed.initialize(model=module, config=case.config())[0]
        samples = itertools.repeat((batch, batch))
        return lambda: engine.train_batch(samples)
    engine = deepspeed.initialize(model=Decoder(case.shape), config=case.config())[0]

    def step() -> None:
        for _ in range(case.accumulation):
            engine.backward(engine(batch, batch))
            engine.step()

    return step


def _rank(rank: int, ranks: int, port: int, folder: str, steps: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", ranks), ("LOCAL_WORLD_SIZE", ranks)):
        os.environ[name] = str(value)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    comm.init_distributed(verbose=False)
    device = measure_device()
    block = block_runner(CPU_SIZES, CPU_SIZES.micro_batches[1], torch.device("cpu"))
    predicted = predict_block(CPU_SIZES, CPU_SIZES.micro_batches[1], torch.device("cpu"), device)
    found: dict[str, tuple[float, float, float]] = {}
    for case in cases(ranks):
        step = _make_step(case)
        for _ in range(WARMUPS):
            step()
        blocks, seconds = [_slowest(block)], []
        for _ in range(steps):
            seconds.append(_slowest(step))
            blocks.append(_slowest(block))
        loads = [(before + after) / 2 / predicted for before, after in itertools.pairwise(blocks)]
        found[case.name] = (
            statistics.median(raw / load for raw, load in zip(seconds, loads, strict=True)),
            statistics.median(loads),
            statistics.median(seconds),
        )
    if rank == 0:
        write_machine_file(device, Path(folder) / "machine.json")
        (Path(folder) / "steps.json").write_text(json.dumps(found), encoding="utf-8")
    comm.barrier()
    comm.destroy_process_group()


def _slowest(call: Callable[[], Any]) -> float:
    """Returns the seconds that a call takes on the slowest rank."""
    comm.barrier()
    start = time.perf_counter()
    call()
    seconds = torch.tensor([time.perf_counter() - start])
    comm.all_reduce(seconds, op=comm.ReduceOp.MAX)
    return float(seconds)


Row = tuple[str, float, float, float, float]
"""Name, measured seconds divided by the load, load, measured seconds, predicted seconds."""


def compare(ranks: int, steps: int) -> tuple[list[Row], str]:
    """Measures and predicts every case; returns the rows, and the machine's figures as text."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (ranks, free_port(), folder, steps), nprocs=ranks, start_method="spawn")
        machine = Path(folder) / "machine.json"
        measured = json.loads((Path(folder) / "steps.json").read_text(encoding="utf-8"))
        rows = [(case.name, *measured[case.name], predict_case(case, machine, ranks)) for case in cases(ranks)]
        device = read_machine_file(machine)
        reached = device.efficiency
        figures = (
            f"{ranks} ranks: products {device.flops / 1e9:.1f} GFLOP/s, "
            f"elementwise {device.memory_bandwidth / 1e9:.2f} GB/s, collectives {device.link / 1e9:.2f} GB/s "
            f"after {1e3 * reached.start:.2f} ms, sums of activations {reached.shared_link / 1e9:.2f} GB/s read "
            f"after {1e3 * reached.shared_start:.2f} ms, "
            f"{1e6 * reached.launch:.0f} us per operation, factor {reached.factor:.2f}"
        )
        return rows, figures


def report(found: dict[int, tuple[list[Row], str]]) -> str:
    """Returns the table of all cases."""
    by_ranks = {
        ranks: [abs(predicted / measured - 1) for _, measured, _, _, predicted in rows]
        for ranks, (rows, _) in found.items()
    }
    errors = [error for own in by_ranks.values() for error in own]
    with_load = [abs(predicted / raw - 1) for rows, _ in found.values() for _, _, _, raw, predicted in rows]
    lines = ["# Predicted and measured steps on processors", "", HOW, ""]
    lines += [f"A decoder of {SHAPE.layers} layers, hidden {SHAPE.hidden}, {SAMPLES} x {TOKENS} tokens, fp32, "]
    lines[-1] += f"one thread per rank, {os.cpu_count()} cores, load average {os.getloadavg()[1]:.1f} at the end."
    lines += [f"Median error of {len(errors)} cases: {statistics.median(errors):.1%} (goal {GOAL:.0%}), "]
    lines[-1] += f"worst {max(errors):.1%}; "
    lines[-1] += ", ".join(f"{ranks} ranks {statistics.median(own):.1%}" for ranks, own in by_ranks.items())
    lines[-1] += f". Beside times that are not divided by the load: {statistics.median(with_load):.1%}."
    lines += [""]
    lines += [f"- {figures}" for _, figures in found.values()]
    lines += [
        "",
        "| ranks | case | measured ms | load | without load | predicted ms | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for ranks, (rows, _) in found.items():
        for name, measured, load, raw, predicted in rows:
            cells = f"{1e3 * raw:.0f} | {load:.2f} | {1e3 * measured:.0f} | {1e3 * predicted:.0f}"
            cells += f" | {predicted / measured - 1:+.1%}"
            lines.append(f"| {ranks} | {name} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each case")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    text = report({ranks: compare(ranks, options.steps) for ranks in options.ranks})
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
