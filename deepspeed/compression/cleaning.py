""":func:`redundancy_clean`: makes rounding and masks of a compressed model permanent, which makes it smaller."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.compression.basic_layer import INPUT, BNLayer_Compress
from deepspeed.compression.packing import WIDEST, Packed, QuantizationLevels
from deepspeed.compression.report import compressed_layers
from deepspeed.compression.settings import is_on, kind_of_class, section_of
from deepspeed.compression.sizes import is_beside
from deepspeed.compression.snip import SCORES as SNIP_SCORES
from deepspeed.compression.techniques import Kind, Techniques
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.address import address_of


@dataclass
class CompressionReport:
    """Reports how compression changed a model; the model's ``compression_report``."""

    bytes_before: int  # bytes of all parameters and buffers before compression
    bytes_after: int = 0  # bytes of all parameters and buffers now
    lines: dict[str, str] = field(default_factory=dict)  # a description of each compressed layer, by its name

    def line(self) -> str:
        """Returns the report in one line."""
        ratio = self.bytes_after / self.bytes_before if self.bytes_before else 1.0
        return (
            f"compression: {len(self.lines)} layers are final: {self.bytes_before / 1e6:,.2f} -> "
            f"{self.bytes_after / 1e6:,.2f} MB ({ratio:.2f})"
        )


class _RemovalEntry(NamedTuple):
    name: str
    kind: Kind
    keep: torch.Tensor
    heads: int | None
    related: list[str]


@torch.no_grad()
def redundancy_clean(model: Any, deepspeed_config: Any, mpu: Any = None, *, packed: bool = True) -> nn.Module:
    """Makes rounding and masks permanent, removes pruned parts and stores rounded weights as codes.

    The result computes what the compressed model computes once all its techniques are active with their final bits.
    Pruned parts are removed if ``related_modules`` names the layers before or after them; weights of at most 8 bits
    become codes, which cannot be trained. Where only ``layer_reduction`` is on, nothing changes. Logs the size before
    and after; the returned model has it as ``compression_report`` (:class:`CompressionReport`). At ZeRO stage 3 every
    rank must call it.

    Args:
        model: The model after ``init_compression`` and training, changed in place; or its engine, which cannot train
            afterwards.
        packed: Store rounded weights as codes; False keeps them as floating-point numbers.

    Raises:
        CallOrderError: The model is not compressed, or it is sharded (stage 3) and the engine was not given.
        DeepSpeedConfigError: ``mpu`` is given, or the configuration differs from the one of ``init_compression``.
    """
    if mpu is not None:
        raise DeepSpeedConfigError(
            "redundancy_clean(mpu=...): tensor-parallel layers cannot be compressed; leave mpu out"
        )
    engine: Any = None
    if hasattr(model, "compression_scheduler") and isinstance(getattr(model, "module", None), nn.Module):
        engine, model = model, model.module
    _refuse(model, section_of(deepspeed_config), has_engine=engine is not None)
    ends_training = is_sharded(model)
    own_parameters(model)
    if ends_training:
        engine.destroy()  # otherwise its hooks would gather the replaced parameters
    names = {id(module): name for name, module in model.named_modules()}
    layers = [(names[id(module)], module, techniques) for module, techniques in compressed_layers(model)]
    report = CompressionReport(_plain_bytes(model, layers))
    kinds = {name: str(kind_of_class(techniques.original_class)) for name, _, techniques in layers}
    levels: dict[str, QuantizationLevels | None] = {}
    removals: list[_RemovalEntry] = []
    baked: dict[int, nn.Parameter] = {}
    for name, module, techniques in layers:
        for kind, related in techniques.related.items():
            if related:
                keep = techniques.mask(module, kind).flatten().nonzero().flatten()
                removals.append(_RemovalEntry(name, kind, keep, techniques.prunings[kind].heads, related))
        levels[name] = _bake(module, techniques, baked)
    for module in model.modules():
        if isinstance(module, BNLayer_Compress):
            module.__class__ = nn.BatchNorm2d  # type: ignore[assignment]
            del module.__dict__["followed"]
    remover = LayerPruner(model, kinds, levels)
    for each in removals:
        if each.heads is None:
            remover.rows(each.name, each.keep, each.related)
        else:
            remover.heads(each.name, each.keep, each.heads, each.related)
    stored = _pack(model, kinds, levels) if packed else dict.fromkeys(kinds, "packed=False")
    for name, _, techniques in layers:
        module = model.get_submodule(name)
        quantizer: Any = getattr(module, INPUT, None)
        if quantizer is not None:  # its class, which rounded the input, is the original one again
            quantizer.is_acting = True
            module.register_forward_pre_hook(_round_input, with_kwargs=True)
        report.lines[name] = _line(module, techniques, stored[name])
    report.bytes_after = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    model.__dict__.pop("compression_section", None)
    model.__dict__["compression_report"] = report
    for name, line in report.lines.items():
        log_dist(f"compression: {name}: {line}")
    log_dist(report.line())
    return model


