"""Compares the cost of gradients with and without a codec: bytes, codec time, and time on the machine's links.

A sum in the backend's own collectives crosses the network once for all devices of a node (``plan.times``); codes are
sent directly to the owners, by each device, so several devices that share a network send more over it.

Of Psi elements a rank of n sends Psi (n - 1) / n bits / 8 to the owners; where all get the sum, as much again. On gloo
two ranks exchange everything once, and from three on the second half carries fp32 sums. Codes are written once before
each half and read once after it. No overlap with computation is assumed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.comm.base.codec import DEVICE_ELEMENTS, Codec, bits_of
from deepspeed.comm.codecs.table import CODECS, CodecWork
from deepspeed.config.codec_names import GRADIENT_CODECS
from deepspeed.engine.communication_compression import gradient_bits
from deepspeed.engine.inspection import EngineInspection
from deepspeed.plan.machine import Machine
from deepspeed.plan.times import busiest_seconds, count_near, count_spanned
from deepspeed.zero.gradient.error_feedback import feedback_numel

LAUNCH = 5e-6
"""Seconds that a device takes at least to begin a kernel."""
NAMES = tuple(name for name in CODECS if name in GRADIENT_CODECS)
"""Codecs of gradients that are compared with what a configuration requests."""


@dataclass(frozen=True)
class CodecCost:
    """Holds the cost of sending gradients with one codec."""

    bits: float  # bits per element sent, scales included; in an all-reduce, the mean of both halves
    encode: float  # nanoseconds of one core to encode an element
    decode: float  # nanoseconds of one core to decode an element and add it to a sum
    launches: float = 0.0  # seconds to start the kernels that encode and decode a batch on a device; 0 on a CPU


def way_on(codec: Codec, work: CodecWork, memory_bandwidth: float | None) -> CodecCost:
    """Returns the bits per element of a codec and the time of encoding and decoding.

    Args:
        memory_bandwidth: Bytes per second that kernels of the device reach; None: one core of a CPU. On a device it is
            an estimate: kernels begin one after the other, and each reads and writes its operands.
    """
    if memory_bandwidth is None:
        return CodecCost(bits_of(codec), *work.nanoseconds)
    each = [1e9 * nbytes / memory_bandwidth if memory_bandwidth else 0.0 for nbytes in work.nbytes]
    return CodecCost(bits_of(codec), each[0], each[1], sum(work.kernels) * LAUNCH)


def codec_seconds(numel: int, ranks: int, way: CodecCost, *, whole: bool) -> float:
    """Returns the seconds that a rank encodes and decodes for one reduction."""
    halves = 2 if whole else 1
    encoded = numel * (1 + (1 / ranks if whole else 0))
    batches = halves * math.ceil(numel / DEVICE_ELEMENTS)
    return (encoded * way.encode + halves * numel * way.decode) * 1e-9 + batches * way.launches


@dataclass(frozen=True)
class PlannedSum:
    """Sums over ranks that a step makes of some of a rank's gradients."""

    numel: int  # elements
    members: tuple[int, ...]  # the ranks whose gradients are summed, the planned one among them
    rank: int  # the planned one
    whole: bool  # all get the sum; otherwise the owner of a slice does
    bits: int  # bits of an element without a codec
    times: int  # times per step
    kept: int  # elements of the error that a rank keeps for error feedback


@dataclass(frozen=True)
class CodedCost:
    """The cost of sending gradients in one way, of one rank in one step."""

    name: str  # ``plain`` or a codec's
    bits: float  # bits of an element; under ``plain``, those without a codec
    nbytes: int  # bytes sent
    link_seconds: float  # lower bound of the seconds on the links
    codec_seconds: float  # seconds to encode and decode
    kept: int  # bytes of error feedback

    @property
    def seconds(self) -> float:
        """Seconds on the links and of the codec together, without overlap."""
        return self.link_seconds + self.codec_seconds


def gradient_sums(engine: EngineInspection, rank: int, ranks: int, micro_batches: int) -> list[PlannedSum]:
    """Returns the sums of gradients that ``rank`` of ``ranks`` makes in a step, those of alike buckets together."""
    if engine.reducer is None:
        return []
    policy = engine.reducer.policy
    bits = gradient_bits(engine.root, engine.precision)
    times = micro_batches if policy.every_micro_batch else 1
    found: Counter[tuple[tuple[int, ...], bool, int, int]] = Counter()
    kept: Counter[tuple[tuple[int, ...], bool, int, int]] = Counter()
    for gradients in engine.reducer.buckets:
        group, layout = gradients.bucket.group, gradients.bucket.layout
        if group.reduce.size > 1:
            key = (group.reduce.ranks or tuple(range(ranks)), not policy.to_owner, bits, times)
            found[key] += layout.numel
            kept[key] += feedback_numel(layout, to_owner=policy.to_owner, spread=group.is_spread)
        if group.combine is not None and group.replicas > 1:
            # Sums of slices, in fp32.
            found[group.combine.ranks, not group.is_spread, 32, times if group.is_spread else 1] += layout.slice_numel
    return [PlannedSum(found[key], key[0], rank, *key[1:], kept[key]) for key in found]


