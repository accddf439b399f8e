"""The attention and the mask function of registered Transformers models.

The attention function gets queries, keys and values of this rank's tokens and attends to whole sequences by the
exchange. The library builds masks from functions of positions, which would be evaluated at positions within the rank's
part. So the mask function recognizes the kind of mask instead, and raises for unknown kinds.

Attention over whole sequences builds no mask of tokens by tokens: all packed documents are one call where torch has a
kernel for it (``packed``); elsewhere it runs once per document and, with a sliding window, once per block. So memory is
linear in the length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.activation_checkpointing.checkpointing import checkpoint_heads
from deepspeed.comm.job.job import rank_in, size_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention import call_attention
from deepspeed.models.masks import UnknownMaskError, mask_kind, mask_of_implementation
from deepspeed.parallel.sequence.context import Documents, SequenceParallelContext, registered, registered_by
from deepspeed.parallel.sequence.exchange import exchange, shares_of_heads
from deepspeed.parallel.sequence.packed import attend_at_once, attends_at_once
from deepspeed.parallel.sequence.ring import ring_attention
from deepspeed.parallel.sequence.saved_result import SavedResult
from deepspeed.uncompiled import uncompiled

_UNSUPPORTED = ("softcap", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of attention functions that sequence parallelism does not support."""


