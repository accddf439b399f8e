"""Switching the communication log and reading it."""

from __future__ import annotations

import functools
import io
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.base.recorder import OperationTotals, bandwidths, log
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.supervised import collective
from deepspeed.logging import log_dist


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: list[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Sets the communication log; explicit arguments win over ``deepspeed_config``.

    Args:
        deepspeed_config: A configuration (dict, path or parsed), of which the ``comms_logger`` section is used.
        enabled: Whether anything is recorded.
        prof_all: Record all operations.
        prof_ops: Names of operations to record if not all.
        verbose: Log a line per operation.
        debug: Name the caller in that line.
    """
    section = None
    if deepspeed_config is not None:
        from deepspeed.config.parsing import parse_section

        section = parse_section(deepspeed_config, "comms_logger")
    arguments = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    for name, argument in arguments.items():
        value = argument if argument is not None else getattr(section, name, None)
        if value is not None:
            setattr(log, name, value)


def log_summary(
    show_straggler: bool = False, return_dict: bool = False
) -> dict[str, dict[int, dict[str, float]]] | None:
    """Logs a table of what was recorded, on rank 0.

    Args:
        show_straggler: Add the time spent waiting for the slowest rank. All ranks must call it then, having run the
            same operations.
        return_dict: Return the numbers too.

    Returns:
        With ``return_dict``: operation -> bytes -> ``count``, ``total_ms``, ``avg_ms``, ``waited_ms``, ``algbw_gbps``,
        ``busbw_gbps`` (and ``straggler_ms``). Of a transfer that ran beside the computation, ``total_ms`` is the time
        from its start to the end of the wait for it, ``waited_ms`` the part in which the program was blocked.
    """
    numbers: dict[str, dict[int, dict[str, float]]] = {}
    for name, size, totals in log.rows():
        row = _numbers(name, size, totals)
        if show_straggler:
            row["straggler_ms"] = _straggler_ms(totals)
        numbers.setdefault(name, {})[size] = row
    log_dist("communication log\n" + _table(numbers, show_straggler))
    return numbers if return_dict else None


def _numbers(name: str, size: int, totals: OperationTotals) -> dict[str, float]:
    total = sum(totals.seconds)
    algorithm, bus = bandwidths(name, size, total / totals.count, totals.ranks)
    return {
        "count": totals.count,
        "total_ms": total * 1e3,
        "avg_ms": total / totals.count * 1e3,
        "waited_ms": totals.waited * 1e3,
        "algbw_gbps": algorithm,
        "busbw_gbps": bus,
    }


def _straggler_ms(totals: OperationTotals) -> float:
    """Returns the time that this rank waited longer than the last rank to arrive, summed over all calls."""
    mine = torch.tensor(totals.seconds, dtype=torch.float64)
    device = "cpu" if torch_dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
    shortest = mine.to(device, copy=True)  # reduced in place, also where it is on the host as ``mine`` is
    # Not through ``collectives``: the log does not count itself.
    start = functools.partial(torch_dist.all_reduce, shortest, op=torch_dist.ReduceOp.MIN)
    with Job.adopt().during("the log's stragglers"):
        collective("all_reduce", start, None, shortest, False)
    return float((mine - shortest.cpu()).sum()) * 1e3


def _table(numbers: dict[str, dict[int, dict[str, float]]], show_straggler: bool) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table("operation", "bytes", "count", "total ms", "avg ms", "waited ms", "algbw Gbit/s", "busbw Gbit/s")
    if show_straggler:
        table.add_column("straggler ms")
    for name, sizes in numbers.items():
        for size, row in sizes.items():
            cells = [name, f"{size:,}", f"{row['count']:.0f}", f"{row['total_ms']:.2f}", f"{row['avg_ms']:.3f}"]
            cells.append(f"{row['waited_ms']:.2f}")
            cells += [f"{row['algbw_gbps']:.2f}", f"{row['busbw_gbps']:.2f}"]
            if show_straggler:
                cells.append(f"{row['straggler_ms']:.2f}")
            table.add_row(*cells)
    text = io.StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue().rstrip()


def reset_log() -> None:
    """Forgets what was recorded; the settings stay."""
    log.totals.clear()


def has_comm_data() -> bool:
    """Returns whether anything was recorded."""
    return bool(log.totals)


def get_comm_operation_count() -> int:
    """Returns the number of recorded operations."""
    return sum(totals.count for _, _, totals in log.rows())


def get_logged_comm_ops() -> list[str]:
    """Returns the names of the recorded operations."""
    return sorted(log.totals)
