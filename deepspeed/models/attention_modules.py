"""Reads the numbers of heads of an attention module, by the names of all families."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

QUERY_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_query_heads", "attention_heads", "nhead")
KEY_VALUE_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "kv_n_heads",
    "num_multi_query_groups_per_partition",
)
HEAD_WIDTH = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_kv")
WIDTH_OF_ALL_HEADS = (
    "all_head_size", "split_size", "embed_dim", "hidden_size", "inner_dim", "d_model", "dim", "q_size",
)  # fmt: skip
"""What modules call the width of all query heads together."""


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention module before any cut."""

    query: int  # query heads
    key_value: int  # key/value heads
    width: int  # width of one head; 0 if the module does not state it


def attention_of(module: nn.Module, config: Any) -> AttentionHeads | None:
    """Returns a module's heads if it has a number of them, or "attention" in its class name and ``config`` has it."""
    own = _first(module, QUERY_HEADS)
    if own is None and "attention" not in type(module).__name__.lower():
        return None
    sources = [module, *_configurations(getattr(module, "config", None)), *_configurations(config)]
    query = own or next((found for source in sources if (found := _first(source, QUERY_HEADS)) is not None), None)
    if query is None:
        return None
    groups = getattr(module, "num_key_value_groups", None)
    key_value = _first(module, KEY_VALUE_HEADS)
    if key_value is None and isinstance(groups, int) and groups > 0 and query % groups == 0:
        key_value = query // groups
    if key_value is None:
        key_value = next((found for source in sources if (found := _first(source, KEY_VALUE_HEADS)) is not None), query)
    width = next((found for source in sources if (found := _first(source, HEAD_WIDTH)) is not None), 0)
    return AttentionHeads(query, key_value, width)


def change_heads(module: nn.Module, whole: AttentionHeads, query: int, key_value: int) -> dict[str, tuple[int, int]]:
    """Sets an attention module's numbers to those of some heads, in place; returns ``{attribute: (before, after)}``."""
    wanted = dict.fromkeys(QUERY_HEADS, (whole.query, query)) | dict.fromkeys(
        KEY_VALUE_HEADS, (whole.key_value, key_value)
    )
    wanted["num_key_value_groups"] = (whole.query // whole.key_value, query // key_value)
    wanted |= dict.fromkeys(WIDTH_OF_ALL_HEADS, (whole.query * whole.width, query * whole.width))
    changed = {}
    for name, (before, after) in wanted.items():
        if before and before != after and _own_number(module, name) == before:
            setattr(module, name, after)
            changed[name] = before, after
    return changed


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
