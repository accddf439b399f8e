"""Gathers weights in float8: one byte per element, and the values that a cast of the gathered weight gives again.

A weight has one scale, of its greatest value over all ranks, so every rank casts its own fragments alike. What arrives
is decoded into the compute dtype, bf16 or fp16. Its rounding is much finer than that of float8, and the greatest value
arrives as it was: a product in float8 that casts the decoded weight finds the same scale and the same bytes as from the
exact weight. Other parameters of a bucket are sent as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from typing_extensions import override

from deepspeed.comm.codecs.coded import CodedTransport
from deepspeed.comm.transports.transport import Transport, Work
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.zero.tiling.layout import BucketLayout, Fragment

_LEAST = 1e-12
"""Least greatest value of a weight, so that one of zeros has a scale; that of torchao."""
_ALIGNMENT = 16  # bytes


class Float8Transport(CodedTransport):
    """Gathers one bucket; weights among its tiles in float8.

    Args:
        plain: Carries the bytes.
        tiles: Positions of these weights in ``layout``.
        target: The dtype of float8.
        shard: Returns this rank's slice of the bucket, 1-D, on the device.
    """

    name = "float8"

    def __init__(
        self,
        plain: Transport,
        layout: BucketLayout,
        tiles: Collection[int],
        target: torch.dtype,
        shard: Callable[[], torch.Tensor],
    ) -> None:
        Transport.__init__(self, None, plain.rank, plain.size)
        self.needs_one_order, self.plain = plain.needs_one_order, plain
        self._positions = {tile: position for position, tile in enumerate(sorted(tiles))}
        self._names = [layout.tiles[tile].name for tile in self._positions]
        self._target, self._shard = target, shard
        self._itemsize = shard().itemsize
        self._rows = [self._places(layout.fragments(rank)) for rank in range(plain.size)]
        longest = max(end for _, end in self._rows)
        self._row_bytes = -(-longest // _ALIGNMENT) * _ALIGNMENT
        self._scales: torch.Tensor | None = None  # fp32, one per weight
        self._own: torch.Tensor | None = None  # this rank's greatest values when the scales were made
        self._version = -1  # of the shard then
        self.is_stale = True  # all ranks have written to the shard since

    def _places(self, fragments: Iterable[Fragment]) -> tuple[list[tuple[Fragment, int, int]], int]:
        """Returns fragments with their first and last-plus-one byte in a message, exact ones first, and its length."""
        found, end = [], 0
        for fragment in sorted(fragments, key=lambda one: one.tile in self._positions):
            size = fragment.numel * (1 if fragment.tile in self._positions else self._itemsize)
            found.append((fragment, end, end + size))
            end += size
        return found, end

    # -- scales ------------------------------------------------------------------------------------------------------

    def greatest(self) -> torch.Tensor:
        """Returns the greatest magnitude in this rank's part of each weight, fp32 ``[weights]``; 0 without a part."""
        shard = self._shard()
        found = torch.zeros(len(self._positions), dtype=torch.float32, device=shard.device)
        for fragment, _, _ in self._rows[self.rank][0]:
            position = self._positions.get(fragment.tile)
            if position is not None:
                found[position] = shard[fragment.in_slice].abs().amax()
        return found

    def set_scales(self, own: torch.Tensor, greatest: torch.Tensor) -> None:
        """Takes this rank's and all ranks' greatest magnitudes, fp32 ``[weights]``."""
        limit = torch.finfo(self._target).max
        self._scales = (limit / greatest.double().clamp(min=_LEAST)).float()
        self._own, self._version, self.is_stale = own, self._shard()._version, False

    def _settle_scales(self) -> None:
        """Makes scales if all ranks have written to the weights since. All ranks must call it.

        Raises:
            DeepSpeedConfigError: Only this rank has.
        """
        if self._scales is None or self.is_stale:
            exchange_scales([self])
            return
        if self._version == self._shard()._version:
            return
        assert self._own is not None
        changed = torch.ne(self.greatest(), self._own)
        if bool(changed.any()):
            names = [name for name, is_changed in zip(self._names, changed.tolist(), strict=True) if is_changed]
            raise DeepSpeedConfigError(
                f'float8.gather="float8": {", ".join(names[:4])} changed outside of an update, on this rank alone as '
                "far as it knows, so ranks would cast with different scales. Write inside GatheredParameters(..., "
                'modifier_rank=0), or set gather to "none"'
            )
        self._version = self._shard()._version

    # -- gathers -----------------------------------------------------------------------------------------------------

    @override
    def gather_from(self, mine: torch.Tensor, flat: torch.Tensor, *, key: int, label: str) -> Work:
        self._settle_scales()
        sent = torch.zeros((self.size, self._row_bytes), dtype=torch.uint8, device=flat.device)
        self._encode(mine, sent[self.rank])
        return _Float8Gather(self, self.plain.all_gather(sent.view(-1), key=key, label=label), sent, flat)

    @override
    def as_gathered(self, values: torch.Tensor) -> torch.Tensor:
        self._settle_scales()
        sent = torch.zeros(self._row_bytes, dtype=torch.uint8, device=values.device)
        self._encode(values, sent)
        out = values.clone()
        self._decode_row(self.rank, sent, out)
        return out

    def _encode(self, values: torch.Tensor, row: torch.Tensor) -> None:
        assert self._scales is not None
        limit = torch.finfo(self._target).max
        for fragment, start, end in self._rows[self.rank][0]:
            position = self._positions.get(fragment.tile)
            part = values[fragment.in_slice]
            if position is None:
                row[start:end].view(values.dtype).copy_(part)
            else:
                scaled = (part.float() * self._scales[position]).clamp_(-limit, limit)
                row[start:end].view(self._target).copy_(scaled)

    def decode(self, received: torch.Tensor, flat: torch.Tensor) -> None:
        """Fills the buffer ``flat`` from the messages of all ranks, uint8 ``[ranks, bytes]``."""
        for rank, out in enumerate(flat.view(self.size, -1)):
            self._decode_row(rank, received[rank], out)

    def _decode_row(self, rank: int, row: torch.Tensor, out: torch.Tensor) -> None:
        assert self._scales is not None
        for fragment, start, end in self._rows[rank][0]:
            position = self._positions.get(fragment.tile)
            if position is None:
                out[fragment.in_slice].copy_(row[start:end].view(out.dtype))
            else:
                out[fragment.in_slice].copy_(row[start:end].view(self._target).float().div_(self._scales[position]))


