"""QK-clip: scales down the query and key weights of heads whose attention logits are too large.

With Muon attention logits can grow until training becomes unstable. After an update, the weights of each head whose
largest logit in the step was above a threshold are scaled so that this logit would have been the threshold (`Kimi K2
<https://arxiv.org/abs/2507.20534>`_, section 2.1 and algorithm 1). Fused attention does not store logits, so
they are computed again, in blocks, without a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from deepspeed.comm.transports.transport import Transport
from deepspeed.engine_feature import EngineHooks
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.models.attention import (
    attention_names,
    check_wrapped_attention,
    interface_of,
    takes_attention_by_name,
    wrap_attention,
)
from deepspeed.models.attention_modules import attention_of
from deepspeed.models.masks import mask_of_implementation
from deepspeed.ops.muon.muon import Muon, ScaledRows
from deepspeed.torch_private import is_inside_backward
from deepspeed.uncompiled import uncompiled

KEY = "optimizer.params.qk_clip_threshold"
_ENDING = "_qk_clip"
_RECORD = "_qk_clip"  # in the __dict__ of attention modules
_BLOCK_NUMEL = 1 << 24  # logits per block
_NORMS = (
    "q_norm", "k_norm", "qk_norm", "q_layernorm", "k_layernorm", "qk_layernorm", "query_layernorm", "key_layernorm",
    "q_layer_norm", "k_layer_norm",
)  # fmt: skip


@dataclass
class LogitRecord:
    """The largest attention logits of one layer since the last update."""

    heads: int  # query heads
    largest: Tensor | None = None  # largest logit of each head: fp32, 1-D; None before a forward
    # By head, the rows of projections that depend on it: name of the projection, first row, last row plus one, and the
    # power of the factor. None before a forward.
    rows: list[list[tuple[str, int, int, float]]] | None = field(default=None, repr=False)
    is_on: bool = True  # whether forwards are measured


def measure_attention(model: nn.Module) -> None:
    """Makes the attention layers of a Transformers model record the largest logit of each head, in place.

    Raises:
        DeepSpeedConfigError: The model is not from Transformers, its attention function cannot be replaced, or a layer
            normalizes queries or keys, so that its logits do not grow with its weights.
    """
    outermost: Any = next((module for module in model.modules() if takes_attention_by_name(module)), None)
    if outermost is None:
        raise DeepSpeedConfigError(
            f"{KEY}: expected a model of Transformers, found {type(model).__name__}; leave the key out"
        )
    for name in attention_names(outermost):
        if "flex" in name or "paged" in name:
            raise DeepSpeedConfigError(
                f'{KEY}: the masks of attn_implementation="{name}" cannot be read; use "sdpa" or "eager"'
            )
    check_wrapped_attention(outermost, _ENDING, _functions, KEY)
    for name, module in model.named_modules():
        if _projections(module) is not None:
            found = [norm for norm in _NORMS if isinstance(getattr(module, norm, None), nn.Module)]
            if found:
                raise DeepSpeedConfigError(
                    f"{KEY}: {name} ({type(module).__name__}) normalizes queries or keys ({', '.join(found)}), so its "
                    "logits do not grow with its weights and scaling them changes nothing; leave the key out"
                )
            heads = attention_of(module, getattr(module, "config", None))
            if heads is not None:
                module.__dict__[_RECORD] = LogitRecord(heads.query)
    wrap_attention(model, _ENDING, _functions)


def is_measured(model: nn.Module) -> bool:
    """Returns whether :func:`measure_attention` has prepared attention layers of the model."""
    return any(_RECORD in module.__dict__ for module in model.modules())


def _projections(module: nn.Module) -> tuple[str, str] | None:
    """Returns the names of the query and key projections of an attention layer; None for other modules."""
    for query, key in (("q_proj", "k_proj"), ("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj")):
        if all(isinstance(getattr(module, name, None), nn.Module) for name in (query, key)):
            return query, key
    return None


def _functions(name: str) -> tuple[Any, Any]:
    return functools.partial(_attend, name), functools.partial(mask_of_implementation, name)


def _attend(name: str, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    """Computes attention of ``[batch, heads, tokens, width]`` by the implementation ``name``, measured in training."""
    if layer.training and not is_inside_backward():
        _measure(layer, query, key, value, mask, more)
    return interface_of(name, layer)(layer, query, key, value, mask, **more)


@uncompiled
@torch.no_grad()
def _measure(layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, more: Mapping[str, Any]) -> None:
    record: LogitRecord | None = layer.__dict__.get(_RECORD)
    if record is None:
        raise DeepSpeedConfigError(
            f"{KEY}: {type(layer).__name__} has no layers q_proj and k_proj, nor those of multi-head latent attention "
            "(q_b_proj, kv_b_proj), so it is not known which weights its logits follow; leave the key out"
        )
    if not record.is_on:
        return
    if more.get("cu_seq_lens_q") is not None:
        raise DeepSpeedConfigError(
            f"{KEY}: {type(layer).__name__} gets cu_seq_lens_q, so a sequence contains several documents; pass "
            'position_ids alone, with attn_implementation="sdpa"'
        )
    if record.rows is None:
        record.rows = _rows_of_heads(layer, query, key, value, record.heads)
    found = largest_logits(
        query,
        key,
        mask,
        scale=more.get("scaling"),
        is_causal=_is_causal(layer, more),
        window=more.get("sliding_window"),
    )
    record.largest = found if record.largest is None else torch.maximum(record.largest, found)


def _is_causal(layer: Any, more: Mapping[str, Any]) -> bool:
    argument = more.get("is_causal")
    return bool(getattr(layer, "is_causal", True) if argument is None else argument)


def largest_logits(
    query: Tensor, key: Tensor, mask: Any, *, scale: float | None, is_causal: bool, window: int | None = None
) -> Tensor:
    """Returns the largest attention logit of each head over all unmasked pairs of query and key.

    Args:
        query: ``[batch, heads, queries, width]``.
        key: ``[batch, key heads, keys, width]``.
        mask: ``[batch, keys]``, true for tokens that are no padding; ``[batch, 1 or heads, queries, keys]``, true or 0
            for pairs that are not masked; None: only ``is_causal`` masks.
        scale: Factor of the logits; None: one over the root of the width.
        is_causal: Without a 4-D mask, queries attend to no later keys.
        window: Without a 4-D mask, and with ``is_causal``: keys that a query attends to, its own included; None: all.

    Returns:
        1-D, fp32; minus infinity where every pair is masked.
    """
    batch, heads, queries, width = query.shape
    groups, keys = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    transposed = key.mT.unsqueeze(2)
    largest = query.new_full((heads,), -torch.inf, dtype=torch.float32)
    step = max(1, _BLOCK_NUMEL // max(batch * heads * keys, 1))
    for first in range(0, queries, step):
        block = query[:, :, first : first + step]
        rows = block.shape[2]
        logits = block.reshape(batch, groups, heads // groups, rows, width) @ transposed
        logits = (logits.float() * scale).reshape(batch, heads, rows, keys)
        positions = torch.arange(first, first + rows, device=query.device).unsqueeze(1)
        hidden = _hidden(mask, positions, keys, is_causal=is_causal and queries > 1, window=window)
        if hidden is not None:
            logits.masked_fill_(hidden, -torch.inf)
        largest = torch.maximum(largest, logits.amax(dim=(0, 2, 3)))
    return largest


def _hidden(mask: Any, positions: Tensor, keys: int, *, is_causal: bool, window: int | None) -> Tensor | None:
    """Returns a mask, true for masked pairs, for ``[batch, heads, queries, keys]``; ``positions``: ``[queries, 1]``."""
    if isinstance(mask, Tensor) and mask.dim() == 4:
        block = mask[:, :, positions.flatten()] if mask.shape[2] > 1 else mask
        seen = block if block.dtype == torch.bool else block > torch.finfo(block.dtype).min / 2
        return ~seen[..., :keys]
    hidden: Tensor | None = None
    if is_causal:
        others = torch.arange(keys, device=positions.device)
        hidden = others > positions
        if window is not None:
            hidden |= others <= positions - window
    if isinstance(mask, Tensor) and mask.dim() == 2:
        padding = ~mask.bool()[:, None, None, -keys:]
        hidden = padding if hidden is None else hidden | padding
    return hidden


def _rows_of_heads(
    layer: Any, query: Tensor, key: Tensor, value: Tensor, heads: int
) -> list[list[tuple[str, int, int, float]]]:
    """Returns the weight rows of query and key projections that determine each head's logits, see :class:`LogitRecord`.

    Keys that several heads share are not scaled, so that no head changes because of another one. Then the queries get
    the whole factor instead of its root.
    """
    names = _projections(layer)
    assert names is not None
    of_query, of_key = names
    width, key_heads = query.shape[-1], key.shape[1]
    rows = {name: _rows(getattr(layer, name)) for name in names}
    if of_key == "kv_b_proj":
        unrotated = getattr(layer, "qk_nope_head_dim", 0)
        both = unrotated + value.shape[-1]
        expected = {of_query: heads * width, of_key: heads * both}
        found = [
            [
                (of_query, head * width, head * width + unrotated, 0.5),
                (of_query, head * width + unrotated, (head + 1) * width, 1.0),
                (of_key, head * both, head * both + unrotated, 0.5),
            ]
            for head in range(heads)
        ]
    else:
        is_shared = rows[of_key] != heads * width
        expected = {of_query: heads * width, of_key: key_heads * width if is_shared else heads * width}
        found = [[(of_query, head * width, (head + 1) * width, 1.0 if is_shared else 0.5)] for head in range(heads)]
        for head in () if is_shared else range(heads):
            found[head].append((of_key, head * width, (head + 1) * width, 0.5))
    if query.shape[1] != heads or rows != expected:
        raise DeepSpeedConfigError(
            f"{KEY}: {type(layer).__name__} computes {query.shape[1]} heads of width {width}, of which {of_query} and "
            f"{of_key} should have {list(expected.values())} rows, but they have {list(rows.values())}; the rows of a "
            "head are not known. Leave the key out"
        )
    return found


def _rows(projection: Any) -> int:
    weight = getattr(projection, "weight", None)
    return int(getattr(weight, "ds_shape", weight.shape)[0]) if isinstance(weight, Tensor) else 0


class QKClipHooks(EngineHooks):
    """Passes to Muon, before each update, the weight rows to scale after it."""

    def __init__(self, model: nn.Module, peers: Transport, optimizer: Muon) -> None:
        self._records = {
            name: module.__dict__[_RECORD] for name, module in model.named_modules() if _RECORD in module.__dict__
        }
        self._peers = peers
        self._optimizer = optimizer
        self._seen: tuple[float, int] | None = None  # largest logit, heads that were clipped

    @override
    def before_update(self, global_steps: int, *, has_run_backward: bool) -> None:
        optimizer = self._optimizer
        assert optimizer.qk_clip_threshold is not None
        seen = [record.largest for record in self._records.values() if record.largest is not None]
        unknown = torch.full((1,), -torch.inf, device=seen[0].device if seen else None)
        mine = [
            unknown.expand(record.heads) if record.largest is None else record.largest
            for record in self._records.values()
        ]
        rows = self._peers.gather_small(  # one device synchronization for all layers
            torch.cat(mine).double().cpu(), channel="step", label="the largest attention logits (QK-clip)"
        )
        largest = rows.amax(0)
        if has_run_backward and not bool((largest > -torch.inf).any()):
            raise CallOrderError(
                f"{KEY}: no attention layer was measured since the last update; call the engine, whose model is in "
                "training mode, before backward"
            )
        found = factors(self._records, largest, optimizer.qk_clip_threshold)
        optimizer.scale_rows_after_step(found)
        self._seen = float(largest.max()), int((largest > optimizer.qk_clip_threshold).sum())
        for record in self._records.values():
            record.largest = None

    @override
    def after_update(self, global_steps: int, *, was_skipped: bool) -> None:
        self._optimizer.scale_rows_after_step({})  # those of a skipped update are not used

    @override
    def events(self) -> Sequence[tuple[str, float]]:
        if self._seen is None:
            return ()
        largest, clipped = self._seen
        return (("Train/Samples/max_attention_logit", largest), ("Train/Samples/clipped_heads", float(clipped)))

    @override
    def close(self) -> None:
        for record in self._records.values():
            record.is_on = False


def factors(records: Mapping[str, LogitRecord], largest: Tensor, threshold: float) -> dict[str, list[ScaledRows]]:
    """Returns the factors of rows of weights and biases, by parameter name.

    Args:
        largest: Largest logit of each head, in the order of ``records``: 1-D.
        threshold: Heads with a logit above it are scaled down to it.
    """
    found: dict[str, list[ScaledRows]] = {}
    first = 0
    for name, record in records.items():
        for head, logit in enumerate(largest[first : first + record.heads].tolist()):
            if logit > threshold and record.rows is not None:
                for projection, start, stop, power in record.rows[head]:
                    rows = ScaledRows(start, stop, (threshold / logit) ** power)
                    for kind in ("weight", "bias"):
                        found.setdefault(f"{name}.{projection}.{kind}".removeprefix("."), []).append(rows)
        first += record.heads
    return found
