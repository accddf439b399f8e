"""Times forward and backward of one decoder block, as a whole and operation by operation.

Two micro-batches are timed: the time that grows with the micro-batch gives the rates of a device, the rest the time to
start an operation. The shortest of several runs counts, as other programs only lengthen runs. If ranks share cores, a
single operation may have a core for itself, so ``factor`` is measured on whole blocks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.devices import Device, DeviceEfficiency
from deepspeed.plan.decoder import DecoderShape, layers_of
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.timeline.operation_cost import OperationKind
from deepspeed.plan.values import arithmetic_of

_WARMUPS = 2
_MOST_FACTOR = 1.3


@dataclass(frozen=True)
class ProbeSizes:
    """Holds the sizes that the block probe runs."""

    shape: DecoderShape  # the decoder whose block is timed; one layer, vocabulary and head are not used
    tokens: int  # tokens of a sample
    micro_batches: tuple[int, int]  # samples of the two runs, the smaller first
    dtype: torch.dtype  # the dtype of parameters and activations
    trials: int  # runs of each that count


@dataclass(frozen=True)
class BlockSpeed:
    """Holds the rates that a rank's device reaches in a block."""

    rates: dict[OperationKind, float]  # operations (products, attention) or bytes (elementwise) per second, by kind
    launch: float  # seconds to start an operation
    factor: float  # seconds of whole blocks over those that ``rates`` and ``launch`` give


class _TimedOperations(TorchDispatchMode):
    """Times each operation and sums its work by kind. Waits for the device after each."""

    def __init__(self, unit: DeviceModel, device: torch.device) -> None:
        super().__init__()
        self._unit, self._device = unit, device
        self.seconds: list[float] = []
        self.work: list[tuple[OperationKind, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        start = time.perf_counter()
        result = func(*args, **kwargs)
        get_accelerator().synchronize()
        seconds = time.perf_counter() - start
        cost = arithmetic_of(func, args, kwargs, result, device_type=self._device.type)
        if cost.kind is not OperationKind.FREE:
            self.seconds.append(seconds)
            self.work.append((cost.kind, cost.seconds(self._unit)))
        return result


@dataclass(frozen=True)
class _TimedBlock:
    """One micro-batch: seconds of the whole, and by kind seconds and work; the number of operations."""

    whole: float
    seconds: dict[OperationKind, float]
    work: dict[OperationKind, float]
    launches: int


def probe_block(sizes: ProbeSizes, device: torch.device, half_size: float, barrier: Callable[[], None]) -> BlockSpeed:
    """Times a block and returns what the device reaches.

    Args:
        barrier: Called before every run. All ranks of a machine must call this function together, since they share
            its memory and, on processors, its cores.
    """
    # On it the seconds of an operation are its operations or its bytes.
    reached = DeviceEfficiency(matmul=1.0, attention=1.0, bandwidth=1.0, half_size=half_size)
    unit = DeviceModel(Device("unit", 0, 1.0, 1.0, 0.0, 0.0, "", efficiency=reached))
    small, large = (_time_block(sizes, samples, device, unit, barrier) for samples in sizes.micro_batches)
    rates = {}
    for kind, work in large.work.items():
        more = large.seconds[kind] - small.seconds[kind]
        grown = (work - small.work[kind]) / more if more > 0 else 0.0
        whole = work / large.seconds[kind]
        # A rate of the growth far from that of the whole run is noise.
        rates[kind] = grown if whole <= grown <= 2 * whole else whole
    sums = [sum(work / rates[kind] for kind, work in timed.work.items()) for timed in (small, large)]
    factor = (large.whole - small.whole) / (sums[1] - sums[0])
    launch = (small.whole - factor * sums[0]) / small.launches
    if not 1 / _MOST_FACTOR < factor < _MOST_FACTOR or launch < 0:  # noise: one number for both runs is more robust
        factor, launch = (small.whole + large.whole) / sum(sums), 0.0
    return BlockSpeed(rates, launch, factor)


def block_runner(sizes: ProbeSizes, samples: int, device: torch.device) -> Callable[[], None]:
    """Returns a function that runs a micro-batch of ``samples`` forward and backward and waits for the device."""
    block: nn.Module = layers_of(sizes.shape)[1].build().to(device, sizes.dtype)
    x = torch.randn(samples, sizes.tokens, sizes.shape.hidden, device=device, dtype=sizes.dtype, requires_grad=True)
    seed = torch.ones_like(x)

    def run() -> None:
        block(x).backward(seed)
        get_accelerator().synchronize()

    return run


def predict_block(sizes: ProbeSizes, samples: int, where: torch.device, device: Device) -> float:
    """Returns the seconds of :func:`block_runner`'s block by the figures of ``device``; it is run once on ``where``."""
    run = block_runner(sizes, samples, where)
    with _TimedOperations(DeviceModel(device), where) as timed:
        run()
    return sum(seconds for _, seconds in timed.work) + len(timed.work) * device.efficiency.launch


def _time_block(
    sizes: ProbeSizes, samples: int, device: torch.device, unit: DeviceModel, barrier: Callable[[], None]
) -> _TimedBlock:
    block = block_runner(sizes, samples, device)

    def run() -> float:
        barrier()
        get_accelerator().synchronize()
        start = time.perf_counter()
        block()
        return time.perf_counter() - start

    wholes = [run() for _ in range(_WARMUPS + sizes.trials)][_WARMUPS:]
    rows = []
    for _ in range(sizes.trials):
        with _TimedOperations(unit, device) as timed:
            run()
        rows.append(timed)
    each = [min(values) for values in zip(*(row.seconds for row in rows), strict=True)]
    seconds: dict[OperationKind, float] = defaultdict(float)
    work: dict[OperationKind, float] = defaultdict(float)
    for (kind, amount), took in zip(rows[0].work, each, strict=True):
        seconds[kind] += took
        work[kind] += amount
    return _TimedBlock(min(wholes), dict(seconds), dict(work), len(each))
