"""Which layers are cut, and how: by the user's rules, the model's own plan, or its structure.

Sources are tried in that order, and the first one that has rules decides. A user's rules are completed by a preset
where both are given; rules that only leave layers whole are exceptions from the model's plan. The result is a rule
for every module or parameter that is not left whole, by its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import nn

from deepspeed.config.sections.tensor_parallel import LayerPartition, TensorParallel
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.configurations import model_type_of
from deepspeed.models.tensor_plan import cuts_blocks, plans_in


class CutStyle(Enum):
    """The ways to cut a layer or a parameter."""

    COLUMN = "column"
    """Output features are divided."""
    ROW = "row"
    """Input features are divided, the output is summed."""
    COLUMN_GATHERED = "column, gathered"
    """Output features are divided, the output is gathered."""
    ROW_SLICED = "row, whole input"
    """Input features are divided; the input is whole and is sliced."""
    VOCABULARY = "vocabulary"
    """Rows of an embedding are divided."""
    WIDTH = "width"
    """Columns of an embedding are divided."""
    PER_HEAD = "a column per head"
    """An embedding with one column per head, added to its scores: columns are divided with the heads."""
    SUMMED = "whole, gradient summed"
    """Whole, but its input is cut: the gradient is summed."""
    LATENT = "whole, rotary part summed"
    """Whole; the last ``qk_rope_head_dim`` outputs go to cut heads directly, so their gradient is summed."""
    EXPERTS = "experts"
    """A module that works on cut experts: inputs enter, the output is summed."""
    IDENTITY_EXPERT = "identity expert"
    """An expert that returns its input on every rank.

    The output is divided by the ranks, as experts' outputs are summed.
    """
    SUM_OUTPUT = "output summed"
    """A module whose output is a summand on each rank."""
    WHOLE = "whole"
    """Not cut."""


@dataclass(frozen=True)
class CutRule:
    """How one layer or parameter is cut."""

    way: CutStyle
    source: str  # where the rule comes from, for messages
    # extents of the tensors that are packed along the cut dimension; ``(2,)`` or ``(3,)`` for that many of equal
    # extent; empty: not packed, or as the heads show
    parts: tuple[int, ...] = ()
    is_interleaved: bool = False


_STYLES = {
    "colwise": CutStyle.COLUMN,
    "rowwise": CutStyle.ROW,
    "colwise_rep": CutStyle.COLUMN_GATHERED,
    "colwise_gather_output": CutStyle.COLUMN_GATHERED,
    "rowwise_rep": CutStyle.ROW_SLICED,
    "rowwise_split_input": CutStyle.ROW_SLICED,
    "embedding_rowwise": CutStyle.VOCABULARY,
    "embedding_colwise": CutStyle.WIDTH,
    "replicated_with_grad_allreduce": CutStyle.SUMMED,
    "mla_kv_a_proj": CutStyle.LATENT,
    "packed_colwise": CutStyle.COLUMN,
    "packed_rowwise": CutStyle.ROW,
    "moe_tp_experts": CutStyle.EXPERTS,
    "moe_identity_expert": CutStyle.IDENTITY_EXPERT,
    "all_reduce": CutStyle.SUM_OUTPUT,
    "local_params": CutStyle.WHOLE,
    "replicate": CutStyle.WHOLE,
}
"""Styles of Transformers' plans (5.23 and before)."""


def of_user(model: nn.Module, section: TensorParallel, used_elsewhere: Collection[int] = ()) -> dict[str, CutRule]:
    """Returns the rules from ``partition_config``, completed by ``preset_model``; empty where neither is set.

    Some ``layer_specs`` need not fit this rank's model: those ``used_elsewhere``, by other stages (:func:`used_specs`).

    Raises:
        DeepSpeedConfigError: A pattern is no regular expression or fits nothing, or ``strict_mode`` finds a linear
            layer without a rule.
    """
    config = section.partition_config
    specs, own = _specs_of(section)
    if not specs:
        return {}
    kind = model_type_of(model)
    matches = _matches(model, specs, kind)
    used = {number for number in matches.values() if number is not None}
    found = {
        name: _of_spec(specs[number], name, "partition_config" if number < own else "preset_model")
        for name, number in matches.items()
        if number is not None
    }
    without = [name for name, number in matches.items() if number is None]
    _refuse_unused(specs[:own], used.union(used_elsewhere), kind)
    heads = config.lm_head_patterns if config is not None else []
    linear = [name for name in without if is_linear(model.get_submodule(name)) and name.rpartition(".")[2] not in heads]
    if config is not None and config.strict_mode and linear:
        raise DeepSpeedConfigError(
            f"tensor_parallel.partition_config.strict_mode: no pattern fits {', '.join(map(repr, linear[:5]))}"
            f"{f' and {len(linear) - 5} more' if len(linear) > 5 else ''}; add a layer_specs entry for each, with "
            'partition_type "skip" for what shall stay whole'
        )
    return found


