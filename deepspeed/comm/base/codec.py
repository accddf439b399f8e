"""Codecs: encode values in fewer bits for sending, with error feedback.

A codec encodes a range of values into bytes (codes and scales together), and adds decoded values to a sum. Decoded
values depend on the bytes alone, so every rank that decodes the same bytes gets the same bits.
``comm.codecs.coded`` has the collectives that carry the bytes.

*Error feedback*: the error of encoding a gradient is added to the next one, so that it is never lost. This error is
the only training state that differs on every rank and has the full length: the **private** state of
``zero.placement``. It belongs to the caller of the reduction, who passes it as a :class:`Residual`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

CHUNK = 262144
"""Elements of a chunk of codes. A CPU encodes one at a time, so that the operands stay in its cache. Blocks of a codec
do not cross it."""

DEVICE_ELEMENTS = 1 << 25
"""Elements that a device encodes in one batch of chunks. It bounds the temporary tensors to about 0.5 GB. The kernels
of such a batch take far longer than their launches."""

_ALIGNMENT = 8  # bytes; codes may be viewed as any dtype


class Codec:
    """Encodes values in fewer bits.

    A value that is not finite must decode to one that is not finite, so that an overflow is detected, and leaves an
    error of 0.
    """

    name = "none"  # for messages and counters
    feeds_back = True  # whether reductions keep what is lost for the next one
    encodes_zero = True  # whether a 0 decodes to 0; otherwise rows of zeros are marked separately (``ZeroRows``)

    def nbytes(self, numel: int) -> int:
        """Returns the bytes of the codes of ``numel`` (at most :data:`CHUNK`) elements; callers round up to 8."""
        raise NotImplementedError

    def fitted(self, values: torch.Tensor, error: torch.Tensor | None) -> Codec:
        """Returns the codec for one tensor: this one, or one that depends on all of ``values + error``, 1-D."""
        return self

    def encode(self, chunk: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        """Writes the codes of ``chunk + error``, :meth:`nbytes` of them; all are 1-D.

        ``error`` (fp32) is replaced by what the codes lose; None: nothing is added or kept.
        """
        raise NotImplementedError

    def decode_add(self, codes: torch.Tensor, out: torch.Tensor) -> None:
        """Adds what ``codes`` (1-D bytes that :meth:`encode` wrote) stand for to ``out`` (1-D fp32 or fp64)."""
        raise NotImplementedError

    def encode_slices(self, values: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
        """Writes the codes of ``values + error``, 2-D ``[slices, elements]``: the bytes of :meth:`encode` by chunk.

        Codecs override it to launch a number of kernels on a device that does not grow with the size. ``codes`` are
        bytes ``[slices, coded_nbytes(codec, elements)]``; ``error`` is as of :meth:`encode`.
        """
        for row, part in enumerate(values):
            lost = None if error is None else error[row]
            for elements, place in _chunks(self, part.numel()):
                self.encode(part[elements], None if lost is None else lost[elements], codes[row, place])

    def decode_slices(self, codes: torch.Tensor, numel: int) -> torch.Tensor:
        """Returns what ``codes`` of :meth:`encode_slices` stand for, 2-D fp32 ``[slices, numel]``."""
        out = torch.zeros((codes.shape[0], numel), dtype=torch.float32, device=codes.device)
        for row, values in zip(codes, out, strict=True):
            for elements, place in _chunks(self, numel):
                self.decode_add(row[place], values[elements])
        return out


@dataclass(frozen=True)
class Residual:
    """Holds the error-feedback residual of one buffer: what its coded reductions have lost on this rank so far."""

    sent: torch.Tensor  # 1-D fp32, as long as the buffer: of what this rank sent to the owners of the slices
    # 1-D fp32, one slice: of the sum that this rank sent to all, where every rank gets the whole sum
    owned: torch.Tensor | None


def coded_nbytes(codec: Codec, numel: int) -> int:
    """Returns the bytes of the codes of ``numel`` elements, any number of them."""
    full, rest = divmod(numel, CHUNK)
    return full * aligned_nbytes(codec, CHUNK) + (aligned_nbytes(codec, rest) if rest else 0)


def aligned_nbytes(codec: Codec, numel: int) -> int:
    """Returns the bytes that the codes of one chunk of ``numel`` elements take in a buffer."""
    return -(-codec.nbytes(numel) // _ALIGNMENT) * _ALIGNMENT


def _chunks(codec: Codec, numel: int) -> Iterator[tuple[slice, slice]]:
    """Yields ``(elements, their codes)`` of each chunk."""
    place = 0
    for start in range(0, numel, CHUNK):
        stop = min(start + CHUNK, numel)
        nbytes = codec.nbytes(stop - start)
        yield slice(start, stop), slice(place, place + nbytes)
        place += aligned_nbytes(codec, stop - start)


def _batches(codec: Codec, slices: int, numel: int) -> Iterator[tuple[slice, slice]]:
    """Yields ``(elements, their codes)`` of each batch of chunks of all slices, for devices."""
    length = max(DEVICE_ELEMENTS // max(slices, 1) // CHUNK, 1) * CHUNK
    for start in range(0, numel, length):
        stop = min(start + length, numel)
        place = coded_nbytes(codec, start)
        yield slice(start, stop), slice(place, place + coded_nbytes(codec, stop - start))


def encode(codec: Codec, values: torch.Tensor, error: torch.Tensor | None, codes: torch.Tensor) -> None:
    """Writes the codes of ``values + error``.

    Args:
        values: 1-D, floating, of any length; or 2-D, one row for each slice. Unchanged.
        error: fp32 in the shape of ``values``, replaced by what the codes lose; None: nothing is added or kept.
        codes: 1-D bytes, :func:`coded_nbytes` of them; or 2-D, as many in each row. A row may have more.
    """
    if values.dim() == 1:
        codec = codec.fitted(values, error)
        values, codes = values.unsqueeze(0), codes.unsqueeze(0)
        error = None if error is None else error.unsqueeze(0)
    if values.device.type != "cpu":
        for elements, place in _batches(codec, *values.shape):
            codec.encode_slices(values[:, elements], None if error is None else error[:, elements], codes[:, place])
        return
    Codec.encode_slices(codec, values, error, codes)


def decode_add(codec: Codec, codes: torch.Tensor, out: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    """Adds what the codes stand for to ``out`` (1-D fp32 or fp64).

    Args:
        codes: 1-D bytes, :func:`coded_nbytes` of them. Or 2-D, the codes of several summands as rows, which are added
            in their order. There may be more bytes.
        mask: 2-D bool, in each row of ``codes`` the elements that are not 0; None: all of them.
    """
    rows = codes.unsqueeze(0) if codes.dim() == 1 else codes
    if out.device.type != "cpu":
        for elements, place in _batches(codec, rows.shape[0], out.numel()):
            decoded = codec.decode_slices(rows[:, place], elements.stop - elements.start)
            if mask is not None:
                decoded.masked_fill_(~mask[:, elements], 0.0)
            for summand in decoded:
                out[elements].add_(summand)
        return
    for number, row in enumerate(rows):
        for elements, place in _chunks(codec, out.numel()):
            if mask is None:
                codec.decode_add(row[place], out[elements])
                continue
            decoded = torch.zeros(elements.stop - elements.start, dtype=torch.float32)
            codec.decode_add(row[place], decoded)
            out[elements].add_(decoded.masked_fill_(~mask[number, elements], 0.0))


def decode(codec: Codec, codes: torch.Tensor, out: torch.Tensor) -> None:
    """Overwrites ``out`` (floating) with what ``codes`` stand for; both 1-D, or 2-D with a row for each slice."""
    if out.dim() == 1:
        codes, out = codes.unsqueeze(0), out.unsqueeze(0)
    is_sum = out.dtype in (torch.float32, torch.float64)
    if out.device.type != "cpu":
        for elements, place in _batches(codec, *out.shape):
            # Added to 0, so that there is no -0, as on the host.
            out[:, elements].copy_(codec.decode_slices(codes[:, place], elements.stop - elements.start).add_(0.0))
        return
    for row, values in zip(codes, out, strict=True):
        for elements, place in _chunks(codec, values.numel()):
            part = values[elements]
            total = part.zero_() if is_sum else torch.zeros(part.numel(), dtype=torch.float32)
            codec.decode_add(row[place], total)
            if total is not part:
                part.copy_(total)


def bits_of(codec: Codec) -> float:
    """Returns the bits that an element of a long buffer takes, scales included."""
    return 8 * coded_nbytes(codec, CHUNK) / CHUNK
