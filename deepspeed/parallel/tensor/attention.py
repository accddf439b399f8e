"""What an attention module says of its heads, and what it must be told when they are dealt out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.parallel.tensor.split import Heads

_QUERY = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads", "attention_heads", "nhead")
_KEY_VALUE = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "kv_n_heads",
    "num_multi_query_groups_per_partition",
)
_WIDTH = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_kv")
_ALL_HEADS = ("all_head_size", "split_size", "embed_dim", "hidden_size", "inner_dim", "d_model", "dim", "q_size")
"""What modules call the width of all query heads together."""

_PER_HEAD = ("alibi", "position_bias")
"""Arguments that have something for every head."""

_MASK = "attention_mask"
"""The argument that may have heads as its second of four dimensions: where ALiBi is added to it, for example."""


@dataclass(frozen=True)
class Attention:
    """The heads of an attention module, as a whole.

    Attributes:
        query: Query heads.
        key_value: Key/value heads.
        width: Of one head, or 0 where the module does not say.
    """

    query: int
    key_value: int
    width: int


def attention_of(module: nn.Module, config: Any) -> Attention | None:
    """The heads of a module that computes attention; None for any other.

    Args:
        module: It counts as one if it has a number of heads, or is called so and has a configuration that does.
        config: Of the model, or None.
    """
    own = _first(module, _QUERY)
    if own is None and "attention" not in type(module).__name__.lower():
        return None
    sources = [module, *_configurations(getattr(module, "config", None)), *_configurations(config)]
    query = own or next((found for source in sources if (found := _first(source, _QUERY)) is not None), None)
    if query is None:
        return None
    groups = getattr(module, "num_key_value_groups", None)
    key_value = _first(module, _KEY_VALUE)
    if key_value is None and isinstance(groups, int) and groups > 0 and query % groups == 0:
        key_value = query // groups
    if key_value is None:
        key_value = next((found for source in sources if (found := _first(source, _KEY_VALUE)) is not None), query)
    width = next((found for source in sources if (found := _first(source, _WIDTH)) is not None), 0)
    return Attention(query, key_value, width)


def tell(module: nn.Module, whole: Attention, heads: Heads, place: int) -> dict[str, tuple[int, int]]:
    """Sets the numbers of an attention module to those of a rank's part.

    Args:
        module: The module.
        whole: What it had.
        heads: How they are dealt.
        place: This rank's.

    Returns:
        By attribute: the number before and after.
    """
    low, high = heads.of_query(place)
    first, last = heads.of_key_value(place)
    query, key_value = high - low, last - first
    wanted = dict.fromkeys(_QUERY, (whole.query, query)) | dict.fromkeys(_KEY_VALUE, (whole.key_value, key_value))
    wanted["num_key_value_groups"] = (whole.query // whole.key_value, query // key_value)
    wanted |= dict.fromkeys(_ALL_HEADS, (whole.query * whole.width, query * whole.width))
    changed = {}
    for name, (before, after) in wanted.items():
        if before and before != after and _own_number(module, name) == before:
            setattr(module, name, after)
            changed[name] = before, after
    return changed


def slice_arguments(module: nn.Module, whole: Attention, heads: Heads, place: int) -> None:
    """Lets an attention module see this rank's part of what it is handed per head (ALiBi, position biases).

    Args:
        module: The module.
        whole: What it had.
        heads: How they are dealt.
        place: This rank's.
    """
    low, high = heads.of_query(place)

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for name in _PER_HEAD:
            if isinstance(value := kwargs.get(name), torch.Tensor):
                kwargs = {**kwargs, name: _part_of_heads(value, whole.query, low, high)}
        if isinstance(mask := kwargs.get(_MASK), torch.Tensor) and mask.dim() == 4:
            kwargs = {**kwargs, _MASK: _part_of_heads(mask, whole.query, low, high)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _part_of_heads(value: torch.Tensor, count: int, low: int, high: int) -> torch.Tensor:
    """Of ``(heads, ...)``, ``(batch x heads, ...)`` or ``(batch, heads, ...)``; anything else has no heads."""
    if value.dim() == 4:
        return value[:, low:high] if value.shape[1] == count else value
    if value.dim() == 3 and value.shape[0] % count == 0:
        return value.view(-1, count, *value.shape[1:])[:, low:high].flatten(0, 1)
    return value


def _configurations(config: Any) -> Iterable[Any]:
    if config is None:
        return
    inner = getattr(config, "text_config", None)
    if inner is not None:
        yield inner
    yield config


def _first(source: Any, names: tuple[str, ...]) -> int | None:
    for name in names:
        found = _own_number(source, name)
        if found:
            return found
    return None


def _own_number(source: Any, name: str) -> int | None:
    found = getattr(source, name, None)
    return found if isinstance(found, int) and not isinstance(found, bool) else None
