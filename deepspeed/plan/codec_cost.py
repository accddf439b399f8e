"""Whether codes pay on a link: bytes and processor time of one reduction, by formula.

F is (n - 1) / n for n ranks and Psi the number of elements. What a rank sends: to the owners F Psi bits / 8; where all
get the sum, as much again. On gloo two ranks exchange everything once, and from three on the second half carries fp32
sums. Codes are written once before each half and read once after it. Nothing is taken to hide anything: on a device
that computes while it waits, both sides of the comparison shrink.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed.comm.codecs.codec import DEVICE_ELEMENTS, Codec, bits_of
from deepspeed.comm.codecs.table import CodecWork

LAUNCH = 5e-6
"""Seconds that a device takes at least to begin a kernel."""


@dataclass(frozen=True)
class NetworkLink:
    """What connects a rank to the others.

    Attributes:
        rate: Bytes per second in each direction.
        delay: Seconds that a message takes besides.
    """

    rate: float
    delay: float = 0.0


@dataclass(frozen=True)
class CodecCost:
    """How elements travel.

    Attributes:
        name: Of the codec, for tables.
        bits: Of an element on the wire, scales included; where all get the sum, the mean of both halves.
        encode: Nanoseconds of one core to make an element ready.
        decode: Nanoseconds of one core to add an arrived element to a sum.
        launches: Seconds to start the kernels that encode and decode a batch on a device; 0 on a CPU.
    """

    name: str
    bits: float
    encode: float
    decode: float
    launches: float = 0.0


def plain_bits_on_the_wire(bits: int, ranks: int, *, whole: bool, native: bool = False) -> float:
    """Bits of an element that travels as it is, as :attr:`CodecCost.bits` counts them.

    Args:
        bits: Of a gradient.
        ranks: Among which it is summed.
        whole: All get the sum.
        native: By the backend's own collectives, not by gloo.
    """
    if not whole or native:
        return bits
    if ranks == 2:
        return bits  # everything once: 2 F is 1
    return (bits + 32) / 2


def sent_bytes(numel: int, ranks: int, way: CodecCost, *, whole: bool) -> float:
    """Bytes that a rank sends for one reduction."""
    halves = 2 if whole else 1
    return halves * (ranks - 1) / ranks * numel * way.bits / 8


def exchange_seconds(numel: int, ranks: int, link: NetworkLink, way: CodecCost, *, whole: bool) -> float:
    """Seconds of one reduction, nothing hidden.

    Args:
        numel: Elements.
        ranks: Among which they are summed.
        link: Of each rank.
        way: How they travel.
        whole: All get the sum; otherwise the owner of a slice does.
    """
    halves = 2 if whole else 1
    processor = codec_seconds(numel, ranks, way, whole=whole)
    return sent_bytes(numel, ranks, way, whole=whole) / link.rate + halves * (ranks - 1) * link.delay + processor


def way_on(codec: Codec, work: CodecWork, memory_bandwidth: float | None) -> CodecCost:
    """How elements travel as codes, and how long making them takes.

    Args:
        codec: Which.
        work: What it does.
        memory_bandwidth: Bytes per second of the device that makes them; None: one core of a CPU. On a device it is an
            estimate: kernels begin one after the other, and each reads and writes its operands.
    """
    if memory_bandwidth is None:
        return CodecCost(codec.name, bits_of(codec), *work.nanoseconds)
    each = [1e9 * nbytes / memory_bandwidth if memory_bandwidth else 0.0 for nbytes in work.nbytes]
    return CodecCost(codec.name, bits_of(codec), each[0], each[1], sum(work.kernels) * LAUNCH)


def codec_seconds(numel: int, ranks: int, way: CodecCost, *, whole: bool) -> float:
    """Seconds that a rank encodes and decodes for one reduction; see :func:`exchange_seconds`."""
    halves = 2 if whole else 1
    encoded = numel * (1 + (1 / ranks if whole else 0))
    batches = halves * math.ceil(numel / DEVICE_ELEMENTS)
    return (encoded * way.encode + halves * numel * way.decode) * 1e-9 + batches * way.launches
