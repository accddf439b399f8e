"""``ds_io``: measures how fast offloaded states are read and written in a folder, also by ``fio`` if installed."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepspeed.cli.command import run_command
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.speed import OPERATIONS, FileSpeed, measure_files

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_DEFAULTS = IoSettings()


def main(args: Sequence[str] | None = None) -> None:
    """Measures and prints a table."""
    run_command("ds_io", lambda: _measure(parse_args(args)), args)


def _measure(options: argparse.Namespace) -> None:
    settings = IoSettings(options.block_size, options.queue_depth, options.io_parallel)
    speed = measure_files(
        options.folder,
        options.io_size,
        settings,
        loops=options.loops,
        operations=("read",) if options.read else OPERATIONS,
        with_fio=not options.no_fio,
    )
    if options.json:
        sys.stdout.write(json.dumps(as_dict(speed, settings)) + "\n")
    else:
        show(speed, settings, Console())


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(
        prog="ds_io",
        description="Times sequential reads and writes of a file like those of offloaded states (nvme_path), "
        "and shows fio's speed with the same requests. Sizes take K, M, G (powers of 1024).",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="folder on the disk to measure (default: the working directory)"
    )
    parser.add_argument("--io_size", type=size_of, default=size_of("512M"), help="bytes of the file (default 512M)")
    parser.add_argument(
        "--block_size", type=size_of, default=_DEFAULTS.block_size, help="bytes of a request (aio.block_size)"
    )
    parser.add_argument(
        "--queue_depth", type=count_of, default=_DEFAULTS.queue_depth, help="requests in flight (aio.queue_depth)"
    )
    parser.add_argument(
        "--io_parallel",
        type=count_of,
        default=_DEFAULTS.threads,
        help="factor on queue_depth (aio.intra_op_parallelism)",
    )
    parser.add_argument("--loops", type=count_of, default=3, help="number of passes; the fastest is shown (default 3)")
    parser.add_argument("--read", action="store_true", help="measure reads only")
    parser.add_argument("--no_fio", action="store_true", help="do not run fio")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser.parse_args(args)


def size_of(text: str) -> int:
    """Returns the bytes of ``1048576``, ``512M`` or ``1G``. Raises argparse.ArgumentTypeError: it is no size."""
    match = re.fullmatch(r"(\d+)([KMGT]?)(I?B)?", text.strip().upper())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; expected a number such as 1048576, 512M or 1G")
    return int(match[1]) * _UNITS[match[2]]


def count_of(text: str) -> int:
    """Returns a number from 1 on. Raises argparse.ArgumentTypeError: the text is no such number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count; expected 1 or more")
    return int(text)


def as_dict(speed: FileSpeed, settings: IoSettings) -> dict[str, object]:
    """Returns the results as JSON values; speeds in bytes per second."""
    return {
        "bytes": speed.nbytes,
        "direct": speed.is_direct,
        "block_size": settings.block_size,
        "in_flight": settings.queue_depth * settings.threads,
        "bytes_per_second": speed.ours,
        "fio_bytes_per_second": speed.fio,
        "against_fio": {operation: speed.against_fio(operation) for operation in speed.ours},
    }


def show(speed: FileSpeed, settings: IoSettings, console: Console) -> None:
    """Prints the table."""
    access = "direct access" if speed.is_direct else "through the page cache"
    in_flight = settings.queue_depth * settings.threads
    table = Table(
        title=f"{speed.nbytes:,} bytes, requests of {settings.block_size:,}, {in_flight} in flight, {access}",
        title_justify="left",
    )
    table.add_column("pass")
    for name in ("GB/s", "fio GB/s", "share of fio"):
        table.add_column(name, justify="right")
    for operation, ours in speed.ours.items():
        share = speed.against_fio(operation)
        fio = "not run" if share is None else f"{speed.fio[operation] / 1e9:.2f}"
        table.add_row(operation, f"{ours / 1e9:.2f}", fio, "" if share is None else f"{share:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
