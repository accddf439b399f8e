"""Whether codes pay on a link: bytes and processor time of one reduction, by formula.

F is (n - 1) / n for n ranks and Psi the number of elements. What a rank sends: to the owners F Psi bits / 8; where all
get the sum, as much again. On gloo two ranks exchange everything once, and from three on the second half carries fp32
sums. Codes are written once before each half and read once after it. Nothing is taken to hide anything: on a device
that computes while it waits, both sides of the comparison shrink.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What connects a rank to the others.

    Attributes:
        rate: Bytes per second in each direction.
        delay: Seconds that a message takes besides.
    """

    rate: float
    delay: float = 0.0


@dataclass(frozen=True)
class Way:
    """How elements travel.

    Attributes:
        name: Of the codec, for tables.
        bits: Of an element on the wire, scales included; where all get the sum, the mean of both halves.
        encode: Nanoseconds of one core to make an element ready.
        decode: Nanoseconds of one core to add an arrived element to a sum.
    """

    name: str
    bits: float
    encode: float
    decode: float


def plain_bits_on_the_wire(bits: int, ranks: int, *, whole: bool, native: bool = False) -> float:
    """Bits of an element that travels as it is, as :attr:`Way.bits` counts them.

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


def sent_bytes(numel: int, ranks: int, way: Way, *, whole: bool) -> float:
    """Bytes that a rank sends for one reduction."""
    halves = 2 if whole else 1
    return halves * (ranks - 1) / ranks * numel * way.bits / 8


def exchange_seconds(numel: int, ranks: int, link: Link, way: Way, *, whole: bool) -> float:
    """Seconds of one reduction, nothing hidden.

    Args:
        numel: Elements.
        ranks: Among which they are summed.
        link: Of each rank.
        way: How they travel.
        whole: All get the sum; otherwise the owner of a slice does.
    """
    halves = 2 if whole else 1
    encoded = numel * (1 + (1 / ranks if whole else 0))
    processor = (encoded * way.encode + halves * numel * way.decode) * 1e-9
    return sent_bytes(numel, ranks, way, whole=whole) / link.rate + halves * (ranks - 1) * link.delay + processor
