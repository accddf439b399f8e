"""Measures the loss of a rank: detection, regroup, transfer, first step; and the copies made while nothing fails.

    python benchmarks/elastic.py [--ranks 2 3 4] [--width N] [--no-torchrun] [--torchft] [--write-report]

Beside it is the same loss under `torchrun --max-restarts`, which restarts all ranks from the last checkpoint, and with
`--torchft`, if that is installed, of one of as many replica groups of torchft with one process each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
STEPS, LOST_AT = 24, 12
BATCH, MICRO = 48, 2


def config_for(*, elastic: bool) -> dict[str, Any]:
    """Returns the configuration: ZeRO stage 2 in bf16; ``elastic``: ranks may be lost."""
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": MICRO}
    return {
        **sizes,
        **({"elasticity": {"continue": True}} if elastic else {}),
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
    }


def make_model(width: int) -> torch.nn.Module:
    """Returns four linear layers."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])


class EventLog:
    """Appends a line with the time of each event to a file of this process."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"events-{os.getpid()}.jsonl").open("a", buffering=1)

    def write(self, **facts: Any) -> None:
        """Writes a line with these facts."""
        self._file.write(json.dumps({"time": time.time(), **facts}) + "\n")


def die_once(folder: Path, events: EventLog) -> None:
    """Kills the last rank, when called for the first time."""
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    if last and not (folder / "killed").exists():
        (folder / "killed").touch()
        events.write(event="killed")
        os.kill(os.getpid(), signal.SIGKILL)


def elastic_worker(folder: Path, width: int) -> None:
    """Trains with elasticity, which continues after the loss."""
    import deepspeed
    from deepspeed.elasticity import ElasticSteps

    engine, *_ = deepspeed.initialize(model=make_model(width), config=config_for(elastic=True))
    data = list(torch.randn(256, width))
    events, steps = EventLog(folder), ElasticSteps(engine, data, STEPS)
    for step in steps:
        busy, copying = time.process_time(), steps.copy_cost.processor
        with step:
            for x in step:
                engine.backward(engine(x.bfloat16()).float().pow(2).mean())
                if step.number == LOST_AT:
                    die_once(folder, events)
                engine.step()
        busy, copying = time.process_time() - busy, steps.copy_cost.processor - copying
        times = {"seconds": step.seconds, "processor": busy, "copying": copying}
        events.write(event="step", step=step.number, done=step.is_done, **times)
    cost = steps.copy_cost
    for recovery in steps.recoveries:
        events.write(event="recovery", cost=vars(cost), **vars(recovery))


def restarted_worker(folder: Path, width: int) -> None:
    """Trains and saves after each step; when torchrun restarts it, continues from the last checkpoint."""
    import deepspeed

    ranks = int(os.environ["WORLD_SIZE"])
    config = config_for(elastic=False)
    config["train_batch_size"] = BATCH // (MICRO * ranks) * MICRO * ranks
    engine, *_ = deepspeed.initialize(model=make_model(width), config=config)
    events = EventLog(folder)
    if (folder / "saved" / "latest").exists():
        engine.load_checkpoint(folder / "saved")
    data = torch.randn(256, width)
    while engine.global_steps < STEPS:
        started, number = time.time(), engine.global_steps
        for micro in range(engine.gradient_accumulation_steps()):
            x = data[micro * MICRO : (micro + 1) * MICRO].bfloat16()
            engine.backward(engine(x).float().pow(2).mean())
            if number == LOST_AT:
                die_once(folder, events)
            engine.step()
        events.write(event="step", step=number, done=True, seconds=time.time() - started)
        engine.save_checkpoint(folder / "saved")


def torchft_worker(folder: Path, width: int) -> None:
    """Trains in fp32 as one replica group of torchft. After the loss the other groups continue with a smaller batch.

    Sums gradients one by one: in the remaining ranks torchft 0.2.0's ``DistributedDataParallel`` fails on an assertion.
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
    optimizer, data, events = torchft.Optimizer(manager, adamw), torch.randn(256, width), EventLog(folder)
    while manager.current_step() < STEPS:
        started, number = time.time(), manager.current_step()
        optimizer.zero_grad()
        for micro in range(BATCH // MICRO // ranks):
            model(data[micro * MICRO : (micro + 1) * MICRO]).pow(2).mean().backward()
        if number == LOST_AT:
            die_once(folder, events)
        for work in [manager.allreduce(parameter.grad) for parameter in model.parameters()]:
            work.wait()
        optimizer.step()
        events.write(event="step", step=number, done=manager.current_step() > number, seconds=time.time() - started)
    os._exit(0)  # the manager's threads would wait for the other groups


def run_torchft(command: list[str], folder: Path, ranks: int) -> None:
    """Starts the lighthouse and the replica groups, and waits for them."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
    groups = []
    try:
        for rank in range(ranks):
            environment = {**common, "RANK": str(rank), "TORCHFT_LIGHTHOUSE": lighthouse.address()}
            with (folder / f"log-{rank}").open("w") as log:
                groups.append(subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log))
        codes = [group.wait(300) for group in groups]
        assert codes.count(0) == ranks - 1, [path.read_text()[-2000:] for path in folder.glob("log-*")]
    finally:
        for group in groups:
            group.kill()
        lighthouse.shutdown()


STARTERS = {
    "elastic": ("deepspeed.launcher.runner", "--num_gpus", "{ranks}"),
    "restarted": ("torch.distributed.run", "--nproc-per-node", "{ranks}", "--max-restarts", "1"),
}


def run(kind: str, ranks: int, width: int) -> list[dict[str, Any]]:
    """Runs a training in which a rank is lost; returns the events of all ranks in the order of time."""
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        folder = Path(name)
        command = [str(Path(__file__).resolve()), "--worker", kind, "--folder", name, "--width", str(width)]
        if kind == "torchft":
            run_torchft(command, folder, ranks)
        else:
            starter = [sys.executable, "-m", *(word.format(ranks=ranks) for word in STARTERS[kind])]
            environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
            done = subprocess.run([*starter, *command], env=environment, capture_output=True, text=True, timeout=600)
            assert done.returncode == 0, done.stderr[-3000:]
        events = [json.loads(line) for path in folder.glob("events-*") for line in path.read_text().splitlines()]
    return sorted(events, key=lambda event: event["time"])


def seconds_lost(events: list[dict[str, Any]]) -> float:
    """Returns the seconds from the kill until a rank has finished the step in which it happened."""
    killed = next(event["time"] for event in events if event["event"] == "killed")
    later = (event for event in events if event["event"] == "step" and event["time"] > killed and event["done"])
    return min(event["time"] for event in later if event["step"] >= LOST_AT) - killed


def measure(ranks: int, width: int, *, with_torchrun: bool, with_torchft: bool) -> dict[str, Any]:
    """Measures the loss of one of ``ranks`` ranks; returns the row of the report."""
    events = run("elastic", ranks, width)
    recoveries = [event for event in events if event["event"] == "recovery"]
    slowest = max(recoveries, key=lambda event: event["regrouped"] + event["rebuilt"] + event["moved"])
    before = [event for event in events if event["event"] == "step" and 2 < event["step"] < LOST_AT]
    cost = slowest["cost"]
    row = {
        "ranks": ranks,
        "detected": slowest["detected"],
        "regrouped": slowest["regrouped"],
        "rebuilt": slowest["rebuilt"],
        "moved": slowest["moved"],
        "bytes moved": max(event["nbytes"] for event in recoveries),
        "first step": slowest["first_step"],
        "back after": seconds_lost(events),
        "step": statistics.median(event["seconds"] for event in before),
        "copy seconds": cost["seconds"] / cost["count"],
        "copy share": sum(event["copying"] for event in before) / sum(event["processor"] for event in before),
        "copy bytes": cost["nbytes"] // cost["count"],
        "sent bytes": cost["sent"] // cost["count"],
        "host memory bytes": cost["held"],
    }
    if with_torchrun:
        row["torchrun back after"] = seconds_lost(run("restarted", ranks, width))
    if with_torchft:
        row["torchft back after"] = seconds_lost(run("torchft", ranks, width))
    return row


def report(rows: list[dict[str, Any]], width: int) -> str:
    """Returns the report in Markdown."""
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
        "Seconds, of the slowest remaining rank. `detected`: from the closed socket until the training thread raised. "
        "`back after`: from the kill until a rank had finished the interrupted step, in wall-clock time. "
        "`step`: median of a step before the loss, copies included. `copy seconds` and `copy bytes`: per update and "
        "rank. `copy share`: share of copies in the processor time of steps 3 to 11, all ranks. `sent bytes`: those "
        "sent to the next rank; on the same host it maps the memory of the copy instead. "
        "`torchrun back after`: the same loss with `--max-restarts 1` and a checkpoint after every step; all "
        "ranks are restarted (importing torch is most of it). `torchft back after`: the same loss of one of as "
        "many replica groups of one process, in fp32 without sharding; the lighthouse waits 5 s for heartbeats.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures and prints the report; with ``--worker``: trains as one of the ranks."""
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
    others = {"with_torchrun": not arguments.no_torchrun, "with_torchft": arguments.torchft}
    rows = [measure(ranks, arguments.width, **others) for ranks in arguments.ranks]
    text = report(rows, arguments.width)
    sys.stdout.write(text)
    if arguments.write_report:
        (ROOT / "benchmarks" / "results" / f"elastic-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
