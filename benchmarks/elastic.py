"""What it costs to lose a rank: detection, regroup, transfer, first step; and what copies cost while nothing fails.

    python benchmarks/elastic.py [--ranks 2 3 4] [--width N] [--no-torchrun] [--torchft] [--write-report]

Beside it the same loss under `torchrun --max-restarts`, which starts all ranks again from the last checkpoint, and,
with `--torchft` where that is installed, with as many replica groups of torchft of one process each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
STEPS, DEATH = 24, 12
BATCH, MICRO = 48, 2


def config_for(width: int, *, elastic: bool) -> dict[str, Any]:
    """ZeRO stage 2 in bf16; ``elastic``: ranks may be lost."""
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO}
    return {
        **sizes,
        **({"elasticity": {"continue": True}} if elastic else {}),
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }


def make_model(width: int) -> torch.nn.Module:
    """Four wide layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])


class Marks:
    """Appends a line with the time of each event."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"marks-{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        """Writes a line."""
        self._file.write(json.dumps({"time": time.time(), **facts}) + "\n")


def die_once(folder: Path, marks: Marks) -> None:
    """Kills the last rank in its step, the first time."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and not (folder / "killed").exists():
        (folder / "killed").touch()
        marks.write(event="killed")
        os.kill(os.getpid(), signal.SIGKILL)


def elastic_worker(folder: Path, width: int) -> None:
    """Trains through a loss."""
    import deepspeed
    from deepspeed.elasticity import ElasticSteps

    engine, *_ = deepspeed.initialize(model=make_model(width), config=config_for(width, elastic=True))
    data = list(torch.randn(256, width))
    marks, steps = Marks(folder), ElasticSteps(engine, data, STEPS)
    for step in steps:
        busy, copying = time.process_time(), steps.copy_cost.processor
        with step:
            for x in step:
                engine.backward(engine(x.bfloat16()).float().pow(2).mean())
                if step.number == DEATH:
                    die_once(folder, marks)
                engine.step()
        busy, copying = time.process_time() - busy, steps.copy_cost.processor - copying
        times = {"seconds": step.seconds, "processor": busy, "copying": copying}
        marks.write(event="step", step=step.number, done=step.is_done, **times)
    cost = steps.copy_cost
    for recovery in steps.recoveries:
        marks.write(event="recovery", cost=vars(cost), **vars(recovery))


def restarted_worker(folder: Path, width: int) -> None:
    """Trains, saves after each step, and continues from the last checkpoint when torchrun starts it again."""
    import deepspeed

    ranks = int(os.environ["WORLD_SIZE"])
    config = config_for(width, elastic=False)
    config["train_batch_size"] = BATCH // (MICRO * ranks) * MICRO * ranks
    engine, *_ = deepspeed.initialize(model=make_model(width), config=config)
    marks = Marks(folder)
    if (folder / "saved" / "latest").exists():
        engine.load_checkpoint(folder / "saved")
    data = torch.randn(256, width)
    while engine.global_steps < STEPS:
        started, number = time.time(), engine.global_steps
        for micro in range(engine.gradient_accumulation_steps()):
            x = data[micro * MICRO : (micro + 1) * MICRO].bfloat16()
            engine.backward(engine(x).float().pow(2).mean())
            if number == DEATH:
                die_once(folder, marks)
            engine.step()
        marks.write(event="step", step=number, done=True, seconds=time.time() - started)
        engine.save_checkpoint(folder / "saved")


def torchft_worker(folder: Path, width: int) -> None:
    """Trains in fp32 as one replica group of torchft, whose other groups continue with a smaller batch after a loss.

    Its ``DistributedDataParallel`` (0.2.0) fails on an assertion in the ranks that are left, so gradients are summed
    here one by one.
    """
    from datetime import timedelta

    import torch.distributed as dist
    import torchft

    rank, ranks, patience = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = make_model(width)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(states: dict[str, Any]) -> None:
        model.load_state_dict(states["model"])
        adamw.load_state_dict(states["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=patience), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": adamw.state_dict()}, replica_id=f"group{rank}",
        timeout=patience, quorum_timeout=patience, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
    )  # fmt: skip
    optimizer, data, marks = torchft.Optimizer(manager, adamw), torch.randn(256, width), Marks(folder)
    while manager.current_step() < STEPS:
        started, number = time.time(), manager.current_step()
        optimizer.zero_grad()
        for micro in range(BATCH // MICRO // ranks):
            model(data[micro * MICRO : (micro + 1) * MICRO]).pow(2).mean().backward()
        if number == DEATH:
            die_once(folder, marks)
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        optimizer.step()
        marks.write(event="step", step=number, done=manager.current_step() > number, seconds=time.time() - started)
    os._exit(0)  # its threads would wait for the others


def run_torchft(ranks: int, width: int) -> list[dict[str, Any]]:
    """Starts the lighthouse and the replica groups, and returns what they have written, by time."""
    from torchft.coordination import LighthouseServer

    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    own = [str(Path(__file__).resolve()), "--worker", "torchft", "--folder", str(folder), "--width", str(width)]
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    groups = []
    try:
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            with (folder / f"log-{rank}").open("w") as log:
                groups.append(subprocess.Popen([sys.executable, *own], env=environment, stdout=log, stderr=log))
        codes = [group.wait(300) for group in groups]
        assert codes.count(0) == ranks - 1, [path.read_text()[-2000:] for path in folder.glob("log-*")]
        lines = [json.loads(line) for path in folder.glob("marks-*") for line in path.read_text().splitlines()]
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()
        shutil.rmtree(folder)
    return sorted(lines, key=lambda line: line["time"])


def run(kind: str, ranks: int, width: int) -> list[dict[str, Any]]:
    """Starts the ranks and returns what they have written, by time."""
    folder = Path(tempfile.mkdtemp(prefix="elastic-"))
    own = [str(Path(__file__).resolve()), "--worker", kind, "--folder", str(folder), "--width", str(width)]
    starter = (
        ["-m", "deepspeed.launcher.runner", "--num_gpus", str(ranks)]
        if kind == "elastic"
        else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *starter, *own], env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-3000:]
        lines = [json.loads(line) for path in folder.glob("marks-*") for line in path.read_text().splitlines()]
    finally:
        shutil.rmtree(folder)
    return sorted(lines, key=lambda line: line["time"])


