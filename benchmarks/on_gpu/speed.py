"""Part D: one rank, one GPU: step time and memory beside torch alone, DDP, FSDP2 and the published package."""

from __future__ import annotations

import os
from functools import partial

from deepspeed.ports import free_port
from on_gpu.part import Report, Settings, Table, planning, run_python

TITLE = "D. Throughput of one rank"
HERE = ("torch", "ddp", "fsdp2", "ours-0", "ours-1", "ours-2", "ours-3")
PEER = ("upstream-0", "upstream-1", "upstream-2", "upstream-3")
HOST = ("ours-2-host", "ours-3-host")
PEER_HOST = ("upstream-2-host", "upstream-3-host")


def run(settings: Settings, report: Report) -> None:
    """Fills the report."""
    about = "bf16, AdamW, clipping. The ratio is to the time of torch alone. A GB is 10^9 bytes."
    for shape in ("tiny",) if settings.dry else ("350M", "1.3B"):
        names = [*HERE, *(PEER if settings.peer_python else ())]
        if settings.dry:
            names = ["torch", "fsdp2", "ours-0", "ours-3"]
        _contest(settings, report, shape, names, about)
    if not settings.dry:
        _contest(
            settings, report, "3B", [*HOST, *(PEER_HOST if settings.peer_python else ())], "Optimizer on the host."
        )


def _contest(settings: Settings, report: Report, shape: str, names: list[str], about: str) -> None:
    columns = ["who", "step (ms)", "ratio", "predicted (ms)", "tokens/s", "peak (GB)", "planned (GB)"]
    columns += ["host waits/step"]
    table = report.table(f"GPT {shape}", columns, about)
    for name in (name for name in names if settings.includes(f"{name} on {shape}")):
        report.attempt(f"{name} on {shape}", partial(_row, settings, report, table, shape, name))


def _row(settings: Settings, report: Report, table: Table, shape: str, name: str) -> None:
    python = settings.peer_python if name.startswith("upstream") else None
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone["MASTER_PORT"] = str(free_port())
    if name.endswith("-host"):  # the update runs on all cores
        alone["OMP_NUM_THREADS"] = str(os.cpu_count())
    with planning(settings, name, shape, ranks=1) as plan:
        found = run_python(
            "speed_program", name, shape, settings=settings, seconds=150, environment=alone, python=python
        )
    found |= plan()
    first = next((row[1] for row in table.rows if row[0] == "torch"), None)
    ms = 1e3 * found["seconds"]
    ratio = ms / first if first else None
    rate = found["tokens"] / found["seconds"]
    report.row(table, name, ms, ratio, found["predicted"], rate, found["peak"], found["planned"], found["waits"])
