"""Sparse attention for any Transformers model, by the library's registries of attention and mask functions.

The attention function gets queries, keys and values of every layer. A mask function must be registered with it, because
without one the library passes no mask, and padding would not be masked.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models import configurations
from deepspeed.models.attention import own_configurations, takes_attention_by_name, use_attention
from deepspeed.models.configurations import attends_across_sequences, is_library_config
from deepspeed.models.masks import is_bidirectional_mask, is_plain_mask, whole_mask
from deepspeed.ops.sparse_attention.attention import attend
from deepspeed.ops.sparse_attention.sparse_self_attention import Layouts
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig

NAME = "deepspeed_sparse"
_MARK = "_deepspeed_sparse_layouts"
_POSITIONS = "_deepspeed_sparse_positions"
#: Arguments of attention functions that change the scores and are not supported here.
_UNKNOWN = ("softcap", "s_aux")


def use_sparse_attention(model: nn.Module, sparsity_config: SparsityConfig, *, seed: int = 0) -> None:
    """Makes every attention layer of a Transformers model sparse, in place.

    Other models made from the same configuration object are not changed. Causality and padding stay as in the model.
    Sequence lengths need not be multiples of the block size. Generation with a KV cache also follows the pattern, but
    computes dense attention.

    Args:
        seed: The seed of random blocks; the same on all ranks.

    Raises:
        DeepSpeedConfigError: The model's attention cannot be replaced or attends across sequences, or the pattern has
            another number of heads.
    """
    what = _what(model)
    heads = heads_of(model)
    config: Any = model.config
    if attends_across_sequences(config):
        raise DeepSpeedConfigError(
            f"{what}: it attends from one sequence to another, for which a pattern has no meaning; use models with "
            "self-attention only"
        )
    if heads != sparsity_config.num_heads:
        raise DeepSpeedConfigError(
            f"{what}: the pattern is for {sparsity_config.num_heads} heads and the model has {heads}; make it with "
            f"num_heads={heads}"
        )
    own_configurations(model)
    use_attention(model, NAME, _attention, _mask, what)
    layouts = Layouts(sparsity_config, seed)
    for module in model.modules():
        module.__dict__[_MARK] = layouts


def heads_of(model: nn.Module) -> int:
    """Returns a Transformers model's number of heads. Raises DeepSpeedConfigError: it is none, or names none."""
    config: Any = getattr(model, "config", None)
    if not takes_attention_by_name(model) or not is_library_config(config):
        raise DeepSpeedConfigError(
            f"{_what(model)}: expected a Transformers model; use SparseSelfAttention in the layers of other models"
        )
    heads = configurations.heads_of(config)
    if heads is None:
        raise DeepSpeedConfigError(
            f"{_what(model)}: its configuration has no num_attention_heads for all layers; "
            "use SparseSelfAttention in the layers of the model instead"
        )
    return heads


def _what(model: nn.Module) -> str:
    return f"sparse attention for {type(model).__name__}"


def _mask(
    *, attention_mask: torch.Tensor | None = None, mask_function: Any = None, **kwargs: Any
) -> torch.Tensor | None:
    """Returns the mask for :func:`_attention`: the 2-D padding mask if it is the only mask, else the 4-D mask.

    None if nothing is masked.
    """
    positions = _positions_in_cache(mask_function, **kwargs)
    if is_plain_mask(mask_function) and positions is None:
        if attention_mask is None or bool(attention_mask.all()):
            return None
        return attention_mask
    found = whole_mask(attention_mask=attention_mask, mask_function=mask_function, **kwargs)
    if found is not None and positions is not None:
        found = found.contiguous()  # generate would copy it otherwise, without the attribute
        setattr(found, _POSITIONS, positions)
    return found