def used_specs(model: nn.Module, section: TensorParallel) -> list[int]:
    """Returns the indices of ``partition_config.layer_specs`` entries that match a weight of this rank's model.

    Raises:
        DeepSpeedConfigError: A pattern is no regular expression.
    """
    specs, own = _specs_of(section)
    matches = _matches(model, specs, model_type_of(model))
    return sorted({number for number in matches.values() if number is not None and number < own})


def _specs_of(section: TensorParallel) -> tuple[list[LayerPartition], int]:
    """Returns the entries of ``partition_config`` and of ``preset_model``, and how many are the former."""
    config = section.partition_config
    specs = list(config.layer_specs) if config is not None else []
    own = len(specs)
    if section.preset_model is not None and (config is None or config.use_default_specs):
        specs += [LayerPartition(**spec) for spec in SPECS[section.preset_model]]
    return specs, own


def _matches(model: nn.Module, specs: Sequence[LayerPartition], kind: str | None) -> dict[str, int | None]:
    """Returns the number of the first entry that fits the weight of each module; None: none does."""
    return {
        name: next((n for n, spec in enumerate(specs) if _fits(spec, f"{name}.weight", kind)), None)
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        or isinstance(getattr(module, "base_layer", None), nn.Module)
    }


def of_plan(model: nn.Module) -> dict[str, CutRule]:
    """Returns the rules from the plan that a Transformers model brings; empty where it brings none.

    Raises:
        DeepSpeedConfigError: The plan has an unknown style.
    """
    found: dict[str, CutRule] = {}
    # A stand-in for a layer of another pipeline stage.
    empty = {name for name, module in model.named_modules() if isinstance(module, nn.Identity)}
    for place, plan in plans_in(model):
        prefix = re.escape(f"{place}." if place else "")
        if not cuts_blocks(model.get_submodule(place)):
            continue  # the plan cuts only the head, not the model
        patterns = [(key, re.compile(prefix + key.replace(".", r"\.").replace("*", r"[^.]+"))) for key in plan]
        for name in _names(model):
            key = next((key for key, pattern in patterns if pattern.fullmatch(name)), None)
            if key is None or (name in empty and plan[key] != "moe_identity_expert"):
                continue
            style = plan[key]
            if style not in _STYLES:
                raise DeepSpeedConfigError(
                    f"tensor_parallel.autotp_size: the plan of {type(model).__name__} has {key!r}: {style!r}, a style "
                    f"that is not known here; known are {', '.join(_STYLES)}. Write a layer_specs entry for "
                    f"{name!r} in tensor_parallel.partition_config"
                )
            above, _, own = name.rpartition(".")
            # Gate and up projections of stacked experts, one after the other: Inkling's plan calls them "colwise".
            is_packed = own == "gate_up_proj" and getattr(model.get_submodule(above), "is_concatenated", False) is True
            parts = (2,) if style.startswith("packed_") or is_packed else ()
            found[name] = CutRule(_STYLES[style], f"the model's plan ({key}: {style})", parts)
    for name in [name for name, rule in found.items() if rule.way is CutStyle.SUM_OUTPUT]:
        bare = model.get_submodule(name).named_parameters(recurse=False)
        if any(f"{name}.{key}" in found for key, _ in bare):  # bare weights do not sum the gradient of their input
            found[name] = replace(found[name], way=CutStyle.EXPERTS)
    columns = [name for name, rule in found.items() if rule.way in (CutStyle.COLUMN, CutStyle.COLUMN_GATHERED)]
    return {name: rule for name, rule in found.items() if not _takes_whole_input(model, name, rule, columns)}


def _takes_whole_input(model: nn.Module, name: str, rule: CutRule, columns: Sequence[str]) -> bool:
    """Returns whether a plan's row-parallel layer stands beside linear layers of which the plan cuts none.

    A pattern for full attention may fit the output layer of linear attention too, as both modules have one name
    (GLM-5).
    """
    above = name.rpartition(".")[0]
    if rule.way is not CutStyle.ROW or not above or any(column.startswith(f"{above}.") for column in columns):
        return False
    beside = model.get_submodule(above).named_modules()
    return any(is_linear(module) and f"{above}.{inner}" != name for inner, module in beside)


