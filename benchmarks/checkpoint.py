"""Measures checkpoints: saving beside a write of the same bytes, loading, export, and their memory.

    python benchmarks/checkpoint.py [--path DIR] [--blocks N] [--rounds N] [--write-report]
    python benchmarks/checkpoint.py --beside-training [--rows N] [--write-report]

Every time is the shortest of several interleaved rounds, because other load of the machine only adds to it.
``--beside-training`` reports medians instead: of steps alone, of steps while a save writes in the background (goal: at
most 1.10 of a step alone), and of saves that training waits for, in turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.contest.process_memory import reset_peak, status_bytes  # noqa: E402 - tests import it by this name too

MIB = 1 << 20
WIDTH = 1024


def large_engine(blocks: int, stage: int = 1, width: int = WIDTH) -> Any:
    """Returns an engine after one step. A block is one bucket; of width 1024 it has 12 MiB of masters and moments."""
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},  # so low that no step of a long run is skipped
    }
    run = deepspeed.initialize(model=model, config=config)[0]
    run.backward(run(torch.ones(1, width, dtype=torch.bfloat16)).float().mean())
    run.step()
    return run


def write_file(path: Path, data: bytes) -> float:
    """Writes a new file with calls of 4 MiB and fsync, a lower bound for a save; returns the seconds."""
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for position in range(0, len(data), 4 * MIB):
            file.write(memoryview(data)[position : position + 4 * MIB])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def time_and_peak(run: Callable[[], Any]) -> tuple[float, int]:
    """Returns the seconds of a call, and the bytes by which its peak exceeds what is resident at its start."""
    reset_peak()
    resident, start = status_bytes("VmRSS"), time.perf_counter()
    run()
    return time.perf_counter() - start, status_bytes("VmHWM") - resident


def bytes_read() -> int:
    """Returns the bytes that this process has requested from read calls so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def writer_of(path: Path) -> int:
    """Returns the rank that wrote a file of a checkpoint."""
    return int(path.name[4:9]) if path.name.startswith("rank") else 0


def measure(folder: str, blocks: int, stage: int, rounds: int, width: int = WIDTH) -> dict[str, Any]:
    """Runs the measurements of one rank; returns seconds by round, and bytes."""
    from deepspeed import comm
    from deepspeed.logging import logger

    logger.setLevel("WARNING")
    root, rank = Path(folder), comm.get_rank()
    run = large_engine(blocks, stage, width)
    bucket = max(master.layout.numel for master in run._runtime.masters) * 4
    times: dict[str, list[float]] = {"save": [], "plain": [], "beside": [], "load": []}
    grown = {"save": 0, "load": 0}
    total = read = 0

    def record(name: str, call: Callable[[], Any]) -> None:
        comm.barrier()
        seconds, nbytes = time_and_peak(call)
        times[name].append(seconds)
        grown[name] = max(grown[name], nbytes)

    for _ in range(rounds):
        record("save", lambda: run.save_checkpoint(folder, tag="tag"))
        comm.barrier()
        mine = [path for path in (root / "tag").iterdir() if writer_of(path) == rank]
        total = sum(path.stat().st_size for path in (root / "tag").iterdir())
        comm.barrier()
        copies = root / f"plain-{rank}"
        copies.mkdir(exist_ok=True)
        times["plain"].append(sum(write_file(copies / path.name, path.read_bytes()) for path in mine))
        before = bytes_read()
        record("load", lambda: run.load_checkpoint(folder, tag="tag"))
        read = bytes_read() - before
        comm.barrier()
        start = time.perf_counter()
        run.save_checkpoint(folder, tag="beside", async_save=True)
        times["beside"].append(time.perf_counter() - start)
        run.wait_for_checkpoint()
        comm.barrier()
        if rank == 0:
            shutil.rmtree(root / "beside")
        comm.barrier()
    return {"times": times, "grown": grown, "total": total, "read": read, "bucket": bucket}


def step_seconds(run: Any, batch: torch.Tensor) -> float:
    """Returns the seconds of one training step."""
    start = time.perf_counter()
    run.backward(run(batch).float().square().mean())
    run.step()
    return time.perf_counter() - start


def steps_during(worker: threading.Thread, run: Any, batch: torch.Tensor) -> list[float]:
    """Returns the seconds of the steps that begin and end while a thread runs."""
    found = []
    while worker.is_alive():
        seconds = step_seconds(run, batch)
        if worker.is_alive():  # otherwise it ended during the step
            found.append(seconds)
    return found