def _positions_in_cache(
    mask_function: Any, q_length: int = 0, kv_length: int = 0, q_offset: Any = 0, kv_offset: int = 0, **_: Any
) -> tuple[int, int] | None:
    """Returns the positions of the first query and the first key; None if the queries are the last keys.

    A static cache has keys after the queries, which are not filled yet; a cache of a window lacks the first keys.
    """
    if (kv_offset == 0 and int(q_offset) + q_length == kv_length) or is_bidirectional_mask(mask_function):
        return None
    return int(q_offset), int(kv_offset)


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Computes attention as transformers requests it.

    Args:
        query: ``[batch, heads, queries, width]``.
        key: ``[batch, key heads, keys, width]``.
        value: As ``key``.
        attention_mask: The result of :func:`_mask`, or a 4-D mask of the caller's: False hides, floats are added.

    Returns:
        ``[batch, queries, heads, width]``, and None for the probabilities.
    """
    layouts: Layouts = module.__dict__[_MARK]
    for name in _UNKNOWN:
        if kwargs.get(name) is not None:
            raise DeepSpeedConfigError(
                f"sparse attention: {type(module).__name__} passes {name} to its attention, which is not supported; "
                "leave the section sparse_attention out"
            )
    groups = query.size(1) // key.size(1)
    key, value = (tensor.repeat_interleave(groups, dim=1) if groups > 1 else tensor for tensor in (key, value))
    queries, keys = query.size(2), key.size(2)
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    is_causal = is_causal and (attention_mask is None or attention_mask.dim() == 2)
    key_bias, bias = _biases(attention_mask, query.dtype, keys)
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if bias is not None:
        bias = bias.expand(*bias.shape[:2], queries, keys)
    block = layouts.config.block
    positions = getattr(attention_mask, _POSITIONS, None)
    first_query, first_key = positions or (keys - queries, 0)
    length = -(-(first_query + queries) // block) * block
    if queries != keys or positions is not None:
        tokens = torch.arange(first_query, first_query + queries), torch.arange(first_key, first_key + keys)
        hidden = _hidden_by(layouts.layout(length), block, *tokens, is_causal).to(query.device)
        output = _dense(query, key, value, hidden, key_bias, bias, scaling, dropout)
        return output.transpose(1, 2).contiguous(), None
    if length > keys:
        extra = length - keys
        query, key, value = (functional.pad(tensor, (0, 0, 0, extra)) for tensor in (query, key, value))
        key_bias = query.new_zeros(query.size(0), keys) if key_bias is None else key_bias
        key_bias = functional.pad(key_bias, (0, extra), value=float("-inf"))
        bias = None if bias is None else functional.pad(bias, (0, extra, 0, extra))
    plan = layouts.plan(length, query.device)
    output = attend(
        query, key, value, plan, scale=scaling, key_bias=key_bias, bias=bias, is_causal=is_causal, dropout=dropout
    )
    return output[:, :, :keys].transpose(1, 2).contiguous(), None


def _biases(
    mask: torch.Tensor | None, dtype: torch.dtype, keys: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if mask is None:
        return None, None
    if mask.dim() == 2:
        return _hiding(mask[:, -keys:] == 0, dtype), None
    return None, _hiding(~mask, dtype) if mask.dtype == torch.bool else mask.to(dtype)


def _hiding(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, float("-inf"))


def _hidden_by(
    layout: torch.Tensor, block: int, queries: torch.Tensor, keys: torch.Tensor, is_causal: bool
) -> torch.Tensor:
    """Returns the keys at positions ``keys`` that some tokens do not see: bool ``[1, heads, queries, keys]``."""
    columns = (keys // block).clamp(max=layout.size(2) - 1)  # keys after the layout must be hidden otherwise
    hidden = layout[:, queries // block][:, :, columns] == 0
    if is_causal:
        hidden = hidden | (keys > queries.unsqueeze(1))
    return hidden.unsqueeze(0)


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    key_bias: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    added = _hiding(hidden, query.dtype)
    if key_bias is not None:
        added = added + key_bias[:, None, None]
    if bias is not None:
        added = added + bias
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=added, dropout_p=dropout, scale=scale)
