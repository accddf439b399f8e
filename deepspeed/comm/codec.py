"""Codecs: how values travel in fewer bits than they have, and what is done with what that loses.

A codec turns a stretch of values into bytes (codes and scales together) and adds what bytes stand for to a sum. Which
values come out depends on the bytes alone, so every rank that decodes the same bytes gets the same bits. ``comm.coded``
has the collectives that carry the bytes.

*Error feedback*: what a codec has lost of a gradient is added to the next one, so that nothing is lost for good. That
error is the one state of training that differs on every rank and is as long as the whole: the **private** column of the
placement table (``zero.placement``). It belongs to whoever reduces, which hands it to each reduction as a
:class:`Residual`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

CHUNK = 262144
"""Elements that are encoded at once, so that the operands stay in the cache; blocks of a codec do not cross it."""

_ALIGNMENT = 8  # bytes; codes may be looked at as any dtype


class Codec:
    """One way to write values in fewer bits.

    A value that is not finite must come out as one that is not finite (not as a number: an overflow is to be seen), and
    leaves an error of 0.

    Attributes:
        name: For messages and books.
        feeds_back: Whether reductions keep what is lost for the next one.
        says_zero: Whether codes of a 0 stand for 0; otherwise rows of zeros are marked beside them
            (``comm.zero_rows``).
    """

    name = "none"
    feeds_back = True
    says_zero = True

    def nbytes(self, numel: int) -> int:
        """Bytes of the codes of ``numel`` elements, at most :data:`CHUNK`; rounded up to a multiple of 8 by callers."""
        raise NotImplementedError

    def fitted(self, values: torch.Tensor, error: torch.Tensor | None) -> Codec:
        """The codec for values that belong together: this one, or one that knows something of all of them.

        Args:
            values: 1-D, floating; unchanged.
            error: 1-D fp32, what is added to them; None: nothing.
        """
        return self

    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        """Writes the codes of ``chunk + error``.

        Args:
            chunk: 1-D, floating; unchanged.
            error: 1-D fp32 of the same length, replaced by what the codes do not say; None: nothing is added or kept.
            codes: 1-D bytes, :meth:`nbytes` of them.
        """
        raise NotImplementedError

    def decode_add(self, codes: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        """``out += factor * (what codes stand for)``.

        Args:
            codes: As of :meth:`encode`.
            out: 1-D fp32 or fp64.
            factor: See above.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Residual:
    """What reductions of one buffer have lost on this rank so far.

    Attributes:
        sent: 1-D fp32, as long as the buffer: of what this rank sent to the owners of the slices.
        owned: 1-D fp32, one slice: of the sum that this rank sent to all, where everybody gets the whole sum.
    """

    sent: torch.Tensor
    owned: torch.Tensor | None


def coded_nbytes(codec: Codec, numel: int) -> int:
    """Bytes of the codes of ``numel`` elements, any number of them."""
    full, rest = divmod(numel, CHUNK)
    return full * _aligned(codec, CHUNK) + (_aligned(codec, rest) if rest else 0)


def _aligned(codec: Codec, numel: int) -> int:
    return -(-codec.nbytes(numel) // _ALIGNMENT) * _ALIGNMENT


def _chunks(codec: Codec, numel: int) -> Iterator[tuple[slice, slice]]:
    """``(elements, their codes)`` of each chunk."""
    place = 0
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        nbytes = codec.nbytes(stop - start)
        yield slice(start, stop), slice(place, place + nbytes)
        place += _aligned(codec, stop - start)


def encode(codec: Codec, values: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
    """Writes the codes of ``values + error``.

    Args:
        codec: Of the codes.
        values: 1-D, floating, of any length; unchanged.
        error: As of :meth:`Codec.encode`.
        codes: 1-D bytes, :func:`coded_nbytes` of them.
    """
    codec = codec.fitted(values, error)
    for elements, place in _chunks(codec, values.numel()):
        codec.encode(values[elements], None if error is None else error[elements], codes[place])


def decode_add(codec: Codec, codes: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
    """``out += factor * (what codes stand for)``; ``out`` is 1-D fp32 or fp64."""
    for elements, place in _chunks(codec, out.numel()):
        codec.decode_add(codes[place], out[elements], factor)


def decode(codec: Codec, codes: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrites ``out`` (1-D, floating) with what ``codes`` stand for."""
    is_sum = out.dtype in (torch.float32, torch.float64)
    for elements, place in _chunks(codec, out.numel()):
        part = out[elements]
        total = part.zero_() if is_sum else torch.zeros(part.numel(), dtype=torch.float32, device=out.device)
        codec.decode_add(codes[place], total, 1.0)
        if total is not part:
            part.copy_(total)