def write_files(folder: Path, data: list[bytes]) -> None:
    """Writes a file per element of ``data``."""
    for number, content in enumerate(data):
        write_file(folder / f"plain{number}", content)


def checksum_files(_: Path, data: list[bytes]) -> None:
    """Computes checksums of ``data`` eight times, which keeps one core busy and no disk."""
    for content in data * 8:
        zlib.crc32(content)


def beside_training(folder: str, blocks: int, rounds: int, rows: int) -> dict[str, Any]:
    """Times steps alone, steps during a save, and saves that training waits for. One rank, one thread of torch."""
    from deepspeed.logging import logger

    logger.setLevel("WARNING")
    torch.set_num_threads(1)
    run = large_engine(blocks)
    batch = torch.ones(rows, WIDTH, dtype=torch.bfloat16)
    for _ in range(2):
        step_seconds(run, batch)
    times: dict[str, list[float]] = {"alone": [], "beside": [], "copying": [], "writing": [], "synchronous": []}
    times |= {"beside_plain_write": [], "beside_checksums": []}
    for number in range(rounds):
        times["alone"] += [step_seconds(run, batch) for _ in range(3)]
        start = time.perf_counter()
        run.save_checkpoint(folder, tag=f"beside{number}", async_save=True)
        copied = time.perf_counter()
        times["beside"] += steps_during(run._checkpoints._saver._thread, run, batch)
        run.wait_for_checkpoint()
        times["copying"].append(copied - start)
        times["writing"].append(time.perf_counter() - copied)
        start = time.perf_counter()
        run.save_checkpoint(folder, tag=f"synchronous{number}")
        times["synchronous"].append(time.perf_counter() - start)
        files = list((Path(folder) / f"beside{number}").iterdir())
        total = sum(path.stat().st_size for path in files)
        data = [file.read_bytes() for file in files]
        for name, work in (("beside_plain_write", write_files), ("beside_checksums", checksum_files)):
            worker = threading.Thread(target=work, args=(Path(folder), data))
            worker.start()
            times[name] += steps_during(worker, run, batch)
            worker.join()
        for tag in (f"beside{number}", f"synchronous{number}"):
            shutil.rmtree(Path(folder) / tag)
    run.destroy()
    medians = {f"{name}_seconds": statistics.median(values) for name, values in times.items() if values}
    return {
        "bytes": total,
        "rows": rows,
        "steps_alone": len(times["alone"]),
        "steps_beside": len(times["beside"]),
        **medians,
        "beside_against_alone (goal 1.10)": medians["beside_seconds"] / medians["alone_seconds"],
        "beside_a_plain_write_against_alone": medians["beside_plain_write_seconds"] / medians["alone_seconds"],
        "beside_checksums_against_alone": medians["beside_checksums_seconds"] / medians["alone_seconds"],
    }


