"""What attends once a rank has all tokens it needs: the ring, torch's SDPA, or the model's own implementation.

Each takes an :class:`AttentionCall` and returns ``[batch, tokens, heads, width]``. Another one is a function here and a
line in :func:`implementation_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention import call_attention
from deepspeed.parallel.sequence.attend import attend
from deepspeed.parallel.sequence.ring import ring_attention
from deepspeed.parallel.sequence.sharing import SequenceSharing
from deepspeed.parallel.sequence.visible import Visible


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention layer.

    Attributes:
        sharing: How the model's sequences are shared.
        module: The layer.
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``.
        value: As ``key``.
        seen: Which tokens see which.
        positions: Position ids of whole sequences, ``[batch or 1, all tokens]``; None: one document per sequence.
        padding: Of whole sequences, ``[batch, all tokens]``, True for tokens that count; None: all do.
        scale: Factor of the scores; None: one over the root of the width.
        dropout: Probability with which attention probabilities are dropped.
        more: Further keyword arguments of the layer.
    """

    sharing: SequenceSharing
    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    seen: Visible
    positions: torch.Tensor | None
    padding: torch.Tensor | None
    scale: float | None
    dropout: float
    more: dict[str, Any]


def implementation_of(sharing: SequenceSharing) -> Callable[[AttentionCall], torch.Tensor]:
    """Returns what attends: after the exchange of heads, or at once where heads are not exchanged."""
    if sharing.ring_group is not None:
        return _attend_by_ring
    return _attend_by_sdpa if sharing.core == "sdpa" else _attend_by_core


def _attend_by_ring(call: AttentionCall) -> torch.Tensor:
    """Attends by the ring. ``query``, ``key`` and ``value`` have this rank's tokens.

    Raises:
        DeepSpeedConfigError: The layer has attention sinks or dropout.
    """
    _refuse_sinks(call)
    if call.dropout:
        raise DeepSpeedConfigError(
            f"sequence_parallel.mode: {type(call.module).__name__} has attention dropout {call.dropout}, which the "
            'ring does not support; set the model\'s attention dropout to 0, or the mode to "ulysses"'
        )
    numbers = call.sharing.numbers(call.positions, call.padding)
    if numbers is not None:
        numbers = numbers.expand(call.query.size(0), -1)
    out = ring_attention(
        call.query, call.key, call.value, call.sharing.ring_group,
        documents=numbers, is_causal=call.seen.is_causal, window=call.seen.window, scale=call.scale,
    )  # fmt: skip
    return out.transpose(1, 2)


def _attend_by_sdpa(call: AttentionCall) -> torch.Tensor:
    _refuse_sinks(call)
    return attend(
        call.query,
        call.key,
        call.value,
        documents=call.sharing.documents(call.positions, call.padding, call.query.size(0)),
        is_causal=call.seen.is_causal,
        window=call.seen.window,
        scale=call.scale,
        dropout=call.dropout,
    ).transpose(1, 2)


def _attend_by_core(call: AttentionCall) -> torch.Tensor:
    out = _by_core(call)
    return out.reshape(*out.shape[:2], call.query.size(1), -1)  # some return the heads as one axis


def _by_core(call: AttentionCall) -> torch.Tensor:
    """Attends by the model's own implementation."""
    sharing, positions, padding = call.sharing, call.positions, call.padding
    tensors = call.query, call.key, call.value
    more = {"scaling": call.scale, "dropout": call.dropout, **call.more, "is_causal": call.seen.is_causal}

    def core(*args: Any, position_ids: torch.Tensor | None) -> torch.Tensor:
        return call_attention(sharing.core, call.module, *args, position_ids=position_ids, **more)[0]  # type: ignore[no-any-return]

    if (parts := sharing.parts(positions, padding)) > 1:
        assert positions is not None and padding is not None
        split = zip(
            *(tensor.chunk(parts, 2) for tensor in tensors),
            padding.chunk(parts, 1),
            positions.chunk(parts, 1),
            strict=True,
        )
        return torch.cat([core(*part, position_ids=at) for *part, at in split], dim=1)
    if padding is not None and bool(padding.all()):
        padding = None
    batch = call.query.size(0)
    packed = padding is None and batch > 1 and sharing.documents(positions, None, batch) is not None
    if not packed:
        return core(*tensors, padding, position_ids=positions)
    # The library finds documents in the position ids of one sequence only.
    assert positions is not None
    rows = zip(*(tensor.split(1) for tensor in tensors), positions.expand(batch, -1).split(1), strict=True)
    return torch.cat([core(*row, None, position_ids=at) for *row, at in rows])


def _refuse_sinks(call: AttentionCall) -> None:
    if call.more.get("s_aux") is not None:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(call.module).__name__} has attention sinks, which are not supported by this "
            'core; choose a flash attention that has them as the core, and sequence_parallel.mode "ulysses"'
        )
