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
from deepspeed.parallel.sequence.attend import attend
from deepspeed.parallel.sequence.exchange import exchange
from deepspeed.parallel.sequence.kept_once import KeptOnce
from deepspeed.parallel.sequence.ring import ring_attention
from deepspeed.parallel.sequence.shares import length_of, shares_of_heads
from deepspeed.parallel.sequence.sharing import Sharing, registered, registered_by
from deepspeed.parallel.sequence.visible import Visible, checked_padding, given_mask, visible_by
from deepspeed.uncompiled import uncompiled

_PLACED = ("softcap", "position_bias", "cu_seq_lens_q", "cu_seq_lens_k")
"""Arguments of attention functions that say something of single tokens, or change scores in a way not done here."""


@uncompiled
def mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = None, config: Any = None, **kwargs: Any
) -> Any:
    """What the layers get for a mask; see :class:`Visible`. None: causal, and nothing is padding."""
    sharing = registered_by(config)
    if not sharing.is_on:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

        make = ALL_MASK_ATTENTION_FUNCTIONS[sharing.core]
        return make(attention_mask=attention_mask, mask_function=mask_function, config=config, **kwargs)
    seen = visible_by(mask_function)
    if attention_mask is not None:
        seen = replace(seen, padding=checked_padding(attention_mask, kwargs["q_length"]))
    elif _has_documents(sharing):
        seen = replace(seen, positions=sharing.given_positions)
    return None if seen == Visible() else seen


def _has_documents(sharing: Sharing) -> bool:
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
    """Attention as transformers asks for it. Every rank of the group must call it.

    Args:
        module: The layer.
        query: ``[batch, heads, this rank's tokens, width]``.
        key: ``[batch, key heads, this rank's tokens, width]``.
        value: As ``key``.
        attention_mask: Of :func:`mask`, or this rank's part of a padding mask.
        scaling: Of the scores.
        dropout: Of the probabilities.
        is_causal: None: as the layer says.
        position_ids: Of this rank's tokens, ``[batch or 1, tokens]``; where they begin again a document begins.
        **kwargs: For the implementation that attends.

    Returns:
        ``[batch, this rank's tokens, heads, width]``, and None for the probabilities.
    """
    sharing = registered(module)
    if not sharing.is_on:
        more = {"scaling": scaling, "dropout": dropout, "position_ids": position_ids, **kwargs}
        if is_causal is not None:
            more["is_causal"] = is_causal
        return _core_call(sharing, module, query, key, value, attention_mask, **more)  # type: ignore[no-any-return]
    _refuse_what_is_placed(module, query, key, kwargs)
    seen = given_mask(attention_mask, query.size(2))
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    if seen is None:
        seen = Visible(is_causal)
    elif isinstance(attention_mask, torch.Tensor):
        seen = replace(seen, is_causal=is_causal)
    position_ids = _two_axes(seen.positions if position_ids is None else position_ids, module)
    positions, padding = sharing.whole(position_ids), sharing.whole(seen.padding)
    if sharing.heads_group is None:
        return _round(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs), None
    group = sharing.heads_group
    shares = shares_of_heads(query.size(1), key.size(1), size_of(group))
    inside = [
        exchange(tensor, group, 2, 1, heads=heads)
        for tensor, heads in ((query, shares.query), (key, shares.key), (value, shares.key))
    ]
    if sharing.ring_group is not None:
        query, key, value = inside
        out = _round(sharing, module, query, key, value, seen, positions, padding, scaling, dropout, kwargs)
        return exchange(out, group, 1, 2, back=True, heads=shares.query), None
    if kwargs.get("s_aux") is not None:  # one number per head
        start, end = shares.query[rank_in(group)]
        kwargs["s_aux"] = kwargs["s_aux"][start:end]
    once = KeptOnce() if sharing.recompute_exchange else None
    with nullcontext() if once is None else once.attending():
        if sharing.core == "sdpa":
            _refuse_sinks(module, kwargs)
            out = attend(
                *inside,
                documents=sharing.documents(positions, padding, query.size(0)),
                is_causal=seen.is_causal,
                window=seen.window,
                scale=scaling,
                dropout=dropout,
            ).transpose(1, 2)
        else:
            out = _by_core(
                sharing, module, inside, seen, positions, padding, {"scaling": scaling, "dropout": dropout, **kwargs}
            )
            out = out.reshape(*out.shape[:2], length_of(shares.query[rank_in(group)]), -1)
    whole = exchange(out, group, 1, 2, back=True, heads=shares.query)
    if once is not None:
        once.became(out, whole, lambda result: exchange(result, group, 1, 2, heads=shares.query))
    return whole, None