def seconds_lost(lines: list[dict[str, Any]]) -> float:
    """Returns the seconds from the kill until a rank has finished the step in which it happened."""
    killed = next(line["time"] for line in lines if line["event"] == "killed")
    again = (line for line in lines if line["event"] == "step" and line["time"] > killed and line["done"])
    return min(line["time"] for line in again if line["step"] >= DEATH) - killed


def measure(ranks: int, width: int, *, with_torchrun: bool, with_torchft: bool) -> dict[str, Any]:
    """Returns one row of the report."""
    lines = run("elastic", ranks, width)
    recoveries = [line for line in lines if line["event"] == "recovery"]
    slowest = max(recoveries, key=lambda line: line["regrouped"] + line["rebuilt"] + line["moved"])
    calm = [line for line in lines if line["event"] == "step" and 2 < line["step"] < DEATH]
    times = sorted(line["seconds"] for line in calm)
    cost = slowest["cost"]
    row = {
        "ranks": ranks,
        "detected": slowest["detected"],
        "regrouped": slowest["regrouped"],
        "rebuilt": slowest["rebuilt"],
        "moved": slowest["moved"],
        "bytes moved": max(line["nbytes"] for line in recoveries),
        "first step": slowest["first_step"],
        "back after": seconds_lost(lines),
        "step": times[len(times) // 2],
        "copy seconds": cost["seconds"] / cost["count"],
        "copy share": sum(line["copying"] for line in calm) / sum(line["processor"] for line in calm),
        "copy bytes": cost["nbytes"] // cost["count"],
        "sent bytes": cost["sent"] // cost["count"],
        "host memory bytes": cost["held"],
    }
    if with_torchrun:
        row["torchrun back after"] = seconds_lost(run("restarted", ranks, width))
    if with_torchft:
        row["torchft back after"] = seconds_lost(run_torchft(ranks, width))
    return row


def report(rows: list[dict[str, Any]], width: int) -> str:
    """Returns the page."""
    names = list(rows[0])
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    lines = [
        f"# Elastic benchmark, {datetime.date.today()}",
        "",
        f"Machine: {os.cpu_count()} logical cores shared with other work (load {load} at the end), gloo over loopback. "
        f"{sum(p.numel() for p in make_model(width).parameters()):,} parameters in bf16, ZeRO stage 2, batch {BATCH}; "
        "the last rank is killed in the middle of a backward.",
        "",
        "| " + " | ".join(names) + " |",
        "|" + "---|" * len(names),
    ]
    for row in rows:
        cells = [f"{value:.3f}" if isinstance(value, float) else f"{value:,}" for value in row.values()]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "Seconds, of the slowest rank that was left. `detected`: from the closed socket until the training thread knew."
        " `back after`: from the kill until a rank had finished the step that was under way, by the clock of the "
        "machine. `copy seconds` and `copy bytes`: per update and rank, `step` is its median before the death, copies "
        "included. `copy share`: processor time of copies in that of steps 3 to 11, all ranks. `sent bytes`: those "
        "that went to the neighbour; on the same host it sees the memory of the copy itself. "
        "`torchrun back after`: the same loss with `--max-restarts 1` and a checkpoint after every step; all "
        "ranks are started again (importing torch is most of it). `torchft back after`: the same loss of one of as "
        "many replica groups of one process, in fp32 without sharding; the lighthouse waits 5 s for heartbeats.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and prints, or is one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 6, 8])
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--no-torchrun", action="store_true")
    parser.add_argument("--torchft", action="store_true")
    parser.add_argument("--write-report", action="store_true")
    parser.add_argument("--worker", choices=["elastic", "restarted", "torchft"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        workers = {"elastic": elastic_worker, "restarted": restarted_worker, "torchft": torchft_worker}
        work = workers[arguments.worker]
        work(arguments.folder, arguments.width)
        return
    beside = {"with_torchrun": not arguments.no_torchrun, "with_torchft": arguments.torchft}
    rows = [measure(n, arguments.width, **beside) for n in arguments.ranks]
    text = report(rows, arguments.width)
    sys.stdout.write(text)
    if arguments.write_report:
        (ROOT / "benchmarks" / "results" / f"elastic-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
