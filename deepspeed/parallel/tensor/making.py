"""Cuts layers in place: parameters keep their identity and names, and hold this rank's part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.differentiable import copy_to, reduce_from
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.models.attention_modules import AttentionHeads, change_heads
from deepspeed.models.configurations import rotary_width_of, text_config
from deepspeed.parallel.tensor.layout import LayerCut, ParameterCut
from deepspeed.parallel.tensor.linear import ColumnConv1D, ColumnLinear, CutLinear, RowConv1D, RowLinear, SharedInputs
from deepspeed.parallel.tensor.rules import CutStyle, is_transposed
from deepspeed.parallel.tensor.split import Heads
from deepspeed.parallel.tensor.vocabulary import CutEmbedding, VocabularyEmbedding, WidthEmbedding
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.access.gathered import GatheredBlock
from deepspeed.zero.address import ShardedParameter, address_of, forget_address, full_shape, mark_full, plain_class
from deepspeed.zero.construction.provisional import shard_parameters
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.tiling.describe import CUT, put_in_group
from deepspeed.zero.tiling.parts import PartOwners, mark_owners, part_owners_of, say_part
from deepspeed.zero.tiling.tiles import TilePart


def cut_parameter(
    parameter: nn.Parameter, cut: ParameterCut, logical: str, channel: Channel, group: str | None, data: Transport
) -> None:
    """Reduces a parameter to this rank's part, and marks it as a part.

    Args:
        parameter: Whole on every rank; or sharded by ``zero.Init``, then every rank that shares it must call this.
        logical: Name of the logical parameter.
        channel: The ranks that share the layer.
        group: The ranks that have the same part, by the name of a bucket group; None: this rank alone.
        data: The ranks that have the same part and process other samples; a sharded parameter is sharded over them
            again.
    """
    intervals = cut.split.intervals(channel.rank)
    address = address_of(parameter)
    if address is not None and isinstance(parameter, ShardedParameter):
        block = GatheredBlock([(parameter, address)], None)
        block.open()
        part = _part(parameter.detach(), cut.dim, intervals)
        block.give_back(restore=False)
        forget_address(parameter)
        mark_full(parameter, part, plain_class(parameter))
        shards = BucketGroup.over(data, name=group or CUT)
        shard_device = address.bucket.shard.device
        shard_parameters(
            [parameter], [cut.name], group=shards, device=part.device, dtype=None, shard_device=shard_device
        )
    else:
        parameter.data = _part(parameter.detach(), cut.dim, intervals)
    parameter.grad = None
    everybody = range(channel.size)
    parts = [TilePart.cut(logical, cut.shape, cut.dim, cut.split.intervals(place)) for place in everybody]
    say_part(parameter, parts[channel.rank])
    mark_owners(parameter, PartOwners(channel.transport, tuple(parts)))
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    if group is not None:
        put_in_group([parameter], group)


def become_part(parameter: nn.Parameter, cut: ParameterCut, place: int) -> None:
    """Turns a cut parameter, not sharded, into the part of the rank at ``place`` in its layer, filled with zeros."""
    owners = part_owners_of(parameter)
    assert owners is not None and address_of(parameter) is None
    shape = (*cut.shape[: cut.dim], cut.split.width(place), *cut.shape[cut.dim + 1 :])
    values = parameter.detach().new_zeros(shape)
    parameter.grad = None
    # The graph of an aborted step may keep the parameter's autograd node, which expects gradients of the former
    # shape. Torch discards the node when the dtype changes.
    parameter.data = values.to(torch.float32 if values.dtype == torch.float64 else torch.float64)
    parameter.data = values
    say_part(parameter, owners.parts[place])


def _part(values: torch.Tensor, dim: int, intervals: list[tuple[int, int]]) -> torch.Tensor:
    """Returns a copy of the part, so that the whole can be freed."""
    parts = [values.narrow(dim, low, high - low) for low, high in intervals]
    return torch.cat(parts, dim) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


class Maker:
    """Makes cut layers."""

    def __init__(self, model: nn.Module, channel: Channel, replicas: Channel | None) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._channel = channel  # the ranks that share its layers
        self._replicas = replicas  # the ranks that have the same key/value heads as this one; None: no others
        self._shared_inputs = SharedInputs(channel)

    def make(self, layer: LayerCut) -> None:
        """Changes the module of ``layer``, whose parameters have been cut."""
        if layer.way is CutStyle.WHOLE or not layer.name:
            return
        for name, way in ((layer.name, layer.way), *layer.adapters):
            if name in self._modules:  # else a bare parameter
                self._make(self._modules[name], layer, way, name)

    def _make(self, module: nn.Module, layer: LayerCut, way: CutStyle, name: str) -> None:
        if way in (CutStyle.COLUMN, CutStyle.COLUMN_GATHERED):
            self._linear(module, layer, name, (ColumnLinear, ColumnConv1D), is_gathered=way is CutStyle.COLUMN_GATHERED)
        elif way in (CutStyle.ROW, CutStyle.ROW_SLICED):
            self._linear(module, layer, name, (RowLinear, RowConv1D), is_gathered=way is CutStyle.ROW_SLICED)
        elif way in (CutStyle.VOCABULARY, CutStyle.WIDTH):
            self._embedding(module, layer, way)
        elif way is CutStyle.SUMMED:
            sum_own_gradients(module, self._channel, name)
        elif way is CutStyle.LATENT:
            channel, width = self._channel, self._rotary(name)

            def sum_tail(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
                head, tail = output.split([output.shape[-1] - width, width], dim=-1)
                label = f"the gradient of the rotary output of {name}"
                return torch.cat([head, copy_to(tail, channel, label)], dim=-1)

            module.register_forward_hook(sum_tail)
        elif way is CutStyle.EXPERTS:
            module.register_forward_pre_hook(_enter_experts(self._channel, name), with_kwargs=True)
            module.register_forward_hook(_sum_output(self._channel, name))
        elif way is CutStyle.IDENTITY_EXPERT:
            size = self._channel.size
            module.register_forward_pre_hook(lambda _, args: (args[0] / size, *args[1:]))
        elif way is CutStyle.SUM_OUTPUT:
            module.register_forward_hook(_sum_output(self._channel, name))

    def _rotary(self, name: str) -> int:
        above: Any = self._model.get_submodule(name.rpartition(".")[0])
        config = text_config(getattr(self._model, "config", None))
        width = rotary_width_of(above, getattr(above, "config", None), config)
        if width is not None:
            return width
        raise DeepSpeedConfigError(
            f"tensor_parallel.autotp_size: by the plan, some outputs of {name!r} are rotary and go to all heads, "
            "but neither the module above it nor the configuration has qk_rope_head_dim; leave its attention whole"
        )

    def _linear(
        self, module: nn.Module, layer: LayerCut, name: str, kinds: tuple[type, type], *, is_gathered: bool
    ) -> None:
        assert layer.split is not None
        transposed = is_transposed(module)
        low, high = layer.split.replicas(self._channel.rank)
        cut = CutLinear(self._channel, self._shared_inputs, layer.split, name, transposed, is_gathered)
        cut.replicas = self._replicas if high - low > 1 else None
        module.__class__ = kinds[1] if transposed else kinds[0]
        module.tensor_cut = cut  # type: ignore[assignment]
        set_features(module, cut)

    def _embedding(self, module: nn.Module, layer: LayerCut, way: CutStyle) -> None:
        assert layer.split is not None and isinstance(module, nn.Embedding)
        padding = module.padding_idx
        module.__class__ = VocabularyEmbedding if way is CutStyle.VOCABULARY else WidthEmbedding
        projection = CutLinear(self._channel, self._shared_inputs, layer.split, layer.name, is_gathered=True)
        cut = CutEmbedding(self._channel, layer.split, layer.name, padding, projection)
        module.tensor_cut = cut  # type: ignore[assignment]


def set_features(module: nn.Module, cut: CutLinear) -> None:
    """Sets the numbers of features of a cut linear layer to those of its weight."""
    shape = full_shape(module.weight)  # type: ignore[arg-type]
    out, inside = shape[::-1] if cut.is_transposed else shape
    module.in_features, module.out_features = int(inside), int(out)  # type: ignore[assignment]


def sum_own_gradients(module: nn.Module, channel: Channel, name: str) -> None:
    """Makes backward sum the gradients of a whole module's own parameters over the ranks, as its input is cut."""
    give_base(module, _SumsOwnGradients).__dict__["gradients_summed"] = channel, name


