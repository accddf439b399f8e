"""The one exchange of sequence parallelism: what is cut along the sequence becomes cut along the heads, and back.

Before attention a rank has all heads of its tokens, inside attention all tokens of its heads (DeepSpeed-Ulysses,
arXiv 2309.14509). A tensor of n elements on each of p ranks moves (p - 1) / p of n per rank, whatever p is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from deepspeed.comm.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.shares import Share, in_equal_parts, length_of, one_after_another
from deepspeed.parallel.sequence.wire import wire_of


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

    Every rank of ``group`` must call it, in the same order; so must they run its backward, which is the reverse, summed
    where several ranks had the same heads.

    Args:
        x: All heads of this rank's tokens; with ``back`` all tokens of this rank's heads. Any dtype and strides.
        group: Torch process group of the ranks that share a sequence; None: all ranks.
        sequence_axis: Axis of tokens.
        head_axis: Axis of heads.
        back: The direction.
        heads: By rank, the heads that it has inside attention; None: as equally many as possible. Shares may coincide
            on the way in; not on the way back.
        lengths: By rank, its tokens; None: equally many. Needed on the way back where they are not.

    Returns:
        A tensor of the same dtype and number of axes. In memory the gathered axis comes first: ``contiguous()`` where
        somebody views it otherwise.

    Raises:
        DeepSpeedConfigError: The sizes do not fit ``x``; before anything moves.
    """
    wire = wire_of(group, x.device)
    sequence_axis, head_axis = sequence_axis % x.dim(), head_axis % x.dim()
    if lengths is None:
        tokens = _even(x.size(sequence_axis), wire.size) if back else [x.size(sequence_axis)] * wire.size
    else:
        tokens = list(lengths)
    if heads is None:
        heads = in_equal_parts(x.size(head_axis) * (wire.size if back else 1), wire.size)
    along_sequence = one_after_another(tokens)
    mine = (along_sequence, heads) if back else (heads, along_sequence)
    cut_axis, gathered_axis = (sequence_axis, head_axis) if back else (head_axis, sequence_axis)
    _check(x, wire, cut_axis, gathered_axis, *mine)
    if wire.size == 1:
        return x
    moved: torch.Tensor = _Exchange.apply(x, wire, cut_axis, gathered_axis, tuple(mine[0]), tuple(mine[1]))
    return moved


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        wire: Transport,
        cut_axis: int,
        gathered_axis: int,
        cut: tuple[Share, ...],
        gathered: tuple[Share, ...],
    ) -> torch.Tensor:
        ctx.arguments = wire, gathered_axis, cut_axis, gathered, cut
        return _moved(x, *(wire, cut_axis, gathered_axis, cut, gathered))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        return _moved(gradients[0], *ctx.arguments), None, None, None, None, None


def _moved(
    x: torch.Tensor,
    wire: Transport,
    cut_axis: int,
    gathered_axis: int,
    cut: tuple[Share, ...],
    gathered: tuple[Share, ...],
) -> torch.Tensor:
    """Sends to rank r its share of ``cut_axis``; puts what rank r sends to its share of ``gathered_axis``.

    Shares of the gathered axis that coincide are added, in the order of ranks. In memory the gathered axis comes first,
    so that what arrives is in place.
    """
    x = x.movedim(gathered_axis, 0)
    after = cut_axis + (cut_axis < gathered_axis)  # the cut axis, now that the other one is in front
    shape = list(x.shape)
    shape[after] = length_of(cut[wire.rank])
    row = math.prod(shape[1:])
    received = [length_of(share) * row for share in gathered]
    sent = [x.numel() // x.size(after) * length_of(share) for share in cut]
    source = torch.cat([_at(x, after, share).reshape(-1) for share in cut])
    arrived = source.new_empty(sum(received))
    label = "the exchange of heads and tokens (sequence parallel)"
    wire.all_to_all(source, sent, arrived, received, label=label).wait()
    if sum(length_of(share) for share in gathered) == gathered[-1][1]:
        return arrived.view(-1, *shape[1:]).movedim(0, gathered_axis)
    out = source.new_zeros((gathered[-1][1], *shape[1:]))
    for share, part in zip(gathered, arrived.split(received), strict=True):
        _at(out, 0, share).add_(part.view(-1, *shape[1:]))
    return out.movedim(0, gathered_axis)


def _at(x: torch.Tensor, axis: int, share: Share) -> torch.Tensor:
    return x.narrow(axis, share[0], length_of(share))


def _even(length: int, ranks: int) -> list[int]:
    if length % ranks:
        raise DeepSpeedConfigError(
            f"sequence parallel: a sequence of {length} tokens cannot be cut into {ranks} equal parts; pad it, or say "
            "lengths"
        )
    return [length // ranks] * ranks


def _check(
    x: torch.Tensor,
    wire: Transport,
    cut_axis: int,
    gathered_axis: int,
    cut: Sequence[Share],
    gathered: Sequence[Share],
) -> None:
    found = x.size(cut_axis), x.size(gathered_axis)
    expected = cut[-1][1], length_of(gathered[wire.rank])
    if len(cut) != wire.size or len(gathered) != wire.size or found != expected or cut_axis == gathered_axis:
        raise DeepSpeedConfigError(
            f"sequence parallel: a tensor of shape {tuple(x.shape)} was to be cut along axis {cut_axis} and gathered "
            f"along axis {gathered_axis} among {wire.size} ranks; expected {expected[0]} and {expected[1]} elements "
            f"there, found {found[0]} and {found[1]}"
        )
