"""Part C: one rank of eight whose others are simulated, at real sizes: real memory, streams, kernels and waits.

NCCL is not needed. Instead of each transfer, a separate stream is busy for as long as the bytes would take, and the
engine waits for it as for NCCL. No data are exchanged, so losses mean nothing.
"""

from __future__ import annotations

from functools import partial

from on_gpu.part import Report, Settings, Table, planning, run_python

TITLE = "C. One rank of eight, simulated"
RATE = 350e9  # bytes per second and direction: all-gather over NVLink 4 on eight devices
CONTESTS = (("1.3B", ("ours-0", "ours-1", "ours-2", "ours-3", "fsdp2")), ("8B", ("ours-3", "fsdp2")))


def run(settings: Settings, report: Report) -> None:
    """Fills the report."""
    about = (
        f"Transfers take bytes / {RATE / 1e9:.0f} GB/s on a stream of their own, for fsdp2 none (its group is torch's "
        "fake one). Hidden: the share of transfer time under computation. Planned and predicted: by ds_plan."
    )
    columns = ["who", "step (ms)", "predicted (ms)", "peak (GB)", "planned (GB)"]
    columns += ["transfers (ms)", "hidden", "waits", "launches"]
    for shape, names in (("tiny", ("ours-3", "fsdp2")),) if settings.dry else CONTESTS:
        table = report.table(f"GPT {shape}", columns, about)
        for name in (name for name in names if settings.includes(f"{name} on {shape}")):
            report.attempt(name, partial(_row, settings, report, table, shape, name))


def _row(settings: Settings, report: Report, table: Table, shape: str, name: str) -> None:
    with planning(settings, name, shape, ranks=8) as plan:
        found = run_python("simulated_ranks_program", name, shape, str(RATE), settings=settings, seconds=150)
    found |= plan()
    columns = ("ms", "predicted", "peak", "planned", "transfers", "hidden", "waits", "launches")
    report.row(table, name, *(found[column] for column in columns))
    if found["planned"] and found["peak"] and abs(found["peak"] / found["planned"] - 1) > 0.05:
        report.problem(f"{name} on {shape}: the peak is {found['peak']:.2f} GB, planned were {found['planned']:.2f}")
