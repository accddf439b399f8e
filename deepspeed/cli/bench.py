"""``ds_bench``: times the collectives of training between the ranks of this machine or of a host file."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from deepspeed.cli.command import run_command
from deepspeed.comm.speed import OPERATIONS, CollectiveSpeed, measure_collectives

_DTYPES = ("float32", "float16", "bfloat16")
_SMALLEST, _LARGEST = 12, 40  # powers of two, in bytes
_WIDTH_WITHOUT_TERMINAL = 120


def main(args: Sequence[str] | None = None) -> None:
    """Starts the ranks with the launcher, which gets unknown options; in a rank, measures. Rank 0 prints."""
    run_command("ds_bench", lambda: _run(list(sys.argv[1:] if args is None else args)), args)


def _run(words: Sequence[str]) -> None:
    options, of_the_launcher = _parse(words)
    if "RANK" in os.environ:
        if of_the_launcher:
            sys.exit(f"ds_bench: unknown options {' '.join(of_the_launcher)}; the ranks were started already")
        _measure(options)
        return
    from deepspeed.launcher import runner

    chosen = [f"--{name.replace('_', '-')}" for name in _flags() if getattr(options, name)]
    switches = [f"--{name}" for name in ("scan", "json") if getattr(options, name)]
    numbers = [f"--{name}={getattr(options, name)}" for name in ("maxsize", "dtype", "trials", "warmups")]
    own = [*chosen, *switches, *numbers]
    runner.main([*of_the_launcher, "--no_local_rank", "--module", "deepspeed.cli.bench", *own])


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="ds_bench",
        description="Times collectives between ranks: deepspeed.comm's, and those that ZeRO uses. By default it "
        "measures all of them. Other options are passed to the launcher: --num_gpus 4, --hostfile FILE, ...",
        allow_abbrev=False,
    )
    for name in _flags():
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, action="store_true", help=f"measure {name}")
    parser.add_argument(
        "--maxsize", type=int, default=24, help="size of the buffer: 2 to this power bytes (default 24)"
    )
    parser.add_argument(
        "--scan", action="store_true", help=f"measure all powers of 4 from 2^{_SMALLEST} bytes to --maxsize"
    )
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="dtype of the buffer (default bfloat16)")
    parser.add_argument("--trials", type=int, default=20, help="timed calls, of which the median is shown (default 20)")
    parser.add_argument("--warmups", type=int, default=5, help="calls before the timed ones (default 5)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options, rest = parser.parse_known_args(words)
    for name, least in (("maxsize", _SMALLEST), ("trials", 1), ("warmups", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name}: expected {least} or more, found {getattr(options, name)}")
    if options.maxsize > _LARGEST:
        parser.error(f"--maxsize: expected {_LARGEST} or less, found {options.maxsize}: it is a power of two, in bytes")
    return options, rest


def _flags() -> list[str]:
    return [name for name in OPERATIONS if " " not in name]


def _measure(options: argparse.Namespace) -> None:
    import torch

    from deepspeed import comm

    comm.init_distributed(verbose=False)
    ranks = comm.get_world_size()
    if ranks == 1:
        sys.exit("ds_bench: one rank cannot communicate; start at least two, for example ds_bench --num_gpus 2")
    flags = [name for name in _flags() if getattr(options, name)]
    powers = range(_SMALLEST, options.maxsize + 1, 2) if options.scan else [options.maxsize]
    rows = [
        row
        for power in powers
        for row in measure_collectives(
            flags or list(OPERATIONS),
            1 << power,
            getattr(torch, options.dtype),
            warmups=options.warmups,
            trials=options.trials,
        )
    ]
    if comm.get_rank() == 0:
        if options.json:
            sys.stdout.write(json.dumps([vars(row) for row in rows]) + "\n")
        else:
            _show(rows, ranks, options)
    comm.barrier()
    comm.destroy_process_group()


def _show(rows: list[CollectiveSpeed], ranks: int, options: argparse.Namespace) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH_WITHOUT_TERMINAL)
    title = f"{ranks} ranks, {options.dtype}, median of {options.trials} calls, slowest rank"
    table = Table("operation", title=title, title_justify="left")
    for name in ("bytes", "ms", "algbw Gbit/s", "busbw Gbit/s"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = (f"{row.seconds * 1e3:.3f}", f"{row.algorithm_gbps:.2f}", f"{row.bus_gbps:.2f}")
        table.add_row(row.operation, f"{row.nbytes:,}", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