def _refuse(model: nn.Module, section: Any, *, has_engine: bool) -> None:
    # Where only layer_reduction is on, there are no such layers, and nothing to clean.
    if is_on(section) and next(compressed_layers(model), None) is None:
        raise CallOrderError(
            "redundancy_clean: expected a model with compressed layers, found none; before this, call init_compression "
            "and train, or load trained weights"
        )
    if is_sharded(model) and not has_engine:
        raise CallOrderError(
            "redundancy_clean(model): expected the engine, as ZeRO stage 3 shards the parameters; found its module. "
            "Call redundancy_clean(engine, config) on every rank"
        )
    if section != model.__dict__.get("compression_section", section):
        raise DeepSpeedConfigError(
            "redundancy_clean: expected the section compression_training that init_compression was given, found a "
            "different one; pass the same"
        )


def _plain_bytes(model: nn.Module, layers: list[tuple[str, nn.Module, Techniques]]) -> int:
    added = set()
    for _, module, techniques in layers:
        own = {name for pruning in techniques.prunings.values() for name in (pruning.buffer, pruning.scores)}
        added |= {id(value) for name, value in (*module._parameters.items(), *module._buffers.items()) if name in own}
        for extra in (INPUT, SNIP_SCORES):
            added |= {id(value) for value in (getattr(module, extra, None) or nn.Module()).buffers()}
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()) if id(each) not in added)


def _bake(module: Any, techniques: Techniques, baked: dict[int, nn.Parameter]) -> QuantizationLevels | None:
    """Sets a layer's final weight and restores its class; returns the levels of the weight, None if it has none."""
    techniques.at_the_end()
    if techniques.rounding is not None:
        techniques.rounding = replace(techniques.rounding, stochastic=False)
    original = module.weight
    final, bias = techniques.effective(module)
    levels = None
    if techniques.rounding is not None and techniques.width is not None:
        whole = original.t() if techniques.is_transposed else original
        rounded = techniques.rounding.round(whole, techniques.width.bits)
        shape = (len(whole), whole[0].numel())
        levels = QuantizationLevels.of(rounded, techniques.width.bits, shape, techniques.rounding.symmetric)
    if id(original) not in baked:
        final = final.t() if techniques.is_transposed else final
        baked[id(original)] = nn.Parameter(final.detach().clone().contiguous(), original.requires_grad)
    module.weight = baked[id(original)]
    if bias is not None and bias is not module.bias:
        module.bias = nn.Parameter(bias.detach().clone(), module.bias.requires_grad)
    for pruning in techniques.prunings.values():
        module._buffers.pop(pruning.buffer, None)
        module._parameters.pop(pruning.scores, None)
        module._modules.pop(SNIP_SCORES, None)
    module.__class__ = techniques.original_class
    del module.__dict__["compression"]
    return levels


def _pack(
    model: nn.Module, kinds: dict[str, str], levels: dict[str, QuantizationLevels | None]
) -> dict[str, int | str]:
    """Stores rounded weights as codes; returns by layer the bits, or why the weight is not stored as codes."""
    users: dict[int, list[str]] = defaultdict(list)
    for name in kinds:
        users[id(model.get_submodule(name).weight)].append(name)
    stored: dict[str, int | str] = {}
    for names in users.values():
        first: Any = model.get_submodule(names[0])
        packed, why = _packed(first, kinds[names[0]], levels[names[0]], [kinds[name] for name in names])
        for name in names:
            stored[name] = why if name else "the layer is the model itself, which cannot be replaced"
            if not name or packed is None or packed.format is None:
                continue
            old: Any = model.get_submodule(name)
            new = packed.layer(old, kinds[name]).train(old.training)
            if (quantizer := getattr(old, INPUT, None)) is not None:
                new.add_module(INPUT, quantizer)
            _replace(model, old, new)
            stored[name] = packed.format.bits
    return stored


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces a submodule under every name that it has: several parents may share it."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new


