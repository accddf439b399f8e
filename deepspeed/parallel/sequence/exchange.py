"""The exchange of sequence parallelism: from a cut along the sequence to a cut along the heads, and back.

Before attention a rank has all heads of its tokens, inside attention all tokens of its heads (DeepSpeed-Ulysses,
arXiv 2309.14509). A tensor of n elements on each of p ranks moves n (p - 1) / p elements per rank.

:func:`shares_of_heads` and the functions beside it compute which rank gets which heads and which tokens; they need no
communication.

A *share* is a range of one axis of a tensor. The shares of tokens are disjoint and cover the sequence. Those of heads
are disjoint too, unless there are fewer key and value heads than ranks: then neighbors have the same head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job import backward_comm
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.differentiable import all_to_all
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.uncompiled import uncompiled

_LABEL = "the exchange of heads and tokens (sequence parallel)"


@uncompiled
def exchange(
    x: torch.Tensor,
    group: Any,
    sequence_axis: int,
    head_axis: int,
    *,
    back: bool = False,
    heads: Sequence[Share] | None = None,
    lengths: Sequence[int] | None = None,
) -> torch.Tensor:
    """Gathers the sequence and cuts the heads; ``back`` cuts the sequence and gathers the heads.

    Every rank of ``group`` must call it and run its backward, in the same order. Backward is the reverse exchange, with
    a sum where several ranks have the same heads.

    Args:
        x: All heads of this rank's tokens; with ``back`` all tokens of this rank's heads. Any dtype, shape and strides.
        group: Torch process group of the ranks that share a sequence; None: all ranks.
        heads: By rank, its heads inside attention; None: as equal as possible. Shares may coincide, unless ``back``.
        lengths: By rank, its tokens; None: equally many. Required with ``back`` if they differ.

    Returns:
        A tensor of the same dtype and number of axes. Gathered tokens come first in memory (``contiguous()`` where
        the caller needs another layout); gathered heads come after tokens, other axes keep their order.

    Raises:
        DeepSpeedConfigError: The sizes do not fit ``x``; raised before any transfer.
    """
    transport = transport_of(group, x.device)
    sequence_axis, head_axis = sequence_axis % x.dim(), head_axis % x.dim()
    if lengths is None:
        tokens = _even(x.size(sequence_axis), transport.size) if back else [x.size(sequence_axis)] * transport.size
    else:
        tokens = list(lengths)
    if heads is None:
        heads = in_equal_parts(x.size(head_axis) * (transport.size if back else 1), transport.size)
    move = _Move(transport, sequence_axis, head_axis, back, one_after_another(tokens), tuple(heads))
    _check(x, move)
    if transport.size == 1:
        return x
    if x.requires_grad:
        backward_comm.note_anywhere()
    moved: torch.Tensor = all_to_all(move, x)
    return moved


@dataclass(frozen=True)
class _Move:
    """An exchange of one tensor: by rank, the tokens on one side and the heads on the other.

    Each element is copied once when it is sent and once when it is received; those that stay are copied once. Tokens
    come first in what is sent; if they are also first in memory, the tokens for one rank are a contiguous range.
    """

    transport: Transport
    sequence_axis: int
    head_axis: int
    back: bool
    tokens: tuple[Share, ...]
    heads: tuple[Share, ...]

    def run(self, *values: torch.Tensor) -> torch.Tensor:
        return _heads_together(values[0], self) if self.back else _heads_apart(values[0], self)

    def reverse(self) -> _Move:
        return replace(self, back=not self.back)


def _heads_apart(x: torch.Tensor, move: _Move) -> torch.Tensor:
    """Sends to rank r its heads; gathers the tokens, which come first in memory."""
    transport, x = move.transport, x.movedim(move.sequence_axis, 0)
    after = move.head_axis + (move.head_axis < move.sequence_axis)  # the axis of heads after tokens were moved first
    shape = _with(x, after, length_of(move.heads[transport.rank]))
    shape[0] = move.tokens[-1][1]
    shape.insert(move.sequence_axis, shape.pop(0))
    axes = list(range(len(shape)))
    axes.insert(0, axes.pop(move.sequence_axis))
    out = _laid_out(x, shape, axes)
    arrived = out.movedim(move.sequence_axis, 0)
    leaving = [[_at(x, after, share)] for share in move.heads]
    arriving = [[_at(arrived, 0, share)] for share in move.tokens]
    transport.exchange(leaving, arriving, x, label=_LABEL).wait()
    return out


def _heads_together(x: torch.Tensor, move: _Move) -> torch.Tensor:
    """Sends to rank r its tokens; gathers the heads, adding those that several ranks have in the order of the ranks."""
    transport, axes = move.transport, list(range(x.dim()))
    if move.head_axis < move.sequence_axis:  # in memory heads come after tokens, as layers expect
        axes.insert(move.sequence_axis, axes.pop(move.head_axis))
    shape = _with(x, move.head_axis, move.heads[-1][1])
    shape[move.sequence_axis] = length_of(move.tokens[transport.rank])
    out = _laid_out(x, shape, axes)
    x = x.movedim(move.sequence_axis, 0)
    leaving = [[_at(x, 0, share)] for share in move.tokens]
    targets = [_at(out, move.head_axis, share).movedim(move.sequence_axis, 0) for share in move.heads]
    if sum(map(length_of, move.heads)) == move.heads[-1][1]:
        transport.exchange(leaving, [[target] for target in targets], x, label=_LABEL).wait()
        return out
    parts = [x.new_empty(target.shape) for target in targets]
    transport.exchange(leaving, [[part] for part in parts], x, label=_LABEL).wait()
    out.zero_()
    for target, part in zip(targets, parts, strict=True):
        target.add_(part)
    return out


def _laid_out(x: torch.Tensor, shape: list[int], axes: list[int]) -> torch.Tensor:
    """Returns a copy whose axes lie in memory in this order."""
    strides, stride = [0] * len(shape), 1
    for axis in reversed(axes):
        strides[axis] = stride
        stride *= max(shape[axis], 1)
    return torch.empty_strided(shape, strides, dtype=x.dtype, device=x.device)


def _with(x: torch.Tensor, axis: int, length: int) -> list[int]:
    """Returns the shape of ``x`` with ``axis`` of another length."""
    shape = list(x.shape)
    shape[axis] = length
    return shape


def _at(x: torch.Tensor, axis: int, share: Share) -> torch.Tensor:
    return x.narrow(axis, share[0], length_of(share))


def _even(length: int, ranks: int) -> list[int]:
    if length % ranks:
        raise DeepSpeedConfigError(
            f"sequence parallel: a sequence of {length} tokens cannot be cut into {ranks} equal parts; pad it, or pass "
            "lengths"
        )
    return [length // ranks] * ranks


def _check(x: torch.Tensor, move: _Move) -> None:
    rank, ranks = move.transport.rank, move.transport.size
    known = len(move.tokens) == ranks == len(move.heads) and move.sequence_axis != move.head_axis
    whole, own = (move.tokens, move.heads) if move.back else (move.heads, move.tokens)
    axes = move.sequence_axis, move.head_axis
    cut, gathered = axes if move.back else axes[::-1]
    expected = whole[-1][1], length_of(own[rank]) if rank < len(own) else 0
    found = x.size(cut), x.size(gathered)
    if not known or found != expected:
        raise DeepSpeedConfigError(
            f"sequence parallel: a tensor of shape {tuple(x.shape)} was to be cut along axis {cut} and gathered "
            f"along axis {gathered} among {ranks} ranks; expected {expected[0]} and {expected[1]} elements "
            f"there, found {found[0]} and {found[1]}. Pass each rank its own part of the sequence, with all heads"
        )


_uses: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()


@uncompiled
def transport_of(group: Any, device: torch.device) -> Transport:
    """Returns the transport of a torch process group (None: all ranks) for exchanges of tokens on ``device``."""
    transport = axis_of(group, SEQUENCE).transport("layers", device=device)
    _uses[transport] = _uses.get(transport, 0) + 1
    return transport


def uses_of_transports() -> int:
    """Returns how often tokens were exchanged in this process so far, over all groups that are alive."""
    return sum(_uses.values())


Share = tuple[int, int]
"""Start and end along an axis."""


def in_equal_parts(length: int, ranks: int) -> tuple[Share, ...]:
    """Returns parts as equal as possible, the first ones longer by one where ``ranks`` does not divide ``length``."""
    size, longer = divmod(length, ranks)
    return one_after_another([size + (rank < longer) for rank in range(ranks)])


def one_after_another(lengths: Sequence[int]) -> tuple[Share, ...]:
    """Returns consecutive parts of these lengths."""
    ends = list(accumulate(lengths))
    return tuple((end - length, end) for end, length in zip(ends, lengths, strict=True))


def length_of(share: Share) -> int:
    """Returns the number of elements of a share."""
    return share[1] - share[0]


@dataclass(frozen=True)
class HeadAssignment:
    """The heads that each rank attends with."""

    query: tuple[Share, ...]  # by rank, its query heads
    key: tuple[Share, ...]  # by rank, the key and value heads that these use


def shares_of_heads(heads: int, key_heads: int, ranks: int) -> HeadAssignment:
    """Divides attention heads over ranks, so that every query head is on the rank of its key and value head.

    With at least as many key heads as ranks these are divided and query heads follow (7 key heads over 4 ranks: 2, 2,
    2, 1). With fewer, the ranks are divided over the key heads, and ranks with the same key head divide its query
    heads. On every rank all key heads have equally many query heads, whose number is a multiple of theirs.

    Raises:
        DeepSpeedConfigError: Some rank would have no head.
    """
    if key_heads < 1 or heads % key_heads:
        raise DeepSpeedConfigError(
            f"sequence parallel: expected a number of attention heads that is a multiple of the number of key heads, "
            f"found {heads} and {key_heads}"
        )
    group = heads // key_heads
    if key_heads >= ranks:
        key = in_equal_parts(key_heads, ranks)
        return HeadAssignment(tuple((start * group, end * group) for start, end in key), key)
    if group < -(-ranks // key_heads):
        raise DeepSpeedConfigError(
            f"sequence parallel: {heads} heads with {key_heads} key head(s) cannot be divided over {ranks} "
            f"ranks, as some rank would have none; use at most {key_heads * group} ranks that divide them, or "
            'sequence_parallel.mode "ring", which has no such limit'
        )
    query: list[Share] = []
    keys: list[Share] = []
    for head, (first, last) in enumerate(in_equal_parts(ranks, key_heads)):
        parts = in_equal_parts(group, last - first)
        query += [(head * group + start, head * group + end) for start, end in parts]
        keys += [(head, head + 1)] * len(parts)
    return HeadAssignment(tuple(query), tuple(keys))