class _SumsOwnGradients(nn.Module):
    """Mixin in front of a module's class: its forward uses parameters whose gradients are summed over the ranks."""

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        channel, name = self.__dict__["gradients_summed"]
        own = {key: value for key, value in self._parameters.items() if value is not None}
        for key, value in own.items():
            self.__dict__[key] = copy_to(value, channel, f"the gradient of {name}.{key}")
        try:
            return super().forward(*args, **kwargs)
        finally:
            for key in own:
                del self.__dict__[key]


def _enter_experts(channel: Channel, name: str) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def enter(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return copy_to(value, channel, f"the gradient of an input of {name}")
        return value

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(map(enter, args)), {key: enter(value) for key, value in kwargs.items()}

    return hook


def _sum_output(channel: Channel, name: str) -> Callable[..., Any]:
    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        return reduce_from(output, channel, f"the output of {name}")

    return hook


_PER_HEAD = ("alibi", "position_bias")
"""Names of arguments with one entry per head."""

_MASK = "attention_mask"
"""The argument whose second of four dimensions may be heads, as when ALiBi is added to it."""


def set_head_counts(module: nn.Module, whole: AttentionHeads, heads: Heads, place: int) -> dict[str, tuple[int, int]]:
    """Sets the numbers of an attention module, ``whole`` before, to those of the rank at ``place``.

    Returns by attribute: the number before and after.
    """
    low, high = heads.of_query(place)
    first, last = heads.of_key_value(place)
    return change_heads(module, whole, high - low, last - first)


def slice_arguments(module: nn.Module, whole: AttentionHeads, heads: Heads, channel: Channel) -> None:
    """Makes an attention module slice its per-head arguments (ALiBi, position biases) to this rank's heads."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        low, high = heads.of_query(channel.rank)
        for name in _PER_HEAD:
            if isinstance(value := kwargs.get(name), torch.Tensor):
                kwargs = {**kwargs, name: _part_of_heads(value, whole.query, low, high)}
        if isinstance(mask := kwargs.get(_MASK), torch.Tensor) and mask.dim() == 4:
            kwargs = {**kwargs, _MASK: _part_of_heads(mask, whole.query, low, high)}
        return args, kwargs

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _part_of_heads(value: torch.Tensor, count: int, low: int, high: int) -> torch.Tensor:
    """Returns this rank's heads: along the first of 3 dimensions or the second of 4.

    Other tensors are returned whole.
    """
    if value.dim() == 4:
        return value[:, low:high] if value.shape[1] == count else value
    if value.dim() == 3 and value.shape[0] % count == 0:
        return value.view(-1, count, *value.shape[1:])[:, low:high].flatten(0, 1)
    return value
