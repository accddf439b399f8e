"""``ds_nvme_tune``: tries ``aio`` settings in a folder and prints the fastest as a configuration section."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed.cli.command import run_command
from deepspeed.cli.io_speed import count_of, size_of
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.offload.file_io import IoSettings
from deepspeed.offload.speed import FileSpeed, measure_files

# Of queue_depth and intra_op_parallelism only the product counts, so one of them is enough.
_SWEEP: dict[str, list[int]] = {
    "block_size": [256 << 10, 1 << 20, 4 << 20, 16 << 20],
    "queue_depth": [4, 8, 16, 32, 64],
    "intra_op_parallelism": [1],
}
_OTHER_NAMES = {"io_parallel": "intra_op_parallelism", "intra_op_parallel": "intra_op_parallelism"}
_LOG_NAME = "ds_nvme_tune.json"
_SHOWN = 10
# Settings within this share of the fastest count as equally fast, as repeated runs differ by about that much.
_AS_GOOD = 0.97


def main(args: Sequence[str] | None = None) -> None:
    """Measures, writes a log, and prints a table and the section."""
    run_command("ds_nvme_tune", lambda: _run(_parse(args)), args)


def _parse(args: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ds_nvme_tune",
        description="Times the files of NVMe offload with many aio settings and prints the fastest section `aio`. Of "
        "equally fast settings it takes the one with the fewest requests in flight. Sizes take K, M, G.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--nvme_dir", type=Path, nargs="+", required=True, help="folders on the disks to tune for (nvme_path)")
    add(
        "--sweep_config", type=Path, help="JSON file: a list of values for each of block_size, queue_depth, io_parallel"
    )
    add("--no_read", action="store_true", help="do not measure reads")
    add("--no_write", action="store_true", help="do not measure writes")
    add("--io_size", type=size_of, default=size_of("400M"), help="bytes of a file (default 400M)")
    add("--gpu", action="store_true", help="not available: files pass through host memory")
    add("--gds", action="store_true", help="not available: files pass through host memory")
    add(
        "--flush_page_cache",
        action="store_true",
        help="refuse folders without direct access, where the page cache would be measured",
    )
    add("--log_dir", type=Path, default=Path("_aio_bench_logs"), help="folder for all results (default %(default)s)")
    add("--loops", type=count_of, default=3, help="number of passes; the fastest counts (default 3)")
    add("--verbose", action="store_true", help="print a line for each setting when it is measured")
    return parser.parse_args(args)


def _run(options: argparse.Namespace) -> None:
    if options.gpu or options.gds:
        raise NotYetSupportedError("--gpu and --gds: files always pass through host memory here; leave them out")
    operations = tuple(
        name for name, left_out in (("write", options.no_write), ("read", options.no_read)) if not left_out
    )
    if not operations:
        raise DeepSpeedConfigError("--no_read and --no_write leave nothing to measure; drop one of them")
    choices = _choices(options.sweep_config)
    _write_log(options, [])  # a folder that cannot be written is refused before anything is measured
    console = Console()

    def report(trial: TuneTrial) -> None:
        if options.flush_page_cache and not all(speed.is_direct for speed in trial.speeds):
            raise DeepSpeedConfigError(
                "--flush_page_cache: a folder's file system has no direct access, so the page cache cannot be "
                "bypassed; choose a folder on a local disk, or drop the option to measure with the cache"
            )
        if options.verbose:
            console.print(", ".join(f"{name} {value}" for name, value in _row(trial, options.nvme_dir).items()))

    trials = sweep(
        options.nvme_dir, options.io_size, choices, loops=options.loops, operations=operations, on_trial=report
    )
    best = best_of(trials)
    log = _write_log(options, trials)
    _show(trials, best, operations, console)
    if not all(speed.is_direct for speed in best.speeds):
        console.print("no direct access in some folder: these speeds include the page cache")
    console.print(f"all {len(trials)} results: {log}", soft_wrap=True)
    sys.stdout.write(json.dumps({"aio": aio_section(best.settings)}, indent=2) + "\n")


def aio_section(settings: IoSettings) -> dict[str, int]:
    """Returns the section ``aio`` for settings."""
    return {
        "block_size": settings.block_size,
        "queue_depth": settings.queue_depth,
        "intra_op_parallelism": settings.threads,
    }


def _choices(path: Path | None) -> list[IoSettings]:
    lists: dict[str, list[Any]] = {**_SWEEP}
    if path is not None:
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DeepSpeedConfigError(
                f"--sweep_config {path}: cannot be read as JSON ({error}); correct the file"
            ) from error
        if not isinstance(content, dict):
            raise DeepSpeedConfigError(
                f"--sweep_config {path}: expected an object of lists, found {type(content).__name__}; correct the file"
            )
        for key, values in content.items():
            name = _OTHER_NAMES.get(key, key)
            if name not in _SWEEP:
                known = ", ".join((*_SWEEP, "io_parallel"))
                raise DeepSpeedConfigError(
                    f"--sweep_config {path}: {key} is not a setting of the sweep; correct it to one of {known}"
                )
            lists[name] = [_number(path, key, value) for value in (values if isinstance(values, list) else [values])]
    combinations = itertools.product(*(lists[name] for name in _SWEEP))
    choices = [IoSettings(*combination) for combination in combinations]
    if not choices:
        raise DeepSpeedConfigError(
            f"--sweep_config {path}: a list is empty, so there is nothing to try; give it values, or leave the key out"
        )
    return choices


def _number(path: Path, key: str, value: Any) -> int:
    try:
        return size_of(str(value))
    except argparse.ArgumentTypeError as error:
        raise DeepSpeedConfigError(f"--sweep_config {path}: {key}: {error}") from None


def _row(trial: TuneTrial, folders: Sequence[Path]) -> dict[str, Any]:
    speeds = {
        f"{operation} {folder}": f"{speed / 1e9:.2f} GB/s"
        for folder, found in zip(folders, trial.speeds, strict=True)
        for operation, speed in found.ours.items()
    }
    return {**aio_section(trial.settings), **speeds}


def _write_log(options: argparse.Namespace, trials: Sequence[TuneTrial]) -> Path:
    path = options.log_dir / _LOG_NAME
    results = [
        {
            **aio_section(trial.settings),
            "bytes_per_second": {
                str(folder): found.ours for folder, found in zip(options.nvme_dir, trial.speeds, strict=True)
            },
        }
        for trial in trials
    ]
    try:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"bytes": options.io_size, "loops": options.loops, "results": results}, indent=1))
    except OSError as error:
        raise DeepSpeedConfigError(
            f"--log_dir {options.log_dir}: cannot be written ({error.strerror}); choose another folder"
        ) from error
    return path


def _show(trials: Sequence[TuneTrial], best: TuneTrial, operations: tuple[str, ...], console: Console) -> None:
    title = f"the fastest of {len(trials)} choices, GB/s (mean over the folders)"
    table = Table("", "block_size", "in flight", *operations, title=title, title_justify="left")
    for trial in sorted(trials, key=lambda trial: trial.seconds_per_byte)[:_SHOWN]:
        speeds = [sum(speed.ours[name] for speed in trial.speeds) / len(trial.speeds) / 1e9 for name in operations]
        cells = (f"{trial.settings.block_size:,}", str(trial.in_flight), *(f"{speed:.2f}" for speed in speeds))
        table.add_row("taken" if trial is best else "", *cells)
    console.print(table)


@dataclass(frozen=True)
class TuneTrial:
    """The speeds that were measured with one combination of I/O settings."""

    settings: IoSettings
    speeds: tuple[FileSpeed, ...]  # the speeds in each folder

    @property
    def seconds_per_byte(self) -> float:
        """Returns the sum of the seconds per byte of every measured operation in every folder."""
        return sum(1 / speed for folder in self.speeds for speed in folder.ours.values())

    @property
    def in_flight(self) -> int:
        """Returns the number of concurrent requests."""
        return self.settings.queue_depth * self.settings.threads


def sweep(
    folders: Sequence[Path],
    nbytes: int,
    choices: Sequence[IoSettings],
    *,
    loops: int = 3,
    operations: tuple[str, ...] = ("write", "read"),
    on_trial: Callable[[TuneTrial], None] = lambda trial: None,
) -> list[TuneTrial]:
    """Measures every choice in every folder, one after the other; the fastest of ``loops`` passes counts.

    Raises:
        OffloadError: A disk is too small or fails.
    """
    trials = []
    for settings in choices:
        speeds = tuple(
            measure_files(folder, nbytes, settings, loops=loops, operations=operations, with_fio=False)
            for folder in folders
        )
        trials.append(TuneTrial(settings, speeds))
        on_trial(trials[-1])
    return trials


def best_of(trials: Sequence[TuneTrial]) -> TuneTrial:
    """Returns the fastest trial; among equally fast ones, that with the fewest and smallest requests in flight."""
    limit = min(trial.seconds_per_byte for trial in trials) / _AS_GOOD
    near = [trial for trial in trials if trial.seconds_per_byte <= limit]
    return min(near, key=lambda trial: (trial.in_flight, trial.settings.block_size, trial.seconds_per_byte))


if __name__ == "__main__":
    main()
