"""Collectives whose values travel as codes (``comm.codec``), over any transport.

A gather sends every rank the codes of each slice, and every rank, the slice's owner too, puts what they stand for in
its place: ranks that held different values of one parameter would drift apart. A reduction sends each owner the codes
of its slice from everybody and sums what they stand for in rank order in fp32; where all want the whole sum, the
owner's sum travels as codes once more, and again its owner takes what these stand for. So results are bit for bit equal
on all ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed.comm.codec import CHUNK, Codec, coded_nbytes, decode, decode_add, encode
from deepspeed.comm.transport import LocalTransport, Reduction, Transport, Visit, Work
from deepspeed.comm.zero_rows import ZeroRows


def coded(plain: Transport, codec: Codec | None) -> Transport:
    """``plain`` with values as codes; ``plain`` itself without a codec, or where nothing travels."""
    return plain if codec is None or isinstance(plain, LocalTransport) else CodedTransport(plain, codec)


class CodedTransport(Transport):
    """Gathers and reductions of ``plain``, as codes; for everything else ``plain`` is there.

    Args:
        plain: Carries the bytes.
        codec: Makes them.
    """

    name = "coded"
    is_exact = False

    def __init__(self, plain: Transport, codec: Codec) -> None:
        super().__init__(None, plain.rank, plain.size)  # it would outlive the job: nobody watches this one
        self.needs_one_order = plain.needs_one_order
        self.plain = plain
        self.codec = codec

    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """See the class this one derives from; this rank's own slice is overwritten too."""
        return self.gather_from(self.my_slice(flat), flat, key=key, label=label)

    def gather_from(self, mine: torch.Tensor, flat: torch.Tensor, *, key: int, label: str) -> Work:
        """As :meth:`all_gather`, where this rank's slice is not in its place.

        Args:
            mine: Its values; unchanged.
            flat: See :meth:`all_gather`.
            key: See :meth:`all_gather`.
            label: See :meth:`all_gather`.
        """
        codes = self._codes(flat.numel() // self.size, flat.device)
        encode(self.codec, mine, None, codes[self.rank])
        work = self.plain.all_gather(codes.view(-1), key=key, label=label)
        return _CodedGather(self, work, codes, flat)

    def as_gathered(self, values: torch.Tensor) -> torch.Tensor:
        """What a gather puts in the place of a slice with these values, 1-D and of the same dtype."""
        codes = torch.empty(coded_nbytes(self.codec, values.numel()), dtype=torch.uint8, device=values.device)
        encode(self.codec, values, None, codes)
        out = torch.empty_like(values)
        decode(self.codec, codes, out)
        return out

    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """See the class this one derives from; ``how.error`` is added and replaced."""
        return _CodedReduce(self, flat, out, how)

    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        """See the class this one derives from; ``how.error`` is added and replaced."""
        return _CodedAllReduce(self, flat, out, how)

    def _codes(self, numel: int, device: torch.device, rows: ZeroRows | None = None) -> torch.Tensor:
        """Room for the codes of one slice per rank, as rows of a 2-D tensor."""
        nbytes = coded_nbytes(self.codec, numel) + (0 if rows is None else rows.nbytes)
        return torch.empty((self.size, nbytes), dtype=torch.uint8, device=device)

    def decode_rows(self, codes: torch.Tensor, flat: torch.Tensor) -> None:
        """Overwrites all slices of ``flat`` with what the rows of ``codes`` stand for."""
        for row, part in zip(codes, flat.view(self.size, -1), strict=True):
            decode(self.codec, row, part)


class _CodedGather:
    """A gather of codes; values are in place when it has been waited for."""

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
        self._transport.decode_rows(codes, self._flat)


class _CodedReduce:
    """An exchange of the slices' codes, and the sum of what they stand for in rank order."""

    def __init__(self, transport: CodedTransport, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> None:
        self._transport = transport
        self._out = out
        self._how = how
        sent = transport._codes(out.numel(), flat.device, how.rows)
        error = None if how.error is None else how.error.sent.view(transport.size, -1)
        codec = transport.codec.fitted(flat, None if how.error is None else how.error.sent)
        for peer, part in enumerate(flat.view(transport.size, -1)):
            encode_rows(codec, part, None if error is None else error[peer], sent[peer], how.rows, peer)
        self._received: torch.Tensor | None = torch.empty_like(sent)
        self._work = transport.plain.swap(sent.view(-1), self._received.view(-1), key=how.key, label=how.label)

    def will_arrive(self) -> bool:
        return self._received is None or self._work.will_arrive()

    def wait(self) -> None:
        if self._received is None:
            return
        received, self._received = self._received, None
        self._work.wait()
        out = self._out.zero_()
        for codes in received:
            decode_add_rows(self._transport.codec, codes, out, self._how.rows, self._transport.rank)
        if self._how.scale != 1.0:
            out.mul_(self._how.scale)
        _visit(out, self._how.visit)


class _CodedAllReduce:
    """A reduction to the owners, and a gather of their sums."""

    def __init__(self, transport: CodedTransport, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> None:
        self._transport = transport
        self._how = how
        self._out: torch.Tensor | None = out
        # The whole result is visited at the end, so this rank's slice of it is not.
        self._first = _CodedReduce(transport, flat, transport.my_slice(out), replace(how, visit=None))

    def will_arrive(self) -> bool:
        return self._out is None  # its second half is issued only when the first has been waited for

    def wait(self) -> None:
        if self._out is None:
            return
        out, self._out = self._out, None
        self._first.wait()
        transport, how = self._transport, self._how
        codes = transport._codes(out.numel() // transport.size, out.device, how.rows)
        error, rank = None if how.error is None else how.error.owned, transport.rank
        encode_rows(transport.codec, transport.my_slice(out), error, codes[rank], how.rows, rank)
        transport.plain.share(codes.view(-1), key=how.key, label=how.label).wait()
        for owner, part in enumerate(out.zero_().view(transport.size, -1)):
            decode_add_rows(transport.codec, codes[owner], part, how.rows, owner)
        _visit(out, how.visit)


def encode_rows(
    codec: Codec,
    values: torch.Tensor,
    error: torch.Tensor | None,
    codes: torch.Tensor,
    rows: ZeroRows | None,
    index: int,
) -> None:
    """Writes the codes of a slice, then which of its rows are zeros.

    Args:
        codec: Of the codes.
        values: As of ``comm.codec.encode``.
        error: As of ``comm.codec.encode``.
        codes: As of ``comm.codec.encode``, and the bytes of ``rows`` after them.
        rows: Of the buffer; None: nothing is said of them.
        index: Of the slice.
    """
    if rows is None:
        encode(codec, values, error, codes)
        return
    flags = codes[codes.numel() - rows.nbytes :]
    mask = rows.write(index, values, error, flags)
    encode(codec, values, error, codes)
    if mask is not None and error is not None:
        error.mul_(mask)  # there was nothing to say, so nothing is lost


def decode_add_rows(codec: Codec, codes: torch.Tensor, out: torch.Tensor, rows: ZeroRows | None, index: int) -> None:
    """``out += (what codes and flags stand for)``; see :func:`encode_rows`."""
    mask = None if rows is None else rows.mask(index, codes[codes.numel() - rows.nbytes :])
    if mask is None:
        decode_add(codec, codes, out)
        return
    said = torch.zeros_like(out)
    decode_add(codec, codes, said)
    out.add_(torch.where(mask != 0, said, 0.0))


def _visit(out: torch.Tensor, visit: Visit | None) -> None:
    if visit is not None:
        for part in out.split(CHUNK):
            visit(part)
