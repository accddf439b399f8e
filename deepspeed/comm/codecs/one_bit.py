"""The compressed all-reduce of the 1-bit family: signs with one l2 scale per rank, then with one per slice.

As published with 1-bit Adam (arXiv 2102.02888, section 4; the same in 0/1 Adam and 1-bit LAMB). With ``C(x) = |x| /
sqrt(d) * sgn(x)``, ``d`` elements and ``sgn(0) = 1``, rank *i* of *n* has a vector ``x`` and two errors:

1. ``p = x + sent``; the signs of slice *j* go to rank *j*, with the scale of the whole of ``p``; ``sent = p - C(p)``.
2. Rank *j*: ``a = 1/n * (sum over ranks, in their order, of what arrived) + owned``; the signs and the scale of ``a``
   go to every rank; ``owned = a - C(a)``.

Unlike the publications, ``p`` and ``a`` can be clamped; the errors do not contain what that removes. The result is bit
for bit equal on all ranks. The length need not be divisible: padding of the last slices has no error and does not
affect a scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from deepspeed.comm.base.codec import CHUNK, DEVICE_ELEMENTS, Residual
from deepspeed.comm.codecs.table import chunk_norms, decode_signs, pack_signs
from deepspeed.comm.transports.transport import LocalTransport, Transport, Work

_HEAD = 8  # bytes before the signs of a slice: an fp32 scale and padding, so that signs are aligned


def padded_numel(numel: int, ranks: int) -> int:
    """Returns ``numel`` rounded up so that each rank's slice is a whole number of bytes of one-bit codes."""
    return -(-numel // (8 * ranks)) * 8 * ranks


def _row_nbytes(part: int) -> int:
    """Returns the bytes of the signs of one slice and their scale, aligned."""
    return _HEAD + -(-part // 64) * 8


def one_bit_nbytes(numel: int, ranks: int) -> int:
    """Returns the bytes that a rank sends to exchange ``numel`` elements, as the traffic counters count them."""
    return 2 * (ranks - 1) * _row_nbytes(padded_numel(numel, ranks) // ranks)


class OneBitExchange:
    """One compressed all-reduce in flight. Making it starts it; every rank of the transport must.

    Args:
        values: 1-D fp32, :func:`padded_numel` elements, of which the first ``numel`` count; overwritten by the result.
        error: ``sent`` is as long as ``values``, ``owned`` one slice of it; both are replaced.
        key: Number that is equal on all ranks for this reduction and for no other one in flight.
        label: What is transferred, for error messages.
        limit: Largest magnitude of encoded values, errors included, in both halves; with one rank, of the result.
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
            return  # nothing is sent, so nothing is encoded
        sent = self._rows()
        _clamp(values.add_(error.sent), limit)
        scale = _scale(values[:numel], numel)
        _write(sent, scale, values.view(transport.size, -1))
        for place in _ranges(1, values):
            part = values[place]
            torch.sub(part, torch.where(part >= 0, scale, -scale), out=error.sent[place])
        error.sent[numel:] = 0.0
        self._received = torch.empty_like(sent)
        self._work = transport.swap(sent.view(-1), self._received.view(-1), key=key, label=label)

    def _rows(self) -> torch.Tensor:
        """Allocates memory for the bytes of every slice."""
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
        for place in _ranges(transport.size, mine):
            for summand in _decoded(self._received, place):
                mine[place].add_(summand)
        first = transport.rank * mine.numel()
        _clamp(mine.mul_(1.0 / transport.size).add_(owned), self._limit)
        real = min(max(self._numel - first, 0), mine.numel())
        scale = _scale(mine[:real], real)
        shared = self._rows()
        _write(shared[transport.rank].unsqueeze(0), scale, mine.unsqueeze(0))
        owned.copy_(mine - torch.where(mine >= 0, scale, -scale))
        owned[real:] = 0.0
        transport.share(shared.view(-1), key=self._key, label=self._label).wait()
        result = self._values.view(transport.size, -1)
        for place in _ranges(transport.size, mine):
            result[:, place] = _decoded(shared, place).add_(0.0)  # without -0
        self._values[self._numel :] = 0.0


def _clamp(values: torch.Tensor, limit: float) -> None:
    if limit < math.inf:
        values.clamp_(-limit, limit)


def _ranges(rows: int, values: torch.Tensor) -> Iterator[slice]:
    """Yields parts of ``values`` (1-D), of which this many rows at once fit the cache of a CPU or into a batch."""
    length = CHUNK if values.device.type == "cpu" else max(DEVICE_ELEMENTS // rows // CHUNK, 1) * CHUNK
    for start in range(0, values.numel(), length):
        yield slice(start, min(start + length, values.numel()))


def _scale(values: torch.Tensor, numel: int) -> torch.Tensor:
    """Returns ``|values| / sqrt(numel)``, 0-dim fp32; 0 for nothing. Norms of parts are added in fp64."""
    if numel == 0:
        return values.new_zeros(())
    return (chunk_norms(values).double().square_().sum().sqrt_() / math.sqrt(numel)).float()


def _write(rows: torch.Tensor, scale: torch.Tensor, values: torch.Tensor) -> None:
    """Writes the scale and signs of slices ``[slices, elements]`` into one row of bytes for each."""
    rows[:, :_HEAD].view(torch.float32)[:, 0] = scale
    for place in _ranges(values.shape[0], values[0]):
        rows[:, _signs_of(place)] = pack_signs(values[:, place])


def _decoded(rows: torch.Tensor, place: slice) -> torch.Tensor:
    """Returns what the bytes of slices stand for in one part, ``[slices, elements]``."""
    scales = rows[:, :_HEAD].view(torch.float32)[:, :1]
    return decode_signs(rows[:, _signs_of(place)], scales)


def _signs_of(place: slice) -> slice:
    """Returns where the signs of a part lie in a row of bytes."""
    return slice(_HEAD + place.start // 8, _HEAD + place.stop // 8)
