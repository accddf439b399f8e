"""The compressed all-reduce of the 1-bit family: signs with one l2 scale per rank, then with one per slice.

As published with 1-bit Adam (arXiv 2102.02888, section 4; the same in 0/1 Adam and 1-bit LAMB). With ``C(x) = |x| /
sqrt(d) * sgn(x)``, ``d`` elements and ``sgn(0) = 1``, rank *i* of *n* has a vector ``x`` and two errors:

1. ``p = x + sent``; the signs of slice *j* go to rank *j*, with the scale of the whole of ``p``; ``sent = p - C(p)``.
2. Rank *j*: ``a = 1/n * (sum over ranks, in their order, of what arrived) + owned``; the signs and the scale of ``a``
   go to everybody; ``owned = a - C(a)``.

``p`` and ``a`` can be limited, which the publications do not: what is cut off is in no error. The result is bit for bit
equal on all ranks. A vector need not be divisible: the rest of the last slices is no element, has no error and counts
in no scale.
"""

from __future__ import annotations

import math

import torch

from deepspeed.comm.codec import CHUNK, Residual
from deepspeed.comm.codecs import pack_signs, unpack_signs
from deepspeed.comm.transport import LocalTransport, Transport, Work

_HEAD = 8  # bytes before the signs of a slice: its scale, fp32, and nothing, so that signs are aligned


def padded_numel(numel: int, ranks: int) -> int:
    """The room that a vector of ``numel`` elements takes: slices of whole bytes, one for each rank."""
    return -(-numel // (8 * ranks)) * 8 * ranks


def _row_nbytes(part: int) -> int:
    """Bytes of the signs of one slice and their scale, aligned."""
    return _HEAD + -(-part // 64) * 8


def one_bit_nbytes(numel: int, ranks: int) -> int:
    """Bytes that a rank sends for one exchange of ``numel`` elements, as the books of the exchange count them."""
    return 2 * (ranks - 1) * _row_nbytes(padded_numel(numel, ranks) // ranks)


class OneBitExchange:
    """One compressed all-reduce on its way. Making it starts it; every rank of the transport must.

    Args:
        transport: Carries the bytes.
        values: 1-D fp32, :func:`padded_numel` elements, of which the first ``numel`` count; overwritten by the result.
        numel: See above.
        error: ``sent`` is as long as ``values``, ``owned`` one slice of it; both are replaced.
        key: As of :class:`~deepspeed.comm.transport.Reduction`.
        label: What travels, for error messages.
        limit: The largest magnitude of what is coded, errors included, at both halves; with one rank of the result.
    """

    def __init__(
        self,
        transport: Transport,
        values: torch.Tensor,
        numel: int,
        error: Residual,
        *,
        key: int,
        label: str,
        limit: float = math.inf,
    ) -> None:
        self._transport = transport
        self._values = values
        self._numel = numel
        self._limit = limit
        self._error = error
        self._key, self._label = key, label
        self._work: Work | None = None
        if isinstance(transport, LocalTransport):
            _clamp(values, limit)
            return  # nothing travels, so nothing need be lost
        sent = self._rows()
        _clamp(values.add_(error.sent), limit)
        scale = _scale(values[:numel], numel)
        for row, part in zip(sent, values.view(transport.size, -1), strict=True):
            _write(row, scale, part)
        for start in range(0, values.numel(), CHUNK):
            piece = values[start : start + CHUNK]
            torch.sub(piece, torch.where(piece >= 0, scale, -scale), out=error.sent[start : start + CHUNK])
        error.sent[numel:] = 0.0
        self._received = torch.empty_like(sent)
        self._work = transport.swap(sent.view(-1), self._received.view(-1), key=key, label=label)

    def _rows(self) -> torch.Tensor:
        """Room for the bytes of every slice."""
        size = self._transport.size
        nbytes = _row_nbytes(self._values.numel() // size)
        return torch.zeros((size, nbytes), dtype=torch.uint8, device=self._values.device)

    @torch.no_grad()
    def finish(self) -> None:
        """Waits for the first half, and runs the second."""
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        transport, owned = self._transport, self._error.owned
        assert owned is not None
        mine = transport.my_slice(self._values).zero_()
        for row in self._received:
            _add(row, mine)
        first = transport.rank * mine.numel()
        _clamp(mine.mul_(1.0 / transport.size).add_(owned), self._limit)
        real = min(max(self._numel - first, 0), mine.numel())
        scale = _scale(mine[:real], real)
        shared = self._rows()
        _write(shared[transport.rank], scale, mine)
        owned.copy_(mine - torch.where(mine >= 0, scale, -scale))
        owned[real:] = 0.0
        transport.share(shared.view(-1), key=self._key, label=self._label).wait()
        self._values.zero_()
        for row, part in zip(shared, self._values.view(transport.size, -1), strict=True):
            _add(row, part)
        self._values[self._numel :] = 0.0


def _clamp(values: torch.Tensor, limit: float) -> None:
    if limit < math.inf:
        values.clamp_(-limit, limit)


def _scale(values: torch.Tensor, numel: int) -> torch.Tensor:
    """``|values| / sqrt(numel)``, 0-dim fp32; 0 for nothing. Norms of pieces are added in fp64."""
    if numel == 0:
        return values.new_zeros(())
    norms = [torch.linalg.vector_norm(piece) for piece in values.split(CHUNK)]
    return (torch.stack(norms).double().square_().sum().sqrt_() / math.sqrt(numel)).float()


def _write(row: torch.Tensor, scale: torch.Tensor, part: torch.Tensor) -> None:
    row[:_HEAD].view(torch.float32)[0] = scale
    signs = row[_HEAD : _HEAD + part.numel() // 8]
    for start in range(0, part.numel(), CHUNK):
        pack_signs(part[start : start + CHUNK], signs[start // 8 : (start + CHUNK) // 8])


def _add(row: torch.Tensor, out: torch.Tensor) -> None:
    """Adds what the bytes of one slice stand for."""
    scale, signs = row[:_HEAD].view(torch.float32)[0], row[_HEAD : _HEAD + out.numel() // 8]
    for start in range(0, out.numel(), CHUNK):
        piece = out[start : start + CHUNK]
        piece.add_(unpack_signs(signs[start // 8 : (start + CHUNK) // 8]).mul_(scale))