def _packed(layer: Any, kind: str, levels: QuantizationLevels | None, users: list[str]) -> tuple[Packed | None, str]:
    if levels is None:
        return None, "its quantization groups do not align with its rows"
    if levels.bits > WIDEST:
        return None, f"codes have at most {WIDEST} bits"
    if getattr(layer, "max_norm", None) is not None:
        return None, "max_norm changes its rows when they are looked up"
    weight = layer.weight.t() if kind == "conv1d" else layer.weight.flatten(1)
    return Packed(weight, levels, by_rows="embedding" in users), "its masked values are not among the codes"


def _round_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    quantizer: Any = getattr(module, INPUT)
    if args:
        return (quantizer(args[0]), *args[1:]), kwargs
    (value,) = kwargs.values()  # these layers have one argument; a packed one names it differently
    return (quantizer(value),), {}


def _line(module: Any, techniques: Techniques, stored: int | str) -> str:
    weight = module.weight
    zeros = float((weight == 0).float().mean())
    parts = [f"{' x '.join(map(str, weight.shape))}"]
    if techniques.width is not None:
        bits = techniques.width.bits
        where = f"stored as floats ({stored})" if isinstance(stored, str) else f"stored in {stored}"
        parts.append(f"{bits} bits, {where}")
    if (quantizer := getattr(module, INPUT, None)) is not None:
        parts.append(f"input in {quantizer.bits} bits")
    if techniques.prunings:
        parts.append(f"pruned ({', '.join(techniques.prunings)}), {zeros:.3f} of the remaining weights are zero")
    return ", ".join(parts)


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "n_kv_heads")
_WIDTHS = ("all_head_size", "split_size")


