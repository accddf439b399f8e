"""Collectives whose values are sent as codes (``comm.codecs.codec``), over any transport.

A gather sends every rank the codes of each slice, and every rank stores the decoded values, even the slice's owner:
otherwise ranks would compute with different values of one parameter. A reduction sends each owner the codes of its
slice from every rank, decodes them and sums in rank order in fp32. For an all-reduce the owner's sum is encoded and
sent in turn, and its owner too uses the decoded sum. So results are bit for bit equal on all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed.comm.base.codec import CHUNK, Codec, coded_nbytes, decode, decode_add, encode
from deepspeed.comm.base.zero_rows import ZeroRows
from deepspeed.comm.transports.transport import LocalTransport, Reduction, Transport, Visit, Work, poll


def coded(plain: Transport, codec: Codec | None) -> Transport:
    """Returns ``plain`` with values as codes; ``plain`` itself without a codec, or where nothing is sent."""
    return plain if codec is None or isinstance(plain, LocalTransport) else CodedTransport(plain, codec)


class CodedTransport(Transport):
    """Gathers and reduces through ``plain``, which carries the codec's bytes; other operations must use ``plain``."""

    name = "coded"
    is_exact = False

    def __init__(self, plain: Transport, codec: Codec) -> None:
        super().__init__(None, plain.rank, plain.size)  # not watched: a watched transport would be closed with the job
        self.needs_one_order = plain.needs_one_order
        self.plain = plain
        self.codec = codec

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Gathers the codes of every rank's slice and fills ``flat`` (1-D) with their decoded values.

        This rank's own slice must be in place; it is overwritten with its decoded values too.
        """
        return self.gather_from(self.my_slice(flat), flat, key=key, label=label)

    def gather_from(self, mine: torch.Tensor, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """Gathers as :meth:`all_gather` does where this rank's slice, ``mine`` (1-D, unchanged), is not in ``flat``."""
        codes = self._codes(flat.numel() // self.size, flat.device)
        encode(self.codec, mine, None, codes[self.rank])
        work = self.plain.all_gather(codes.view(-1), key=key, label=label)
        return _CodedGather(self, work, codes, flat)

    def as_gathered(self, values: torch.Tensor) -> torch.Tensor:
        """Returns these values as a gather would deliver them: encoded and decoded, 1-D, same dtype."""
        codes = torch.empty(coded_nbytes(self.codec, values.numel()), dtype=torch.uint8, device=values.device)
        encode(self.codec, values, None, codes)
        out = torch.empty_like(values)
        decode(self.codec, codes, out)
        return out

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Sums what the codes of every rank's ``flat`` decode to; leaves the scaled slice of this rank in ``out``.

        Shapes are as of the base class; ``flat`` is unchanged. ``how.error`` (the residuals of earlier reductions) is
        added before encoding and replaced by the new residuals.
        """
        return _CodedReduce(self, flat, out, how)

    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """Sums as :meth:`reduce_scatter` does; leaves the whole scaled sum, decoded, in ``out``, 1-D fp32."""
        return _CodedAllReduce(self, flat, out, how)

    def _codes(self, numel: int, device: torch.device, rows: ZeroRows | None = None) -> torch.Tensor:
        """Returns zeros for the codes of one slice per rank, as rows; no code is written between two chunks."""
        nbytes = coded_nbytes(self.codec, numel) + (0 if rows is None else rows.nbytes)
        return torch.zeros((self.size, nbytes), dtype=torch.uint8, device=device)


class _CodedGather:
    """A gather of codes, decoded in ``wait``."""

    def __init__(self, transport: CodedTransport, work: Work, codes: torch.Tensor, flat: torch.Tensor) -> None:
        self._transport = transport
        self._work = work
        self._codes: torch.Tensor | None = codes
        self._flat = flat

    def will_arrive(self) -> bool:
        return self._codes is None or self._work.will_arrive()

    def wait(self) -> None:
        if self._codes is None:
            return
        codes, self._codes = self._codes, None
        self._work.wait()
        decode(self._transport.codec, codes, self._flat.view(self._transport.size, -1))


class _CodedReduce:
    """An exchange of the slices' codes, and the sum of what they stand for in rank order."""

    def __init__(self, transport: CodedTransport, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> None:
        self._transport = transport
        self._out = out
        self._how = how
        sent = transport._codes(out.numel(), flat.device, how.rows)
        error = None if how.error is None else how.error.sent.view(transport.size, -1)
        codec = transport.codec.fitted(flat, None if how.error is None else how.error.sent)
        _encode(codec, flat.view(transport.size, -1), error, sent, how.rows, 0)
        self._received: torch.Tensor | None = torch.empty_like(sent)
        self._work = transport.plain.swap(sent.view(-1), self._received.view(-1), key=how.key, label=how.label)

    def will_arrive(self) -> bool:
        return self._received is None or self._work.will_arrive()

    def poll(self, seconds: float) -> bool | None:
        return True if self._received is None else poll(self._work, seconds)

    def wait(self) -> None:
        if self._received is None:
            return
        received, self._received = self._received, None
        self._work.wait()
        out, rows = self._out.zero_(), self._how.rows
        mask = None if rows is None else rows.masks_of(self._transport.rank, _flags(rows, received))
        decode_add(self._transport.codec, received, out, mask=mask)
        if self._how.scale != 1.0:
            out.mul_(self._how.scale)
        _visit(out, self._how.visit)


class _CodedAllReduce:
    """A reduction to the owners, and a gather of their sums."""

    def __init__(self, transport: CodedTransport, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> None:
        self._transport = transport
        self._how = how
        self._out: torch.Tensor | None = out
        # `visit` gets the whole result at the end, so it is not passed for this rank's slice.
        self._first = _CodedReduce(transport, flat, transport.my_slice(out), replace(how, visit=None))

    def will_arrive(self) -> bool:
        return self._out is None  # its second half is issued only after a wait for the first

    def wait(self) -> None:
        if self._out is None:
            return
        out, self._out = self._out, None
        self._first.wait()
        transport, how = self._transport, self._how
        codes = transport._codes(out.numel() // transport.size, out.device, how.rows)
        rank, mine = transport.rank, transport.my_slice(out).unsqueeze(0)
        error = None if how.error is None or how.error.owned is None else how.error.owned.view(1, -1)
        codec = transport.codec.fitted(mine[0], None if error is None else error[0])
        _encode(codec, mine, error, codes[rank : rank + 1], how.rows, rank)
        transport.plain.share(codes.view(-1), key=how.key, label=how.label).wait()
        parts = out.view(transport.size, -1)
        decode(transport.codec, codes, parts)
        mask = None if how.rows is None else how.rows.mask(0, _flags(how.rows, codes))
        if mask is not None:
            parts.masked_fill_(~mask, 0.0)
        _visit(out, how.visit)


def _encode(
    codec: Codec,
    values: torch.Tensor,
    error: torch.Tensor | None,
    codes: torch.Tensor,
    rows: ZeroRows | None,
    first: int,
) -> None:
    """Writes the codes of the slices from number ``first`` on, ``[slices, elements]``, and after each its zero rows.

    ``rows`` are those of the buffer; None: no zeros are marked. ``error`` is as of ``Codec.encode_slices``.
    """
    if rows is None:
        encode(codec, values, error, codes)
        return
    mask = rows.write(first, values, error, _flags(rows, codes))
    encode(codec, values, error, codes)
    if mask is not None and error is not None:
        error.mul_(mask)  # rows of zeros decode exactly, so their error is 0


def _flags(rows: ZeroRows, codes: torch.Tensor) -> torch.Tensor:
    """Returns the bytes after the codes of each slice that mark which rows are zeros, as a view."""
    return codes[:, codes.shape[1] - rows.nbytes :]


def _visit(out: torch.Tensor, visit: Visit | None) -> None:
    if visit is not None:
        for part in out.split(CHUNK):
            visit(part)
