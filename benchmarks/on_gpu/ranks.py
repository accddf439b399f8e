"""Part B: several ranks on one GPU, with NCCL 2.30 or newer (in a dry run gloo on the CPU), beside torch alone."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from deepspeed.ports import free_port
from on_gpu.cells import CELLS, DRY, Cell
from on_gpu.part import Report, Settings, Table, child_environment, run_python

TITLE = "B. Several ranks on one GPU"
# By default NCCL refuses two ranks on one GPU. With two thread blocks per rank, the kernels of all ranks run at once.
NCCL = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "CUDA_VISIBLE_DEVICES": "0",
}


def run(settings: Settings, report: Report) -> None:
    """Fills the report."""
    steps = 4 if settings.dry else 20
    chosen = [cell for cell in CELLS if not settings.dry or cell.name in DRY]
    chosen = [cell for cell in chosen if settings.includes(cell.name)]
    plain: dict[str, list[float]] = {}
    for kind in dict.fromkeys(_reference(cell) for cell in chosen):
        found = run_python("rank_program", f"plain:{kind}", str(steps), settings=settings, seconds=_limit(settings))
        plain[kind] = found["losses"]
    about = "The largest relative difference of a loss from one process of torch alone in fp32."
    equal = report.table("Losses", ["layout", "ranks", "steps", "difference", "allowed", "s"], about)
    ends = report.table("Failures", ["layout", "seconds until the other rank ends", "its last line"])

    def one(cell: Cell) -> None:
        if cell.is_killed:
            report.attempt(cell.name, partial(_failure, settings, report, ends, cell))
        else:
            report.attempt(cell.name, partial(_losses, settings, report, equal, cell, plain[_reference(cell)], steps))

    with ThreadPoolExecutor(settings.jobs) as pool:
        list(pool.map(one, chosen))


def _reference(cell: Cell) -> str:
    """Returns the training in torch alone that a cell is compared with."""
    return cell.model + (":skip" if cell.skips else "")


def _limit(settings: Settings) -> float:
    """Returns the time limit of one cell in seconds; in a dry run other programs may use the cores."""
    return 240.0 if settings.dry else 60.0 + 30.0 * (settings.jobs - 1)


def _losses(settings: Settings, report: Report, table: Table, cell: Cell, plain: list[float], steps: int) -> None:
    start = time.monotonic()
    if cell.then_on:
        with tempfile.TemporaryDirectory() as folder:
            half = str(steps // 2)
            found = _result(_start(settings, cell, cell.ranks, half, "SAVE", folder), _limit(settings))
            found += _result(_start(settings, cell, cell.then_on, half, "LOAD", folder), _limit(settings))
    else:
        found = _result(_start(settings, cell, cell.ranks, str(steps)), _limit(settings))
    difference = max(abs(ours - theirs) / abs(theirs) for ours, theirs in zip(found, plain, strict=True))
    seconds = time.monotonic() - start
    report.row(table, cell.name, cell.ranks, steps, difference, cell.tolerance, seconds)
    if not difference <= cell.tolerance:
        report.problem(f"{cell.name}: losses differ by {difference:.2g}; ours {found}, torch alone {plain}")


def _failure(settings: Settings, report: Report, table: Table, cell: Cell) -> None:
    """Checks that the remaining rank ends by itself, with an error of this package that names the killed one."""
    ranks = _start(settings, cell, cell.ranks, "8")
    try:
        ranks[1].wait(_limit(settings))
        start = time.monotonic()
        _, errors = ranks[0].communicate(timeout=_limit(settings))
    finally:
        _stop(ranks)
    lines = [line for line in errors.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error: " in line), lines[-1] if lines else "")
    report.row(table, cell.name, time.monotonic() - start, last[:300])
    if "deepspeed.errors" not in last or "rank 1" not in errors:
        report.problem(f"{cell.name}: expected an error of the package that names rank 1, found: {last[:300]}")


def _start(settings: Settings, cell: Cell, ranks: int, *words: str) -> list[subprocess.Popen[str]]:
    """Starts the processes of a cell, all on one device."""
    port = free_port()
    started = []
    for rank in range(ranks):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank if settings.dry else 0, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        variables |= cell.environment | ({} if settings.dry else NCCL)
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "on_gpu.rank_program", cell.name, *words],
                env=child_environment(settings, variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return started


def _result(ranks: list[subprocess.Popen[str]], limit: float) -> list[float]:
    """Waits for all ranks; returns the losses that rank 0 printed.

    Raises:
        RuntimeError: A rank failed, or exceeded the time limit.
    """
    deadline = time.monotonic() + limit
    try:
        printed = [rank.communicate(timeout=max(deadline - time.monotonic(), 1)) for rank in ranks]
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"not done after {limit:.0f} s") from late
    finally:
        _stop(ranks)
    failed = [
        f"rank {i} ended with {r.returncode}: {printed[i][1][-800:]}" for i, r in enumerate(ranks) if r.returncode
    ]
    if failed:
        raise RuntimeError("; ".join(failed))
    found: dict[str, Any] = json.loads(printed[0][0].splitlines()[-1])
    return list(found["losses"])


def _stop(ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
            rank.communicate()