def gradient_codec(engine: EngineInspection) -> Codec | None:
    """Returns the codec of what an engine reduces (gradients, or what it sends instead of them); None: no codec."""
    if engine.driver.reported_codec is not None:
        return engine.driver.reported_codec
    return next((group.reduce_codec for group in engine.groups if group.reduce_codec is not None), None)


def coded_costs(
    sums: Sequence[PlannedSum], machine: Machine, *, native: bool, may_skip: bool, codecs: Sequence[Codec]
) -> list[CodedCost]:
    """Returns the cost of each codec per rank and step, plain first; empty if nothing is sent or the speed is unknown.

    Args:
        native: Sums that are sent as they are, by the backend's own collectives, not by gloo.
        may_skip: Updates may be skipped, so the error is kept twice.
    """
    sums = [one for one in sums if len(one.members) > 1]
    has_links = machine.device.link > 0 or all(count_spanned(one.members, machine)[1] == 1 for one in sums)
    if not sums or machine.network <= 0 or not has_links:
        return []
    device = machine.device
    bandwidth = device.memory_bandwidth * device.efficiency.bandwidth if native else None
    plain = [_plain(one, machine, native=native) for one in sums]
    bits = sum(one.bits * one.numel for one in sums) / sum(one.numel for one in sums)
    rows = [CodedCost("plain", bits, sum(row[0] for row in plain), sum(row[1] for row in plain), 0.0, 0)]
    for codec in codecs:
        way = way_on(codec, CODECS[codec.name].work, bandwidth)
        moved = [_coded(one, bits_of(codec), machine, native=native) for one in sums]
        codec_time = sum(one.times * codec_seconds(one.numel, len(one.members), way, whole=one.whole) for one in sums)
        kept = sum(one.kept for one in sums) * (8 if may_skip else 4) if codec.feeds_back else 0
        sent, seconds = sum(row[0] for row in moved), sum(row[1] for row in moved)
        rows.append(CodedCost(codec.name, way.bits, sent, seconds, codec_time, kept))
    return rows


def _plain(one: PlannedSum, machine: Machine, *, native: bool) -> tuple[int, float]:
    if native:
        halves = [_by_ring(one, one.bits, machine)] * (2 if one.whole else 1)
    else:
        # gloo: the second half carries fp32 sums; two ranks exchange everything once.
        back = one.bits if len(one.members) == 2 else 32
        halves = [_to_all(one, bits, machine) for bits in ((one.bits, back) if one.whole else (one.bits,))]
    return _total(one, halves)


def _coded(one: PlannedSum, bits: float, machine: Machine, *, native: bool) -> tuple[int, float]:
    halves = [_to_all(one, bits, machine)]
    if one.whole:
        halves.append(_by_ring(one, bits, machine) if native else _to_all(one, bits, machine))
    return _total(one, halves)


def _total(one: PlannedSum, halves: Sequence[tuple[float, float]]) -> tuple[int, float]:
    return round(one.times * sum(nbytes for nbytes, _ in halves)), one.times * sum(seconds for _, seconds in halves)


def _to_all(one: PlannedSum, bits: float, machine: Machine) -> tuple[float, float]:
    """Returns the bytes, and seconds on the slower links, if each rank sends every other one its slice."""
    each = one.numel * bits / 8 / len(one.members)
    near = count_near(one.members, one.rank, machine) - 1
    far = len(one.members) - 1 - near
    return each * (near + far), busiest_seconds(each * near, each * far, machine)


def _by_ring(one: PlannedSum, bits: float, machine: Machine) -> tuple[float, float]:
    """Returns half of an all-reduce by the backend, which crosses the network once for all devices of a node."""
    nodes, devices = count_spanned(one.members, machine)
    nbytes = one.numel * bits / 8
    inside, between = nbytes * (devices - 1) / devices, nbytes * (nodes - 1) / nodes / devices
    return nbytes * (len(one.members) - 1) / len(one.members), busiest_seconds(inside, between, machine)
