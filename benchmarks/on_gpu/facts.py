"""Part A: versions, the GPU tests, locked host memory, copies between host and device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch

from deepspeed.offload.pinned import page_buffer
from on_gpu.part import ROOT, Report, Settings, child_environment, timed, waiter

TITLE = "A. Facts and surface"
GPU_TESTS = (
    "tests/gpu",
    "tests/accelerator",
)  # where those with the mark ``gpu`` are; collecting all takes a minute


def run(settings: Settings, report: Report) -> None:
    """Fills the report."""
    report.attempt("versions", lambda: _versions(settings, report))
    report.attempt("ds_report", lambda: _command(settings, report, "deepspeed.env_report", []))
    chosen = ["--collect-only"] if settings.dry else []
    report.attempt(
        "pytest -m gpu", lambda: _command(settings, report, "pytest", ["-q", "-m", "gpu", *chosen, *GPU_TESTS])
    )
    report.attempt("copies", lambda: _copies(settings, report))
    report.attempt("locked memory", lambda: _locked(settings, report))


def _versions(settings: Settings, report: Report) -> None:
    table = report.table("What is here", ["what", "found"])
    report.row(table, "torch", torch.__version__)
    if settings.dry:
        report.row(table, "device", "cpu (dry run)")
        return
    properties = torch.cuda.get_device_properties(0)
    report.row(table, "device", properties.name)
    report.row(table, "compute capability", f"{properties.major}.{properties.minor}")
    report.row(table, "memory (GiB)", properties.total_memory / 2**30)
    report.row(table, "NCCL", ".".join(map(str, torch.cuda.nccl.version())))


def _command(settings: Settings, report: Report, module: str, words: list[str]) -> None:
    """Runs a module of the project and reports the last line that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env=child_environment(settings),
        capture_output=True,
        text=True,
        timeout=400,
    )
    table = report.table(f"python -m {module} {' '.join(words)}".strip(), ["exit code", "last line"])
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    report.row(table, done.returncode, lines[-1] if lines else "")
    if done.returncode:
        report.problem(f"{module} ended with {done.returncode}: {(done.stdout + done.stderr)[-800:]}")


def _copies(settings: Settings, report: Report) -> None:
    """Measures bytes per second between locked host memory and the device, in each direction."""
    nbytes = 2**20 if settings.dry else 2**28
    host = page_buffer(nbytes, pin=not settings.dry)
    device = torch.empty(nbytes, dtype=torch.uint8, device=settings.device)
    table = report.table("Copies of one block", ["direction", "MiB", "GB/s"])
    for name, target, source in (("host to device", device, host), ("device to host", host, device)):
        seconds = timed(
            lambda target=target, source=source: target.copy_(source, non_blocking=True),  # type: ignore[misc]
            warmup=2,
            steps=5,
            wait=waiter(settings.device),
        )
        report.row(table, name, nbytes // 2**20, nbytes / seconds / 1e9)


def _locked(settings: Settings, report: Report) -> None:
    """Locks host memory, forks, writes to the memory, copies it to the device, and checks the copy."""
    nbytes = 2**20 if settings.dry else 2**33
    start = time.perf_counter()
    pages = page_buffer(nbytes, pin=not settings.dry)
    table = report.table("Locked host memory", ["what", "found"])
    report.row(table, f"seconds to lock {nbytes / 2**30:.3g} GiB", time.perf_counter() - start)
    pages[:4096].fill_(1)
    child = os.fork()
    if child == 0:  # stays alive, as a worker of a data loader does
        signal.pause()
        os._exit(0)
    try:
        pages[:4096].fill_(2)
        arrived = pages[:4096].to(settings.device).cpu()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    stale = int((arrived != 2).sum())
    report.row(table, "bytes that a fork left stale (expected 0)", stale)
    if stale:
        report.problem(f"after a fork, {stale} bytes on the device are older than those that the host wrote")