def _names(model: nn.Module) -> Iterator[str]:
    """Returns the names of modules, and of parameters that a plan may name (those of experts)."""
    for name, module in model.named_modules():
        if name:
            yield name
        for own, parameter in module.named_parameters(recurse=False):
            if own not in ("weight", "bias") and parameter is not None:
                yield f"{name}.{own}"


def is_linear(module: nn.Module) -> bool:
    """Returns whether a module is a linear layer, possibly inside an adapter."""
    inner = getattr(module, "base_layer", module)
    return isinstance(inner, nn.Linear) or is_transposed(inner)


def is_transposed(module: nn.Module) -> bool:
    """Returns whether a module is Transformers' ``Conv1D``, a linear layer with a weight of (in, out)."""
    return type(module).__name__ in ("Conv1D", "ColumnConv1D", "RowConv1D") and getattr(module, "nf", None) is not None


def _fits(spec: LayerPartition, name: str, kind: str | None) -> bool:
    if spec.model_types and kind not in spec.model_types:
        return False
    return any(_compiled(pattern).match(name) for pattern in spec.patterns)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise DeepSpeedConfigError(
            f"tensor_parallel.partition_config.layer_specs: {pattern!r} is no regular expression: {error}; correct it"
        ) from None


def _of_spec(spec: LayerPartition, name: str, source: str) -> CutRule:
    origin = f"{source} (one of {', '.join(map(repr, spec.patterns[:2]))})"
    if spec.partition_type == "skip":
        return CutRule(CutStyle.SUMMED if spec.grad_allreduce else CutStyle.WHOLE, origin)
    is_column = spec.partition_type == "column"
    dim = (0 if is_column else 1) if spec.partition_dim is None else spec.partition_dim
    if dim != (0 if is_column else 1):
        raise DeepSpeedConfigError(
            f"tensor_parallel.partition_config.layer_specs: partition_dim {dim} for {name!r}, which is "
            f"{spec.partition_type}-parallel; expected {0 if is_column else 1}, or leave the key out"
        )
    way = (CutStyle.COLUMN_GATHERED if spec.gather_output else CutStyle.COLUMN) if is_column else CutStyle.ROW
    return CutRule(way, origin, _parts(spec, dim))


def _parts(spec: LayerPartition, dim: int) -> tuple[int, ...]:
    """Returns the extents packed along the cut dimension, from the view that ``shape`` describes."""
    if spec.shape is None or dim >= len(spec.shape):
        return ()
    entry: Any = spec.shape[dim]
    if isinstance(entry, (list, tuple)):
        return tuple(int(extent) for extent in entry)
    return (int(entry),) if int(entry) > 1 else ()


def _refuse_unused(specs: list[LayerPartition], used: set[int], kind: str | None) -> None:
    for number, spec in enumerate(specs):
        if number not in used and (not spec.model_types or kind in spec.model_types):
            raise DeepSpeedConfigError(
                f"tensor_parallel.partition_config.layer_specs[{number}]: {', '.join(map(repr, spec.patterns))} fits "
                "no weight that an earlier entry has left; patterns are compared from the start with names such as "
                "'model.layers.0.self_attn.q_proj.weight'. Correct the pattern, or take the entry out"
            )


_ATTENTION_OF_LLAMA = [
    {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
]
_MLP_OF_LLAMA = [
    {"patterns": [r".*mlp\.(gate|up)_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
]

SPECS: dict[str, list[dict[str, Any]]] = {
    "llama": [*_ATTENTION_OF_LLAMA, *_MLP_OF_LLAMA],
    "qwen2": [*_ATTENTION_OF_LLAMA, *_MLP_OF_LLAMA],
    "bloom": [
        {"patterns": [r".*self_attention\.query_key_value\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attention\.dense\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
        {"patterns": [r".*mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ],
    "chatglm": [
        {"patterns": [r".*self_attention\.query_key_value\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attention\.dense\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.dense_h_to_4h\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ],
    "mixtral": [
        *_ATTENTION_OF_LLAMA,
        {"patterns": [r".*experts\.\d+\.w[13]\.weight$"], "partition_type": "column"},
        {"patterns": [r".*experts\.\d+\.w2\.weight$"], "partition_type": "row"},
    ],
    "deepseek_v2": [
        {"patterns": [r".*self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.(.*\.)?(gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*mlp\.(.*\.)?down_proj\.weight$"], "partition_type": "row"},
    ],
    "phi3": [
        {"patterns": [r".*self_attn\.qkv_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
    ],
}
"""As entries of ``tensor_parallel.partition_config.layer_specs``, by name."""
