"""Short measurements of the devices on which the script trains, for the predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.devices import CONTENTION_OF_PROCESSORS, Device, DeviceEfficiency

_SECONDS = 0.05  # of one probe
_MIB = 2**20


def measure_device(dtype: torch.dtype, device: torch.device, memory: int) -> Device:
    """Measures matrix products, copies, operation launches and an all-gather. Every rank must call it.

    The rates of the returned device are the measured ones, so the fractions in its ``DeviceEfficiency`` are 1. Takes
    about half a second.

    Args:
        memory: Memory of a rank, in bytes.
    """
    side = 512 if device.type == "cpu" else 4096
    left = torch.randn(side, side, device=device).to(dtype)
    size = (16 if device.type == "cpu" else 256) * _MIB
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    one = torch.zeros(1, device=device, requires_grad=True)
    comm.barrier()
    flops = 2 * side**3 / _seconds_of(lambda: left @ left)
    bandwidth = 2 * size / _seconds_of(lambda: target.copy_(source))
    host_link = bandwidth
    if device.type != "cpu":
        on_host = get_accelerator().pin_memory(torch.empty(size, dtype=torch.uint8))
        host_link = size / _seconds_of(lambda: target.copy_(on_host, non_blocking=True))
    launch = _launch_seconds(one)
    link, start = _link_speed(device)
    reached = DeviceEfficiency(
        matmul=1.0,
        attention=1.0,
        bandwidth=1.0,
        link=1.0,
        network=1.0,
        half_size=16.0,
        launch=launch,
        start=start,
        contention=CONTENTION_OF_PROCESSORS if device.type == "cpu" else DeviceEfficiency().contention,
    )
    return Device(
        name=get_accelerator().device_name(device.index) or device.type,
        memory=memory,
        flops=flops,
        memory_bandwidth=bandwidth,
        link=link,
        host_link=host_link,
        source="measured by the tuner",
        efficiency=reached,
    )


def _link_speed(device: torch.device) -> tuple[float, float]:
    """In bytes per second and seconds; zeros for one rank. Every rank must call it."""
    ranks = comm.get_world_size()
    if ranks == 1:
        return 0.0, 0.0
    start = _gather_seconds(1, device)
    numel = (2 if device.type == "cpu" else 64) * _MIB // ranks
    seconds = _gather_seconds(numel, device)
    return numel * (ranks - 1) / max(seconds - start, seconds / 2), start


def _gather_seconds(numel: int, device: torch.device) -> float:
    """Returns the seconds of an all-gather of ``numel`` bytes per rank, the minimum of six. Every rank must call it."""
    part = torch.zeros(numel, dtype=torch.uint8, device=device)
    whole = torch.empty(numel * comm.get_world_size(), dtype=torch.uint8, device=device)
    rounds = []
    for _ in range(6):  # a fixed number: all ranks must make the same number of calls
        get_accelerator().synchronize()
        start = time.perf_counter()
        comm.all_gather_into_tensor(whole, part)
        get_accelerator().synchronize()
        rounds.append(time.perf_counter() - start)
    return min(rounds)


def _launch_seconds(one: torch.Tensor) -> float:
    """Returns the seconds that the host needs to launch one operation of forward or backward."""
    start = time.perf_counter()
    repeats = 50
    for _ in range(repeats):
        value = one
        for _ in range(4):
            value = value + 1
        torch.autograd.grad(value, one)
    seconds = (time.perf_counter() - start) / (repeats * 8)
    get_accelerator().synchronize()
    return seconds


def _seconds_of(work: Callable[[], Any]) -> float:
    """Returns the seconds of one call, the minimum over several rounds."""
    accelerator = get_accelerator()
    work()
    accelerator.synchronize()
    rounds: list[float] = []
    repeats, deadline = 1, time.perf_counter() + _SECONDS
    while not rounds or time.perf_counter() < deadline:
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        accelerator.synchronize()
        rounds.append((time.perf_counter() - start) / repeats)
        repeats = max(1, min(50, int(0.005 / max(rounds[-1], 1e-9))))
    return min(rounds)
