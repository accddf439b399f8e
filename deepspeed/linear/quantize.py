"""Replaces the linear layers of a model by ones with weights of 8 or 4 bits, and reports the bytes saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import cast

import torch
from rich.table import Table
from torch import nn

from deepspeed.comm.transports.differentiable import gather_from, scatter_to
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.linear.config import QuantizationConfig
from deepspeed.linear.quantized_linear import QuantizedLinear
from deepspeed.linear.sharded import gather_for_packing
from deepspeed.models.layers import is_conv1d
from deepspeed.ops.packed_linear import packed_format
from deepspeed.parallel.tensor.linear import ColumnLinear, CutLinear, RowLinear
from deepspeed.parallel.tensor.rules import is_transposed
from deepspeed.zero.address import address_of, full_shape


@dataclass(frozen=True)
class QuantizedLayer:
    """Reports the quantization of one layer."""

    name: str  # its name in the model
    bytes_before: int  # bytes of its weight
    bytes_after: int  # bytes of codes and scales
    error: float  # norm of the quantization error divided by the norm of the weight; NaN for a weight on meta


@dataclass
class QuantizationReport:
    """Reports the quantization of a model."""

    bits: int  # width of the weights
    layers: list[QuantizedLayer] = field(default_factory=list)  # the layers that were replaced
    # linear layers that were not replaced, by name, each with the reason
    kept: dict[str, str] = field(default_factory=dict)
    bytes_before: int = 0  # bytes of all parameters and buffers of the model
    bytes_after: int = 0  # the same afterwards

    def line(self) -> str:
        """Returns the report in one line."""
        worst = max(self.layers, key=lambda layer: layer.error, default=None)
        error = "" if worst is None else f"; largest relative error of a weight {worst.error:.4f} ({worst.name})"
        ratio = self.bytes_after / self.bytes_before if self.bytes_before else 1.0
        return (
            f"{len(self.layers)} linear layers in {self.bits} bits: {self.bytes_before / 1e6:,.1f} -> "
            f"{self.bytes_after / 1e6:,.1f} MB ({ratio:.2f}){error}"
        )

    def table(self) -> Table:
        """Returns the report layer by layer, for a terminal."""
        table = Table(title=self.line(), box=None, title_justify="left")
        table.add_column("layer")
        for heading in ("MB before", "MB after", "relative error"):
            table.add_column(heading, justify="right")
        for layer in self.layers:
            sizes = (f"{layer.bytes_before / 1e6:,.2f}", f"{layer.bytes_after / 1e6:,.2f}")
            table.add_row(layer.name, *sizes, f"{layer.error:.4f}")
        for name, why in self.kept.items():
            table.add_row(name, "", "", f"kept: {why}")
        return table


def quantize_model(
    model: nn.Module, *, bits: int = 8, group_size: int = 64, skip: Sequence[str] = (), only: Sequence[str] = ("",)
) -> QuantizationReport:
    """Replaces the linear layers in place, one by one, so that only one is in memory twice; returns sizes and errors.

    Embeddings are not replaced, nor is a layer that shares its weight with another (a tied head). In a model on the
    meta device the new layers have no values, so that a quantized state dict can be loaded with ``assign=True``.

    Args:
        model: Has ``torch.nn.Linear`` or transformers' ``Conv1D`` layers, cut over tensor-parallel ranks or not.
            Everything else keeps its dtype. If ``zero.Init`` has sharded it, every rank must call this: layers are
            gathered one by one, and the quantized ones are sharded again.
        group_size: At 4 bits, number of input features that share a scale and an offset: 32, 64, 128 or 256.
        skip: Layers with one of these in their names are not replaced.
        only: Layers with none of these in their names are not replaced, nor reported.

    Raises:
        DeepSpeedConfigError: ``bits`` is not 4 or 8, or all layers have another number of bits already.
        ValueError: There is no such group size, or a weight is not finite.
        CallOrderError: Parameters belong to an engine already.
    """
    report = QuantizationReport(bits, bytes_before=_bytes_of(model))
    config = QuantizationConfig(q_bits=bits, group_size=group_size)
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    others: list[str] = []
    aliases = names_of_modules(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, QuantizedLinear) and any(part in name for part in only) and module.format.bits != bits:
            others.append(f"{name} in {module.format.bits} bits")
        weight = _weight_of(module)
        if weight is None or not name or not any(part in name for part in only):
            continue
        address = address_of(cast("nn.Parameter", module.weight))
        if address is not None and address.bucket.is_trained:
            raise CallOrderError(
                f"quantize_model: {name!r} belongs to an engine already; quantize before deepspeed.initialize"
            )
        if users[id(module.weight)] > 1:
            report.kept[name] = "shares its weight with another layer"
        elif any(part in name for part in skip):
            report.kept[name] = "named in skip"
        else:
            _replace(model, aliases[id(module)], module, weight, config, report)
    if others and not report.layers:
        raise DeepSpeedConfigError(
            f"quantize_model(bits={bits}): expected plain layers, found quantized ones ({others[0]}); begin with the "
            "plain weights"
        )
    report.bytes_after = _bytes_of(model)
    return report


def names_of_modules(model: nn.Module) -> dict[int, list[str]]:
    """Returns all names of each module of a model, by its ``id``; most have one."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return names