EXPORT = """
import resource, sys, time
from deepspeed.checkpoint.consolidate import convert_zero_checkpoint_to_fp32_state_dict
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
start = time.perf_counter()
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], "5GB", True, tag="tag")
print(time.perf_counter() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def export(folder: str) -> dict[str, float]:
    """Returns the seconds, and the growth of the peak, of writing one safetensors file from the checkpoint."""
    command = [sys.executable, "-c", EXPORT, folder, f"{folder}/exported"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    seconds, nbytes = (float(word) for word in done.stdout.split()[-2:])
    return {"seconds": seconds, "grown": nbytes}


def row(folder: str, blocks: int, ranks: int, stage: int, rounds: int) -> dict[str, Any]:
    """Measures one number of ranks and stage; returns its column of the report."""
    from benchmarks.checkpoint import measure as body  # the workers import it by this name
    from tests.harness import run_ranks

    results = run_ranks(body, ranks, folder, blocks, stage, rounds, timeout=460, fresh=True)
    # A round takes as long as its slowest rank.
    shortest = {
        key: min(max(values) for values in zip(*(result["times"][key] for result in results), strict=True))
        for key in results[0]["times"]
    }
    total = results[0]["total"]
    exported = export(folder)
    return {
        "ranks": ranks,
        "stage": stage,
        "bytes": total,
        "save_gigabytes_per_second": total / shortest["save"] / 1e9,
        "plain_gigabytes_per_second": total / shortest["plain"] / 1e9,
        "save_against_plain (goal 0.9)": shortest["plain"] / shortest["save"],
        "extra_mib_of_saving (goal: a bucket)": max(result["grown"]["save"] for result in results) / MIB,
        "bucket_mib": results[0]["bucket"] / MIB,
        "training_waits_for_async_save_seconds": shortest["beside"],
        "load_gigabytes_per_second": total / shortest["load"] / 1e9,
        "extra_mib_of_loading": max(result["grown"]["load"] for result in results) / MIB,
        "read_by_a_rank_of_twice_its_share": max(r["read"] for r in results) / (2 * total / ranks),
        "export_gigabytes_per_second": total / 3 / exported["seconds"] / 1e9,
        "extra_mib_of_export (goal 208)": exported["grown"] / MIB,
    }


def show(report: dict[str, Any]) -> str:
    """Returns the report as Markdown."""
    rows = report["rows"]
    lines = [f"# Checkpoint benchmark, {report['date']}", "", f"Machine: {report['machine']}.", ""]
    lines += ["| | " + " | ".join(f"{r['ranks']} rank(s), stage {r['stage']}" for r in rows) + " |"]
    lines += ["|---|" + "---|" * len(rows)]
    for key in rows[0]:
        if key not in ("ranks", "stage"):
            cells = [f"{r[key]:,}" if isinstance(r[key], int) else f"{r[key]:.2f}" for r in rows]
            lines.append(f"| {key.replace('_', ' ')} | {' | '.join(cells)} |")
    lines += [
        "",
        "Saving and the plain write (the same bytes from memory, 4 MiB per call, fsync each) take turns; times are the",
        "shortest of the rounds, of the slowest rank. Extra memory is the peak of resident memory minus the resident",
        "memory before. Loading verifies checksums, so it reads its share twice, the second time from the page cache.",
        "Export writes one safetensors file; its goal is twice the largest tensor plus 200 MB.",
        "",
    ]
    return "\n".join(lines)


def show_beside(report: dict[str, Any]) -> str:
    """Returns the report of ``--beside-training`` as Markdown."""
    lines = [
        f"# Saving beside training, {report['date']}",
        "",
        f"Machine: {report['machine']}.",
        "",
        "| | |",
        "|---|---|",
    ]
    for key, value in report["rows"][0].items():
        lines.append(f"| {key.replace('_', ' ')} | {f'{value:,}' if isinstance(value, int) else f'{value:.3f}'} |")
    lines += [
        "",
        "One rank, one thread of torch, stage 1, bf16 with fp32 masters. Bytes are those of one checkpoint. In turns:",
        "three steps alone, steps that begin and end while a save writes in the background, a save that training waits",
        "for, steps while a thread only writes the same bytes, and while one only computes checksums. Medians. Copying",
        "is the time that training waits for a save in the background.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measures, prints the report, and writes it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=None, help="folder on the disk to measure")
    parser.add_argument("--blocks", type=int, default=48, help="blocks of the model, 12 MiB of checkpoint each")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--beside-training", action="store_true", help="measure steps while a save writes")
    parser.add_argument("--rows", type=int, default=64, help="with --beside-training: rows of a micro-batch")
    parser.add_argument("--write-report", action="store_true", help="also write benchmarks/results/checkpoint-DATE")
    arguments = parser.parse_args()
    rows = []
    load_before = os.getloadavg()[0]
    if arguments.beside_training:
        with tempfile.TemporaryDirectory(dir=arguments.path or os.getcwd()) as folder:
            rows.append(beside_training(folder, arguments.blocks, arguments.rounds, arguments.rows))
    for ranks, stage in () if arguments.beside_training else ((1, 1), (2, 3)):
        with tempfile.TemporaryDirectory(dir=arguments.path or os.getcwd()) as folder:
            rows.append(row(folder, arguments.blocks, ranks, stage, arguments.rounds))
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} logical cores, load {load_before:.1f} before and {os.getloadavg()[0]:.1f} after",
        "torch": torch.__version__,
        "rows": rows,
    }
    text = show_beside(report) if arguments.beside_training else show(report)
    sys.stdout.write(text)
    if arguments.write_report:
        name = "checkpoint-beside-training" if arguments.beside_training else "checkpoint"
        stem = ROOT / "benchmarks" / "results" / f"{name}-{report['date']}"
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        stem.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