class _Float8Gather:
    """A gather of messages, decoded in ``wait``."""

    def __init__(self, transport: Float8Transport, work: Work, received: torch.Tensor, flat: torch.Tensor) -> None:
        self._transport, self._work, self._flat = transport, work, flat
        self._received: torch.Tensor | None = received

    def will_arrive(self) -> bool:
        return self._received is None or self._work.will_arrive()

    def wait(self) -> None:
        if self._received is None:
            return
        received, self._received = self._received, None
        self._work.wait()
        self._transport.decode(received, self._flat)


def exchange_scales(transports: Collection[Float8Transport]) -> None:
    """Makes the scales of buckets anew, by one exchange for all that have the same ranks. All of them must call it."""
    by_ranks: dict[int, list[Float8Transport]] = {}
    for transport in transports:
        by_ranks.setdefault(id(transport.plain), []).append(transport)
    for members in by_ranks.values():
        plain = members[0].plain
        own = [member.greatest() for member in members]
        rows = torch.cat(own).repeat(plain.size, 1)
        plain.all_gather(rows.view(-1), key=plain.next_move(), label="the greatest values of float8 weights").wait()
        parts = rows.amax(0).split([len(part) for part in own])
        for member, mine, greatest in zip(members, own, parts, strict=True):
            member.set_scales(mine, greatest)