def _replace(
    model: nn.Module,
    names: list[str],
    module: nn.Module,
    weight: torch.Tensor,
    config: QuantizationConfig,
    report: QuantizationReport,
) -> None:
    """Replaces ``module`` by a quantized layer under all its names, or adds the reason against it to the report."""
    name = names[0]
    shape = full_shape(cast("nn.Parameter", module.weight))
    out_features, in_features = shape[::-1] if is_transposed(module) else shape
    if refusal := packed_format(config.q_bits, config.group_size).refusal(in_features):
        report.kept[name] = refusal
        return
    with torch.device("meta"):  # packing creates the parameters
        layer = QuantizedLinear(in_features, out_features, False, config, weight.dtype)
    after = layer.codes.nbytes + layer.scales.nbytes
    with gather_for_packing(name, module, layer) as was_sharded:
        full = _weight_of(module) if was_sharded else weight
        assert full is not None, "the layer has a weight"
        error = float("nan") if full.is_meta else layer.pack(full)
        before = full.nbytes
    layer.bias = cast("nn.Parameter | None", module.bias)
    layer.train(module.training)
    report.layers.append(QuantizedLayer(name, before, after, error))
    replacement = wrap_part(module, layer)
    for each in names:
        model.set_submodule(each, replacement)


def _weight_of(module: nn.Module) -> torch.Tensor | None:
    """Returns the weight as ``[out_features, in_features]``; None for a layer of another kind."""
    # The weight of a subclass of Linear may be used without its forward, as in torch's MultiheadAttention.
    if type(module) is nn.Linear:
        return module.weight
    if (part := weight_of_part(module)) is not None:
        return part
    if is_conv1d(type(module)):
        weight = cast("nn.Parameter", module.weight)
        return weight.t() if weight.dim() == 2 else weight  # a sharded weight is empty
    return None


def _bytes_of(model: nn.Module) -> int:
    sizes = [prod(full_shape(parameter)) * parameter.element_size() for parameter in model.parameters()]
    return sum(sizes) + sum(buffer.nbytes for buffer in model.buffers())


class QuantizedColumn(nn.Module):
    """A column-parallel layer with a quantized part, for inference: it does not sum the gradient of the input."""

    def __init__(self, part: QuantizedLinear, cut: CutLinear) -> None:
        super().__init__()
        self.part, self.tensor_cut = part, cut

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in]`` to ``[..., out of this rank]``, or to all ``out`` if the output is gathered."""
        out = self.part(values)
        cut = self.tensor_cut
        return gather_from(out, cut.channel, cut.parts, label=f"the output of {cut.name}") if cut.is_gathered else out


class QuantizedRow(nn.Module):
    """A row-parallel layer with a quantized part, for inference."""

    def __init__(self, part: QuantizedLinear, cut: CutLinear) -> None:
        super().__init__()
        self.bias, part.bias = part.bias, None  # added once, after the sum over ranks
        self.part, self.tensor_cut = part, cut

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Maps ``[..., in of this rank]``, or all ``in`` if the input is whole, to ``[..., out]``."""
        cut = self.tensor_cut
        if cut.is_gathered:
            values = scatter_to(values, cut.channel, cut.parts, f"the gradient of the input of {cut.name}")
        total = cut.channel.sum(self.part(values), f"the output of {cut.name}")
        return total if self.bias is None else total + self.bias


def weight_of_part(module: nn.Module) -> torch.Tensor | None:
    """Returns this rank's part of the weight, ``[out_features, in_features]``; None for a layer that is not cut."""
    if not isinstance(module, (ColumnLinear, RowLinear)):
        return None
    return module.weight.t() if module.tensor_cut.is_transposed else module.weight


def wrap_part(module: nn.Module, part: QuantizedLinear) -> nn.Module:
    """Returns the replacement of ``module``: ``part``, in a tensor-parallel layer if ``module`` is one."""
    if isinstance(module, ColumnLinear):
        return QuantizedColumn(part, module.tensor_cut)
    return QuantizedRow(part, module.tensor_cut) if isinstance(module, RowLinear) else part