class LayerPruner:
    """Removes outputs and inputs of layers, and updates the levels of their rounded weights accordingly.

    Args:
        levels: Levels of the rounded weights, by the layer's name; changed in place; None if a removal breaks groups.
    """

    def __init__(self, model: nn.Module, kinds: dict[str, str], levels: dict[str, QuantizationLevels | None]) -> None:
        self._model, self._kinds, self._levels = model, kinds, levels

    def rows(self, name: str, keep: torch.Tensor, related: Iterable[str]) -> None:
        """Removes all outputs of ``name`` but ``keep`` (1-D indices).

        A related layer loses the inputs that come from these outputs; a batch norm, or the other half of a gated layer
        (``is_beside``), loses the same outputs.
        """
        total = self._outputs(name)
        self._cut(name, rows=keep)
        for other in related:
            if isinstance(self._model.get_submodule(other), nn.BatchNorm2d):
                module: Any = self._model.get_submodule(other)
                for each in ("weight", "bias"):
                    if (value := getattr(module, each)) is not None:
                        setattr(module, each, nn.Parameter(value.detach()[keep], value.requires_grad))
                for each in ("running_mean", "running_var"):
                    if (value := getattr(module, each)) is not None:
                        setattr(module, each, value[keep])
                module.num_features = len(keep)
                continue
            if is_beside(total, self._model.get_submodule(other)):
                self._cut(other, rows=keep)
                continue
            inputs = self._inputs(other)
            self._cut(other, columns=_blocks(keep, inputs // total))  # a flattened channel feeds a block

    def heads(self, name: str, keep: torch.Tensor, heads: int, related: Iterable[str]) -> None:
        """Removes all heads but ``keep`` (1-D indices): inputs of ``name`` and outputs of each related layer.

        A fused layer (such as QKV) has outputs of each head several times.
        """
        width = self._inputs(name)
        inputs = _blocks(keep, width // heads)
        self._cut(name, columns=inputs)
        touched = {name}
        for other in related:
            outputs = self._outputs(other)
            times = torch.arange(outputs // width, device=inputs.device) * width
            self._cut(other, rows=(inputs + times[:, None]).flatten())
            touched.add(other)
        # Parent modules store numbers and widths of heads as attributes.
        for parent in sorted({name.rpartition(".")[0] for name in touched}):
            module = self._model.get_submodule(parent)
            for attributes, values in ((_HEADS, {heads: len(keep)}), (_WIDTHS, {width: len(inputs)})):
                for attribute in attributes:
                    old = module.__dict__.get(attribute)
                    if isinstance(old, int) and old in values and values[old] != old:
                        setattr(module, attribute, values[old])
                        log_dist(f"compression: {parent}.{attribute} is {values[old]} now, not {old}")

    # -- one layer ---------------------------------------------------------------------------------------------------

    def _is_transposed(self, name: str) -> bool:
        module: Any = self._model.get_submodule(name)
        return self._kinds.get(name) == "conv1d" or type(module).__name__ == "Conv1D"

    def _outputs(self, name: str) -> int:
        module: Any = self._model.get_submodule(name)
        shape = module.weight.shape
        return int(shape[1] if self._is_transposed(name) else shape[0])

    def _inputs(self, name: str) -> int:
        module: Any = self._model.get_submodule(name)
        shape = module.weight.shape
        return int(shape[0] if self._is_transposed(name) else shape[1])

    def _cut(self, name: str, *, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        module: Any = self._model.get_submodule(name)
        weight = module.weight.t() if self._is_transposed(name) else module.weight
        for dim, index in ((0, rows), (1, columns)):
            if index is not None:
                weight = weight.index_select(dim, index)
        if rows is not None and module.bias is not None:
            module.bias = nn.Parameter(module.bias.detach()[rows], module.bias.requires_grad)
        final = weight.detach().t() if self._is_transposed(name) else weight.detach()
        module.weight = nn.Parameter(final.contiguous(), module.weight.requires_grad)
        for names, size in (
            (("out_features", "nf", "out_channels"), weight.shape[0]),
            (("in_features", "nx", "in_channels"), weight.shape[1]),
        ):
            for attribute in names:
                if attribute in module.__dict__:
                    setattr(module, attribute, int(size))
        levels = self._levels.get(name)
        if levels is not None:
            self._levels[name] = levels.kept(rows, columns)


def _blocks(index: torch.Tensor, length: int) -> torch.Tensor:
    """Returns the column indices of the blocks in ``index`` (1-D), where a block has ``length`` columns."""
    return (index[:, None] * length + torch.arange(length, device=index.device)).flatten()


_OF_ENGINES = ("ds_", "_ds_")  # prefixes of the attributes that engines set on parameters


def is_sharded(model: nn.Module) -> bool:
    """Returns whether an engine partitions parameters of ``model`` (ZeRO stage 3), persistent ones included."""
    found = (address_of(parameter) for parameter in model.parameters())
    return any(address is not None and address.bucket.is_partitioned for address in found)


@torch.no_grad()
def own_parameters(model: nn.Module) -> None:
    """Replaces every parameter that is sharded, or a view of a larger storage, by a copy with storage of its own.

    ``torch.save`` writes whole storages, and an engine's parameters are views of buckets. Tied parameters stay tied. A
    parameter that belongs to no engine and fills its storage stays the same object. Copies keep the attributes of the
    original parameters, except those that engines set. Gathers one module at a time; if parameters are sharded, every
    rank of the engine must call it.

    Args:
        model: Changed in place. Its engine keeps the original parameters, so it cannot train the model any more.
    """
    copies: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # holds the original too, so that its id is not reused
    for module in model.modules():
        held = {name: p for name, p in module._parameters.items() if p is not None and not _owns_its_storage(p)}
        with GatheredParameters([parameter for parameter in held.values() if id(parameter) not in copies]):
            for name, parameter in held.items():
                if id(parameter) not in copies:
                    copy = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    marks = {key: mark for key, mark in vars(parameter).items() if not key.startswith(_OF_ENGINES)}
                    vars(copy).update(marks)
                    copies[id(parameter)] = (copy, parameter)
                module._parameters[name] = copies[id(parameter)][0]


def _owns_its_storage(parameter: nn.Parameter) -> bool:
    if address_of(parameter) is not None:
        return False
    return parameter.is_meta or parameter.untyped_storage().nbytes() == parameter.nbytes