@dataclass(frozen=True)
class Visible:
    """Describes which tokens see which; attention layers get it instead of a mask."""

    is_causal: bool = True  # tokens see no later ones
    window: int | None = None  # with ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all
    # this rank's part of the padding mask, ``[batch, tokens]``, True for tokens; None where there is none
    padding: torch.Tensor | None = None
    # position ids of this rank's tokens, ``[batch or 1, tokens]``, if documents are packed, for layers that do not get
    # them as an argument; None: one document
    positions: torch.Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one attention layer."""

    sharing: SequenceParallelContext  # how the model's sequences are shared
    module: nn.Module  # the layer
    query: torch.Tensor  # ``[batch, heads, tokens, width]``
    key: torch.Tensor  # ``[batch, key heads, tokens, width]``
    value: torch.Tensor  # as ``key``
    seen: Visible  # which tokens see which
    # position ids of whole sequences, ``[batch or 1, all tokens]``; None: one document per sequence
    positions: torch.Tensor | None
    # mask of whole sequences, ``[batch, all tokens]``, True for tokens that count; None: all do
    padding: torch.Tensor | None
    scale: float | None  # factor of the scores; None: one over the root of the width
    dropout: float  # probability with which attention probabilities are dropped
    more: dict[str, Any]  # other keyword arguments of the layer


@uncompiled
def mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = None, config: Any = None, **kwargs: Any
) -> Any:
    """Returns the layers' mask argument: a :class:`Visible`, or None (causal, without padding).

    ``attention_mask`` is None or a padding mask of shape ``[batch, tokens of this rank]``.
    """
    sharing = registered_by(config)
    if not sharing.is_on:
        kwargs.update(attention_mask=attention_mask, mask_function=mask_function, config=config)
        return mask_of_implementation(sharing.core, **kwargs)
    seen = visible_by(mask_function)
    if attention_mask is not None:
        seen = replace(seen, padding=checked_padding(attention_mask, kwargs["q_length"]))
    elif sharing.inputs is not None and (positions := sharing.inputs.positions) is not None and positions.dim() == 2:
        # Whether documents are packed into the sequences of this pass is the same on all ranks.
        if sharing.documents(sharing.whole(positions), None, positions.size(0)) is not None:
            seen = replace(seen, positions=positions)
    return None if seen == Visible() else seen


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
        query: ``[batch, heads, this rank's tokens, width]``.
        key: ``[batch, key heads, this rank's tokens, width]``.
        value: As ``key``.
        attention_mask: The result of :func:`mask`, or this rank's part of a padding mask, ``[batch, tokens]``.
        scaling: Factor of the scores; None: one over the root of the width.
        dropout: Probability with which attention probabilities are dropped.
        is_causal: None: as in the layer.
        position_ids: Positions of this rank's tokens, ``[batch or 1, tokens]``; a document begins wherever they
            restart.

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
    position_ids = _checked_positions(seen.positions if position_ids is None else position_ids, module)
    positions, padding = sharing.whole(position_ids), sharing.whole(seen.padding)
    call = AttentionCall(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs)
    if sharing.exchange.heads_group is None:
        return implementation_of(sharing)(call), None
    return _by_heads(call), None


def _by_heads(call: AttentionCall) -> torch.Tensor:
    """Attends to all tokens of some heads (Ulysses): exchanges, attends, and exchanges back."""
    sharing, group = call.sharing, call.sharing.exchange.heads_group
    shares = shares_of_heads(call.query.size(1), call.key.size(1), size_of(group))
    query, key, value = (
        exchange(tensor, group, 2, 1, heads=heads)
        for tensor, heads in ((call.query, shares.query), (call.key, shares.key), (call.value, shares.key))
    )
    start, stop = shares.query[rank_in(group)]
    more = call.more
    if more.get("s_aux") is not None and sharing.exchange.ring_group is None:  # attention sinks: one number per head
        more = {**more, "s_aux": more["s_aux"][start:stop]}
    inside = replace(call, query=query, key=key, value=value, more=more)
    keeps_once = sharing.exchange.recompute and not sharing.recompute_core and sharing.exchange.ring_group is None
    once = SavedResult() if keeps_once else None
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


def _checked_positions(position_ids: torch.Tensor | None, module: nn.Module) -> torch.Tensor | None:
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


def visible_by(mask_function: Callable[..., Any]) -> Visible:
    """Returns which tokens see which, for one of the library's mask functions.

    Raises:
        DeepSpeedConfigError: The mask is not supported for parts of sequences.
    """
    try:
        kind = mask_kind(mask_function)
    except UnknownMaskError as error:
        raise DeepSpeedConfigError(
            f"sequence parallel: the model masks attention by {error}, which is not supported on a part "
            "of a sequence; expected causal or full attention, a causal sliding window, packed documents or padding. "
            "Train this model without sequence_parallel_size"
        ) from None
    return Visible(kind.is_causal, kind.window)


def given_mask(attention_mask: Any, tokens: int) -> Visible | None:
    """Returns the mask that an attention layer was given; None if it has none, so that the layer decides.

    Raises:
        DeepSpeedConfigError: The mask is one of tokens by tokens, or of another length.
    """
    if attention_mask is None or isinstance(attention_mask, Visible):
        return attention_mask
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return replace(Visible(), padding=checked_padding(attention_mask, tokens))
    kind = f"a {attention_mask.dim()}-D tensor" if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
    raise DeepSpeedConfigError(
        f"sequence parallel: attention_mask is {kind}, a mask of tokens by tokens, which is not cut along the "
        "sequence; leave it out for causal attention, give a padding mask of [batch, tokens], or position_ids "
        "that begin again with each packed document"
    )


def checked_padding(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the padding mask of this rank's tokens, ``[batch, tokens]``, as bool.

    Raises:
        DeepSpeedConfigError: The mask has another number of tokens.
    """
    if mask.size(1) != tokens:
        raise DeepSpeedConfigError(
            f"sequence parallel: attention_mask is of {mask.size(1)} tokens, but this rank has {tokens}; cut it as the "
            "other inputs are (UlyssesSPDataLoaderAdapter does)"
        )
    return mask.bool()


def implementation_of(sharing: SequenceParallelContext) -> Callable[[AttentionCall], torch.Tensor]:
    """Returns the function that attends: after the exchange of heads, or directly if heads are not exchanged."""
    if sharing.exchange.ring_group is not None:
        return _attend_by_ring
    attend_whole = _attend_by_sdpa if sharing.core == "sdpa" else _by_core
    return functools.partial(_recomputed, attend_whole) if sharing.recompute_core else attend_whole


def _recomputed(attend_whole: Callable[[AttentionCall], torch.Tensor], call: AttentionCall) -> torch.Tensor:
    """Computes attention, recomputed in backward between the exchanges, which are not repeated."""
    if not torch.is_grad_enabled():
        return attend_whole(call)

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend_whole(replace(call, query=query, key=key, value=value))

    return checkpoint_heads(run, call.query, call.key, call.value)  # type: ignore[no-any-return]


