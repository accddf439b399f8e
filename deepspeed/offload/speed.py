"""Measures bandwidths of file reads and writes, of this package and of ``fio``; used by ``ds_io``."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from deepspeed.errors import OffloadError
from deepspeed.offload.file_io import BlockFile, IoSettings
from deepspeed.offload.pinned import PAGE, page_buffer
from deepspeed.offload.run_directory import RunDirectory

OPERATIONS = ("write", "read")
_FIO_SECONDS = 120.0


@dataclass(frozen=True)
class FileSpeed:
    """Holds the measured speed of reading and writing files."""

    nbytes: int  # size of the file; each pass reads or writes all of it sequentially
    is_direct: bool  # whether the page cache is bypassed
    ours: dict[str, float]  # bytes per second of this package's fastest pass, by operation
    fio: dict[str, float]  # bytes per second of fio's fastest pass, by operation; empty without fio

    def against_fio(self, operation: str) -> float | None:
        """Returns the ratio of this package's speed to fio's; None without fio."""
        return self.ours[operation] / self.fio[operation] if operation in self.fio else None


def measure_files(
    folder: Path,
    nbytes: int,
    settings: IoSettings,
    *,
    loops: int = 3,
    operations: tuple[str, ...] = OPERATIONS,
    with_fio: bool = True,
) -> FileSpeed:
    """Times sequential passes over a file like those of offloaded states, and removes it.

    This package and fio take turns on the same file, with the same size and number of requests, and both with or both
    without direct access. The fastest pass counts, as other users of the disk can only slow a pass down.

    Args:
        nbytes: Its size, rounded up to pages; a buffer of that size is held in memory.
        operations: ``write``, ``read`` or both.
        with_fio: Whether to compare with fio, if it is installed.

    Raises:
        OffloadError: The disk is too small or fails, the data read differs from the data written, or fio fails.
    """
    nbytes = -(-nbytes // PAGE) * PAGE
    directory = RunDirectory(folder, rank=0, purpose="speed")
    file: BlockFile | None = None
    try:
        file = BlockFile(directory.path / "speed.bin", settings)
        file.grow(nbytes)
        data = page_buffer(nbytes, pin=False)
        data.view(torch.int64).copy_(torch.arange(nbytes // 8))
        checksum = int(data.view(torch.int64).sum())
        file.write(data, 0).wait()  # the first write of reserved space takes longer than later ones
        may_compare = with_fio and shutil.which("fio") is not None
        ours: dict[str, float] = {}
        fio: dict[str, float] = {}
        for _ in range(loops):
            for operation in operations:
                move = file.write if operation == "write" else file.read
                if operation == "read":
                    data.zero_()
                speed = nbytes / _seconds(lambda move=move: move(data, 0).wait())  # type: ignore[misc]
                ours[operation] = max(speed, ours.get(operation, 0.0))
                if operation == "read" and int(data.view(torch.int64).sum()) != checksum:
                    raise OffloadError(f"{file.path}: the data read differs from the data written; check the disk")
                if may_compare:
                    speed = _fio(file, operation, nbytes, settings)
                    fio[operation] = max(speed, fio.get(operation, 0.0))
                    if operation == "write":
                        file.write(data, 0).wait()  # fio overwrites the file
        return FileSpeed(nbytes, file.is_direct, ours, fio)
    finally:
        if file is not None:
            file.close()
        directory.remove()


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _fio(file: BlockFile, operation: str, nbytes: int, settings: IoSettings) -> float:
    name = str(file.path).replace(":", "\\:")  # fio separates files by colons
    command = [
        "fio",
        "--name=speed",
        f"--filename={name}",
        f"--rw={operation}",
        f"--size={nbytes}",
        f"--bs={settings.block_size}",
        f"--iodepth={settings.queue_depth * settings.threads}",
        f"--direct={int(file.is_direct)}",
        f"--ioengine={'libaio' if file.is_direct else 'psync'}",
        "--output-format=json",
    ]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_FIO_SECONDS)
        return float(json.loads(done.stdout)["jobs"][0][operation]["bw_bytes"])
    except subprocess.CalledProcessError as error:
        raise OffloadError(
            f"fio failed on {file.path} ({error.stderr.strip()[:300]}); leave it out with --no_fio"
        ) from error
    except (subprocess.TimeoutExpired, json.JSONDecodeError, LookupError, ValueError) as error:
        raise OffloadError(
            f"fio gave no result for {file.path} ({type(error).__name__}); leave it out with --no_fio"
        ) from error
