"""The attention and the mask function of registered Transformers models.

The attention function gets queries, keys and values of this rank's tokens and attends to whole sequences by the
exchange. The mask function goes with it: it recognises masks instead of building them.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.comm.job.world import rank_in, size_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention import call_attention
from deepspeed.models.masks import mask_of_implementation
from deepspeed.parallel.sequence.exchange import exchange
from deepspeed.parallel.sequence.implementations import AttentionCall, implementation_of
from deepspeed.parallel.sequence.kept_once import KeptOnce
from deepspeed.parallel.sequence.shares import shares_of_heads
from deepspeed.parallel.sequence.sharing import SequenceSharing, registered, registered_by
from deepspeed.parallel.sequence.visible import Visible, checked_padding, given_mask, visible_by
from deepspeed.uncompiled import uncompiled

_UNSUPPORTED = ("softcap", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of attention functions that sequence parallelism does not support."""


@uncompiled
def mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = None, config: Any = None, **kwargs: Any
) -> Any:
    """Returns what the layers get as their mask: a :class:`Visible`, or None (causal, without padding).

    ``attention_mask`` is None or a padding mask of shape ``[batch, tokens of this rank]``.
    """
    sharing = registered_by(config)
    if not sharing.is_on:
        kwargs.update(attention_mask=attention_mask, mask_function=mask_function, config=config)
        return mask_of_implementation(sharing.core, **kwargs)
    seen = visible_by(mask_function)
    if attention_mask is not None:
        seen = replace(seen, padding=checked_padding(attention_mask, kwargs["q_length"]))
    elif _has_documents(sharing):
        seen = replace(seen, positions=sharing.given_positions)
    return None if seen == Visible() else seen


def _has_documents(sharing: SequenceSharing) -> bool:
    """Whether documents are packed into the sequences of this pass; the same on all ranks."""
    given = sharing.given_positions
    if given is None or given.dim() != 2:
        return False
    return sharing.documents(sharing.whole(given), None, given.size(0)) is not None


@uncompiled
def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention over whole sequences, as transformers calls it. Every rank of the group must call it.

    Args:
        module: The layer.
        query: ``[batch, heads, this rank's tokens, width]``.
        key: ``[batch, key heads, this rank's tokens, width]``.
        value: As ``key``.
        attention_mask: The result of :func:`mask`, or this rank's part of a padding mask, ``[batch, tokens]``.
        scaling: Factor of the scores; None: one over the root of the width.
        dropout: Probability with which attention probabilities are dropped.
        is_causal: None: as the layer says.
        position_ids: Of this rank's tokens, ``[batch or 1, tokens]``; a document begins wherever they begin again.
        **kwargs: For the implementation that attends.

    Returns:
        ``[batch, this rank's tokens, heads, width]``, and None for the probabilities.

    Raises:
        DeepSpeedConfigError: The layer passes an argument that sequence parallelism does not support.
    """
    sharing = registered(module)
    if not sharing.is_on:
        more = {"scaling": scaling, "dropout": dropout, "position_ids": position_ids, **kwargs}
        if is_causal is not None:
            more["is_causal"] = is_causal
        return call_attention(sharing.core, module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    _refuse_unsupported(module, query, key, kwargs)
    seen = _seen_by(attention_mask, query.size(2), module, is_causal)
    position_ids = _two_axes(seen.positions if position_ids is None else position_ids, module)
    positions, padding = sharing.whole(position_ids), sharing.whole(seen.padding)
    call = AttentionCall(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs)
    if sharing.heads_group is None:
        return implementation_of(sharing)(call), None
    return _by_heads(call), None


def _by_heads(call: AttentionCall) -> torch.Tensor:
    """Attends to all tokens of some heads (Ulysses): exchanges, attends, and exchanges back."""
    sharing, group = call.sharing, call.sharing.heads_group
    shares = shares_of_heads(call.query.size(1), call.key.size(1), size_of(group))
    query, key, value = (
        exchange(tensor, group, 2, 1, heads=heads)
        for tensor, heads in ((call.query, shares.query), (call.key, shares.key), (call.value, shares.key))
    )
    start, stop = shares.query[rank_in(group)]
    more = call.more
    if more.get("s_aux") is not None and sharing.ring_group is None:  # attention sinks: one number per head
        more = {**more, "s_aux": more["s_aux"][start:stop]}
    inside = replace(call, query=query, key=key, value=value, more=more)
    once = KeptOnce() if sharing.recompute_exchange and sharing.ring_group is None else None
    with nullcontext() if once is None else once.attending():
        out = implementation_of(sharing)(inside)
    whole = exchange(out, group, 1, 2, back=True, heads=shares.query)
    if once is not None:
        once.became(out, whole, lambda result: exchange(result, group, 1, 2, heads=shares.query))
    return whole


def _seen_by(attention_mask: Any, tokens: int, module: nn.Module, is_causal: bool | None) -> Visible:
    """Returns which tokens see which, from a mask of :func:`mask` or a padding mask ``[batch, tokens]``."""
    seen = given_mask(attention_mask, tokens)
    if seen is not None and not isinstance(attention_mask, torch.Tensor):
        return seen
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    return Visible(is_causal) if seen is None else replace(seen, is_causal=is_causal)


def _two_axes(position_ids: torch.Tensor | None, module: nn.Module) -> torch.Tensor | None:
    if position_ids is not None and position_ids.dim() != 2:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} got position_ids of shape {tuple(position_ids.shape)}; "
            "expected [batch, tokens]. Positions with several axes (images) are not supported: train this model with "
            "sequence_parallel_size 1"
        )
    return position_ids


def _refuse_unsupported(module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise DeepSpeedConfigError(
                f"sequence parallel: {type(module).__name__} passes {name} to its attention, which is not supported "
                "with sequence_parallel_size > 1; "
                + ("pass position_ids instead" if name.startswith("cu_seq") else "use sequence_parallel_size 1")
            )
    if query.size(2) != key.size(2):
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} has {query.size(2)} queries and {key.size(2)} keys, as when "
            "it generates with a cache; generate with disable_in_eval=True and model.eval()"
        )