class _Seen:
    """An object with some attributes exchanged, for attention functions that read them from the layer."""

    def __init__(self, original: Any, **exchanged: Any) -> None:
        self.__dict__.update(exchanged, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _core_call(sharing: Sharing, module: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    groups = args[0].size(1) // args[1].size(1)
    config = _Seen(module.config, _attn_implementation=sharing.core)
    layer = _Seen(module, config=config, num_key_value_groups=groups)
    return ALL_ATTENTION_FUNCTIONS[sharing.core](layer, *args, **kwargs)


def _by_core(
    sharing: Sharing,
    module: nn.Module,
    inside: list[torch.Tensor],
    seen: Visible,
    positions: torch.Tensor | None,
    padding: torch.Tensor | None,
    more: dict[str, Any],
) -> torch.Tensor:
    """Attention to whole sequences by the model's own implementation; ``[batch, tokens, heads, width]``."""
    more["is_causal"] = seen.is_causal
    if (parts := sharing.parts(positions, padding)) > 1:
        assert positions is not None and padding is not None
        split = zip(
            *(tensor.chunk(parts, 2) for tensor in inside),
            padding.chunk(parts, 1),
            positions.chunk(parts, 1),
            strict=True,
        )
        return torch.cat([_core_call(sharing, module, *part, position_ids=at, **more)[0] for *part, at in split], dim=1)
    if padding is not None and bool(padding.all()):
        padding = None
    batch = inside[0].size(0)
    packed = padding is None and batch > 1 and sharing.documents(positions, None, batch) is not None
    if not packed:
        return _core_call(sharing, module, *inside, padding, position_ids=positions, **more)[0]  # type: ignore[no-any-return]
    # The library finds documents in position ids of one sequence only.
    assert positions is not None
    rows = zip(*(tensor.split(1) for tensor in inside), positions.expand(batch, -1).split(1), strict=True)
    return torch.cat([_core_call(sharing, module, *row, None, position_ids=place, **more)[0] for *row, place in rows])


def _round(
    sharing: Sharing,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: Visible,
    positions: torch.Tensor | None,
    padding: torch.Tensor | None,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention by the ring; ``[batch, tokens, heads, width]``."""
    _refuse_sinks(module, kwargs)
    if dropout:
        raise DeepSpeedConfigError(
            f"sequence_parallel.mode: {type(module).__name__} drops attention probabilities ({dropout}), which the "
            'ring does not; set the model\'s attention dropout to 0, or the mode to "ulysses"'
        )
    numbers = sharing.numbers(positions, padding)
    if numbers is not None:
        numbers = numbers.expand(query.size(0), -1)
    out = ring_attention(
        query, key, value, sharing.ring_group, documents=numbers, is_causal=seen.is_causal, window=seen.window,
        scale=scaling,
    )  # fmt: skip
    return out.transpose(1, 2)


def _two_axes(position_ids: torch.Tensor | None, module: nn.Module) -> torch.Tensor | None:
    if position_ids is not None and position_ids.dim() != 2:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} got position_ids of shape {tuple(position_ids.shape)}; "
            "expected [batch, tokens]. Positions of several axes (images) are not cut along the sequence"
        )
    return position_ids


def _refuse_what_is_placed(module: nn.Module, query: torch.Tensor, key: torch.Tensor, kwargs: dict[str, Any]) -> None:
    for name in _PLACED:
        if kwargs.get(name) is not None:
            raise DeepSpeedConfigError(
                f"sequence parallel: {type(module).__name__} gives its attention {name}, which is not had on a part of "
                "a sequence; train this model without sequence_parallel_size"
            )
    if query.size(2) != key.size(2):
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} has {query.size(2)} queries and {key.size(2)} keys, as when "
            "it generates with a cache; generate with disable_in_eval=True and model.eval()"
        )


def _refuse_sinks(module: nn.Module, kwargs: dict[str, Any]) -> None:
    if kwargs.get("s_aux") is not None:
        raise DeepSpeedConfigError(
            f"sequence parallel: {type(module).__name__} has attention sinks, which there are not here; choose a flash "
            'attention that has them as the core, and sequence_parallel.mode "ulysses"'
        )
