"""Computes from rules the intervals of each parameter that each rank gets. Uses names and shapes only.

Nothing here touches values, devices or processes, so the planner can use the same functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention_modules import AttentionHeads, attention_of
from deepspeed.parallel.tensor.rules import CutRule, CutStyle, is_linear, is_transposed
from deepspeed.parallel.tensor.split import Heads, Split, UnitAssignment, UnitRun
from deepspeed.zero.address import full_shape

_COLUMNS = (CutStyle.COLUMN, CutStyle.COLUMN_GATHERED)
_ROWS = (CutStyle.ROW, CutStyle.ROW_SLICED)
# What enters and leaves such layers is whole, so that each may stay whole without the others.
_WHOLE_OUTSIDE = (CutStyle.VOCABULARY, CutStyle.WIDTH, CutStyle.COLUMN_GATHERED, CutStyle.ROW_SLICED)
_INTERLEAVED = ("bloom", "gptneox", "falcon", "persimmon", "chatglm")
"""Classes whose packed weight has query, key and value of one head side by side; others have all queries first."""

_PLAIN = ("FalconLinear",)
"""Classes derived from ``nn.Linear`` whose forward computes the same in another way."""

_EXPERTS_GRAINS = (8, 4)
"""Features of experts that stay together, the larger first: grouped products need strides of 16 bytes."""


@dataclass(frozen=True)
class ParameterCut:
    """The cut of one parameter."""

    name: str  # qualified name
    shape: tuple[int, ...]  # shape of the whole tensor
    dim: int  # the dimension that is cut
    split: Split  # how it is divided


@dataclass(frozen=True)
class LayerCut:
    """The cut of one module."""

    name: str  # qualified name
    way: CutStyle
    split: Split | None = None  # how the dimension is split; None where none is cut
    parameters: tuple[ParameterCut, ...] = ()
    adapters: tuple[tuple[str, CutStyle], ...] = ()  # adapter layers beside it, and how each is cut
    note: str = ""  # why it differs from the rule, or empty


@dataclass
class Layout:
    """The cut of a model."""

    size: int  # ranks that share a layer
    layers: list[LayerCut] = field(default_factory=list)  # in the order of the model
    # by name of each attention module whose heads are divided: its original numbers of heads
    heads: dict[str, tuple[AttentionHeads, Heads]] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, ParameterCut]:
        """The cut parameters by name; a tied parameter appears under each of its names."""
        return {cut.name: cut for layer in self.layers for cut in layer.parameters}


def layout_of(model: nn.Module, rules: Mapping[str, CutRule], size: int, *, grain: int = 1) -> Layout:
    """Computes every cut. Communicates nothing and changes nothing; the model may be on the meta device, or sharded.

    Args:
        rules: The rules, by name of module or parameter.
        size: Ranks that share a layer.
        grain: Output features of a linear layer outside attention that stay together.

    Raises:
        DeepSpeedConfigError: A layer cannot be cut into this many parts. The message names the layer and the fix.
    """
    return _Builder(model, rules, size, grain).build()


class _Builder:
    def __init__(self, model: nn.Module, rules: Mapping[str, CutRule], size: int, grain: int) -> None:
        self.model = model
        self.rules = rules
        self.size = size
        self.grain = grain
        self.config = getattr(model, "config", None)
        self.modules = dict(model.named_modules())
        self.attention: dict[str, AttentionHeads | None] = {}
        self.given: list[tuple[str, Split]] = []  # block and split of each column-parallel layer's output
        self.layout = Layout(size)

    def build(self) -> Layout:
        rows = []
        for name, rule in self.rules.items():
            if name not in self.modules:
                self.layout.layers.append(self._bare_parameter(name, rule))
            elif rule.way in _ROWS:
                rows.append(len(self.layout.layers))
                self.layout.layers.append(LayerCut(name, rule.way))
            else:
                self.layout.layers.append(self._module(name, rule))
        for number in rows:  # after the outputs of column-parallel layers are known
            self.layout.layers[number] = self._row(self.layout.layers[number].name)
        while self._agree_on_tied():
            pass
        for layer in self.layout.layers:
            if layer.split is not None and layer.split.shares_a_part() and layer.parameters:
                heads = layer.split.heads
                assert heads is not None
                raise self._packs_too_few(layer.name, heads.query, heads.key_value)
        return self.layout

    # -- kinds of modules ----------------------------------------------------------------------------------------------

    def _module(self, name: str, rule: CutRule) -> LayerCut:
        module = self.modules[name]
        if rule.way in _COLUMNS:
            return self._column(name, rule)
        if rule.way in (CutStyle.VOCABULARY, CutStyle.WIDTH):
            return self._embedding(name, rule, module)
        if rule.way is not CutStyle.PER_HEAD:
            return LayerCut(name, rule.way)
        found = self._attention_above(name)
        shape = full_shape(module.weight)  # type: ignore[arg-type]
        if found is None or shape[1] != found[1].query:
            raise self._error(name, f"has {shape[1]} columns, which are not those of the heads of a module above it")
        split = self._of_heads(found, UnitAssignment.AS_QUERIES, 1)
        return LayerCut(name, rule.way, split, (ParameterCut(f"{name}.weight", shape, 1, split),))

    def _column(self, name: str, rule: CutRule) -> LayerCut:
        weight, dim = self._weight_of(name, rule)
        split = self._split_of_outputs(name, weight.shape[dim], rule)
        self._check_width(name, split, "output features")
        if rule.way is CutStyle.COLUMN:
            self.given.append((block_of(name), _result(split)))
        return self._linear(name, rule, split, dim, cuts_bias=True)

    def _row(self, name: str) -> LayerCut:
        rule = self.rules[name]
        weight, out = self._weight_of(name, rule)
        split = self._split_of_inputs(name, weight.shape[1 - out], rule)
        self._check_width(name, split, "input features")
        return self._linear(name, rule, split, 1 - out, cuts_bias=False)

    def _linear(self, name: str, rule: CutRule, split: Split, dim: int, *, cuts_bias: bool) -> LayerCut:
        module = self.modules[name]
        inner, prefix = (module.base_layer, f"{name}.base_layer") if hasattr(module, "base_layer") else (module, name)
        cuts = [ParameterCut(f"{prefix}.weight", full_shape(inner.weight), dim, split)]  # type: ignore[arg-type]
        if cuts_bias and getattr(inner, "bias", None) is not None:
            cuts.append(ParameterCut(f"{prefix}.bias", full_shape(inner.bias), 0, split))  # type: ignore[arg-type]
        adapters = []
        if inner is not module:
            wanted, way = ("lora_B", CutStyle.COLUMN) if rule.way in _COLUMNS else ("lora_A", CutStyle.ROW)
            if not hasattr(module, "lora_A") or getattr(module, "lora_magnitude_vector", None):
                wrapped = f"is wrapped in a {type(module).__name__}; only plain LoRA adapters are cut with it"
                raise self._error(name, wrapped)
            for key, adapter in getattr(module, wanted, {}).items():
                full = f"{name}.{wanted}.{key}"
                adapters.append((full, way))
                at = 0 if way is CutStyle.COLUMN else 1
                cuts.append(ParameterCut(f"{full}.weight", full_shape(adapter.weight), at, split))
        return LayerCut(prefix, rule.way, split, tuple(cuts), tuple(adapters))

    def _embedding(self, name: str, rule: CutRule, module: nn.Module) -> LayerCut:
        if type(module) is not nn.Embedding:
            return LayerCut(name, CutStyle.WHOLE, note=f"a {type(module).__name__} has a forward of its own")
        if module.max_norm is not None or module.sparse or module.scale_grad_by_freq:
            return LayerCut(name, CutStyle.WHOLE, note="max_norm, sparse and scale_grad_by_freq need all rows")
        dim = 0 if rule.way is CutStyle.VOCABULARY else 1
        shape = full_shape(module.weight)
        split = Split.evenly(shape[dim], self.size)
        self._check_width(name, split, "rows" if dim == 0 else "columns")
        return LayerCut(name, rule.way, split, (ParameterCut(f"{name}.weight", shape, dim, split),))

    def _bare_parameter(self, name: str, rule: CutRule) -> LayerCut:
        """Returns the cut of a parameter outside linear layers: stacked expert weights, one number per head."""
        shape = full_shape(self.model.get_parameter(name))
        if rule.way not in (*_COLUMNS, *_ROWS):
            return LayerCut(name, rule.way)
        dim = max(len(shape) - (2 if rule.way in _COLUMNS else 1), 0)
        found = self._attention_above(name)
        if found is not None and shape[dim] % found[1].query == 0 and not rule.parts:
            split = self._of_heads(found, UnitAssignment.AS_QUERIES, shape[dim] // found[1].query)
        else:
            each = shape[dim] // _count(rule)
            grain = next((n for n in _EXPERTS_GRAINS if each % n == 0 and each >= self.size * n), 1)
            split = Split.evenly(shape[dim], self.size, grain, _count(rule))
        self._check_width(name, split, f"indices of dimension {dim}")
        return LayerCut(name, rule.way, split, (ParameterCut(name, shape, dim, split),))

    # -- splits --------------------------------------------------------------------------------------------------------

    def _split_of_outputs(self, name: str, extent: int, rule: CutRule) -> Split:
        found = self._attention_above(name)
        if found is not None and rule.way is CutStyle.COLUMN:
            split = self._split_by_heads(name, extent, rule, found)
            if split is not None:
                return split
        if len(rule.parts) > 1:
            if sum(rule.parts) != extent:
                raise self._error(name, f"has {extent} output features, but shape names parts of {list(rule.parts)}")
            starts = [sum(rule.parts[:number]) for number in range(len(rule.parts))]
            return Split(tuple(UnitRun(at, part) for at, part in zip(starts, rule.parts, strict=True)), self.size)
        if extent % _count(rule):
            raise self._error(name, f"has {extent} output features, which are no {_count(rule)} equal parts")
        return Split.evenly(extent, self.size, self.grain, _count(rule))

    def _split_by_heads(self, name: str, extent: int, rule: CutRule, found: tuple[str, AttentionHeads]) -> Split | None:
        _, attention = found
        query, keys, width = attention.query, attention.key_value, attention.width
        if not width and keys == query and extent % query == 0:
            width = extent // query
        whole, of_keys = query * width, keys * width
        packed = whole + 2 * of_keys
        is_packed = width and extent == packed and not self._has_keys_apart(name, attention, of_keys)
        above = type(self.modules[name.rpartition(".")[0]]).__name__.lower()
        is_interleaved = rule.is_interleaved or above.startswith(_INTERLEAVED)
        if is_packed and (len(rule.parts) > 1 or rule.parts == (3,) or not is_interleaved):
            runs = (
                UnitRun(0, query, width, UnitAssignment.AS_QUERIES),
                UnitRun(whole, keys, width, UnitAssignment.AS_KEYS),
                UnitRun(whole + of_keys, keys, width, UnitAssignment.AS_KEYS),
            )
            return self._of_runs(found, runs)
        if is_packed and keys < query:  # by groups: the queries of a key/value head, key, value
            if keys < self.size:
                raise self._packs_too_few(name, query, keys)
            return self._of_heads(found, UnitAssignment.AS_KEYS, packed // keys, keys)
        if keys < query and extent == of_keys:
            return self._of_heads(found, UnitAssignment.AS_KEYS, width, keys)
        if extent % query == 0:
            return self._of_heads(found, UnitAssignment.AS_QUERIES, extent // query)
        return None

    def _has_keys_apart(self, name: str, attention: AttentionHeads, of_keys: int) -> bool:
        """Returns whether keys and values come from other layers of the same attention module.

        Then a layer as wide as query, key and value together has query and gate of each head (Qwen3-Next). In a module
        with as many key/value heads as query heads, the others may be one (latent attention); a gate for packed
        queries, keys and values is half as wide.
        """
        above = name.rpartition(".")[0]
        others = []
        for other, rule in self.rules.items():
            if other != name and other in self.modules and other.rpartition(".")[0] == above and rule.way in _COLUMNS:
                weight, dim = self._weight_of(other, rule)
                others.append(weight.shape[dim])
        return sum(others) >= 2 * of_keys if attention.key_value == attention.query else others.count(of_keys) >= 2

    def _split_of_inputs(self, name: str, extent: int, rule: CutRule) -> Split:
        if rule.way is CutStyle.ROW_SLICED:
            return Split.evenly(extent, self.size)
        block = block_of(name)
        fitting = [split for where, split in self.given if where == block and split.extent == extent]
        if fitting:
            return fitting[-1] if self._attention_above(name) is None else fitting[0]
        found = self._attention_above(name)
        if found is not None and extent % found[1].query == 0:
            return self._of_heads(found, UnitAssignment.AS_QUERIES, extent // found[1].query)
        if any(where.startswith(f"{block}.") for where, _ in self.given) or not self.given:
            return Split.evenly(extent, self.size, parts=_count(rule))
        what = f"is row-parallel and takes {extent} input features, but no column-parallel layer of {block!r}"
        raise self._error(name, f"{what} gives so many")

    def _attention_above(self, name: str) -> tuple[str, AttentionHeads] | None:
        above, _, _ = name.rpartition(".")
        if above not in self.attention:
            self.attention[above] = attention_of(self.modules[above], self.config) if above in self.modules else None
        attention = self.attention[above]
        return None if attention is None else (above, attention)

    def _of_heads(
        self, found: tuple[str, AttentionHeads], assignment: UnitAssignment, unit: int, units: int | None = None
    ) -> Split:
        return self._of_runs(found, (UnitRun(0, found[1].query if units is None else units, unit, assignment),))

    def _of_runs(self, found: tuple[str, AttentionHeads], runs: tuple[UnitRun, ...]) -> Split:
        name, attention = found
        heads = Heads(attention.query, attention.key_value, self.size)
        problem = heads.problem()
        if problem is not None:
            raise self._error(name, f"cannot be cut: {problem}")
        self.layout.heads[name] = attention, heads
        return Split(runs, self.size, heads)

    # -- checks --------------------------------------------------------------------------------------------------------

    def _weight_of(self, name: str, rule: CutRule) -> tuple[_ShapeAttributes, int]:
        """Returns the weight of a linear layer, and its dimension of output features."""
        module = self.modules[name]
        inner: nn.Module = getattr(module, "base_layer", module)  # type: ignore[assignment]
        weight = getattr(inner, "weight", None)
        if not is_linear(module) or not isinstance(weight, torch.Tensor) or len(full_shape(weight)) != 2:
            raise self._error(name, f"is a {type(inner).__name__}, which cannot be cut by {rule.source}")
        plain = type(inner).forward is nn.Linear.forward or type(inner).__name__ in _PLAIN or is_transposed(inner)
        if not plain:
            raise self._error(name, f"is a {type(inner).__name__} with a forward of its own")
        return _ShapeAttributes(full_shape(weight)), 1 if is_transposed(inner) else 0

    def _check_width(self, name: str, split: Split, what: str) -> None:
        if without := len(split.ranks_without_units()):
            problem = f"has {split.extent} {what}, of which {without} of {self.size} ranks would get none"
            raise self._error(name, problem)

    def _error(self, name: str, problem: str) -> DeepSpeedConfigError:
        origin = self.rules[name].source if name in self.rules else "the model's heads"
        return DeepSpeedConfigError(
            f"tensor_parallel.autotp_size {self.size}: {name!r} {problem} (from {origin}). Choose another "
            f"autotp_size, or leave the layer whole: tensor_parallel.partition_config.layer_specs with the pattern "
            f'{".*" + re.escape(name.rpartition(".")[2])!r} and partition_type "skip", for it and the layers that it '
            "works with"
        )

    def _agree_on_tied(self) -> bool:
        """Cuts layers that share a weight alike, or leaves them whole; returns whether any layer was changed."""
        users: dict[int, list[int]] = {}
        by_name = dict(self.model.named_parameters(remove_duplicate=False))
        for number, layer in enumerate(self.layout.layers):
            for cut in layer.parameters:
                users.setdefault(id(by_name[cut.name]), []).append(number)
        names: dict[int, list[str]] = {}
        for name, parameter in by_name.items():
            names.setdefault(id(parameter), []).append(name)
        for key, numbers in users.items():
            of_layers = [cut for number in numbers for cut in self.layout.layers[number].parameters]
            cuts = [cut for cut in of_layers if id(by_name[cut.name]) == key]
            ranks = range(self.size)
            alike = len({(cut.dim, *(tuple(cut.split.intervals(rank)) for rank in ranks)) for cut in cuts}) == 1
            if len(names[key]) == 1 or (len(cuts) == len(names[key]) and alike):
                continue
            others = sorted(set(names[key]) - {cut.name for cut in cuts})
            for number in numbers:
                layer = self.layout.layers[number]
                if layer.way not in _WHOLE_OUTSIDE:
                    shared = f"has a weight that it shares with {', '.join(map(repr, names[key]))}"
                    raise self._error(layer.name, shared)
                why = f"its weight is that of {others[0]!r}, which stays whole" if others else "its weight is tied"
                self.layout.layers[number] = replace(layer, way=CutStyle.WHOLE, split=None, parameters=(), note=why)
            return True
        return False

    def _packs_too_few(self, name: str, query: int, key_value: int) -> DeepSpeedConfigError:
        packed = f"packs {query} query heads with {key_value} key/value heads"
        return self._error(name, f"{packed}, fewer than the {self.size} ranks, so that ranks would share a part of it")


@dataclass(frozen=True)
class _ShapeAttributes:
    shape: tuple[int, ...]


def _count(rule: CutRule) -> int:
    return rule.parts[0] if len(rule.parts) == 1 else 1


def _result(split: Split) -> Split:
    """Returns how a column-parallel layer's output is divided after its packed parts have been joined."""
    first = split.runs[0]
    are_of_heads = split.heads is not None and len(split.runs) > 1
    are_equal = len({(run.units, run.unit, run.assignment) for run in split.runs}) == 1
    return Split((first,), split.size, split.heads) if are_of_heads or are_equal else split


def block_of(name: str) -> str:
    """Returns the name of the repeated block around a module: its name up to the last number, or its parent's name."""
    found = re.match(r"(.*\.\d+)\.", name)
    return found.group(1) if found else name.rpartition(".")[0]


def describe(layout: Layout) -> str:
    """Returns a table of what is cut, a line per kind of layer."""
    rows: dict[tuple[str, str, str], int] = {}
    for layer in layout.layers:
        if layer.way is CutStyle.WHOLE and not layer.note:
            continue
        shape = " x ".join(map(str, layer.parameters[0].shape)) if layer.parameters else ""
        names = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer.name)
        row = names, shape, f"{layer.way.value} ({layer.note})" if layer.note else layer.way.value
        rows[row] = rows.get(row, 0) + 1
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(2)]
    return "\n".join(
        f"  {names:<{widths[0]}}  {shape:>{widths[1]}}  {way}, {count} layer(s)"
        for (names, shape, way), count in rows.items()
    )