def _attend_by_ring(call: AttentionCall) -> torch.Tensor:
    """Computes ring attention. ``query``, ``key`` and ``value`` have this rank's tokens.

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
        call.query, call.key, call.value, call.sharing.exchange.ring_group,
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


def _by_core(call: AttentionCall) -> torch.Tensor:
    """Computes attention by the model's own implementation."""
    sharing, positions, padding = call.sharing, call.positions, call.padding
    tensors = call.query, call.key, call.value
    more = {"scaling": call.scale, "dropout": call.dropout, **call.more, "is_causal": call.seen.is_causal}

    def core(*args: Any, position_ids: torch.Tensor | None) -> torch.Tensor:
        out = call_attention(sharing.core, call.module, *args, position_ids=position_ids, **more)[0]
        return out.reshape(*out.shape[:2], args[0].size(1), -1)  # some implementations merge heads into one axis

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
    # The library derives documents from position ids only if the batch is one sequence.
    assert positions is not None
    rows = zip(*(tensor.split(1) for tensor in tensors), positions.expand(batch, -1).split(1), strict=True)
    return torch.cat([core(*row, None, position_ids=at) for *row, at in rows])


def _refuse_sinks(call: AttentionCall) -> None:
    if call.more.get("s_aux") is not None:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(call.module).__name__} has attention sinks, which are not supported by this "
            'core; choose a flash attention that has them as the core, and sequence_parallel.mode "ulysses"'
        )


_BLOCK = 512  # least number of queries at once under a window


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    documents: Documents | None = None,
    is_causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Returns the attention within each document, by torch's fused kernels: ``[batch, heads, tokens, width of value]``.

    Args:
        query: ``[batch, heads, tokens, width]``.
        key: ``[batch, key heads, tokens, width]``; heads are a multiple of key heads.
        value: As ``key``.
        documents: The documents, which do not see each other; None: every sequence is one document.
        is_causal: Tokens see no later ones.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them.
        scale: The scale of the scores; None: one over the root of the width.
    """
    options: dict[str, Any] = {"scale": scale, "dropout_p": dropout}
    if documents is None:
        return _attend(query, key, value, is_causal, window, options)
    if attends_at_once(query, key, value, dropout):
        return attend_at_once(query, key, value, documents, is_causal=is_causal, window=window, scale=scale)
    if all(row.order is None and row.lengths == documents[0].lengths for row in documents):
        cut = zip(*(tensor.split(documents[0].lengths, dim=2) for tensor in (query, key, value)), strict=True)
        return torch.cat([_attend(q, k, v, is_causal, window, options) for q, k, v in cut], dim=2)
    rows = []
    for number, row in enumerate(documents):
        parts = [tensor[number : number + 1] for tensor in (query, key, value)]
        order = None if row.order is None else row.order.to(query.device)
        if order is not None:
            parts = [part.index_select(2, order) for part in parts]
        if not row.lengths:
            rows.append(query.new_zeros((1, *query.shape[1:-1], value.size(-1))))
            continue
        cut = zip(*(part.split(row.lengths, dim=2) for part in parts), strict=True)
        out = torch.cat([_attend(q, k, v, is_causal, window, options) for q, k, v in cut], dim=2)
        if order is not None:
            out = out.new_zeros((*out.shape[:2], query.size(2), out.size(3))).index_copy(2, order, out)
        rows.append(out)
    return torch.cat(rows)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_causal: bool,
    window: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    tokens = query.size(2)
    if query.size(1) != key.size(1):
        options = {**options, "enable_gqa": True}
    if window is None or window >= tokens or not is_causal:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, **options)
    parts = []
    for start, stop in _blocks(tokens, max(window, _BLOCK)):
        first = max(start - window + 1, 0)
        near = torch.arange(start, stop, device=query.device)[:, None] - torch.arange(first, stop, device=query.device)
        mask = (near >= 0) & (near < window)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:stop], key[:, :, first:stop], value[:, :, first:stop], attn_mask=mask, **options
            )
        )
    return torch.cat(parts, dim=2)


def _blocks(tokens: int, size: int) -> Iterator[tuple[int, int]]:
    for start in range(0, tokens, size):
        yield start, min(start + size, tokens)
