"""Checks shapes and shared weights of the layers that a configuration selects for compression."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from torch import nn

from deepspeed.compression.basic_layer import Conv1DLayer_Compress
from deepspeed.compression.settings import Selection, kind_of
from deepspeed.compression.snip import SnipPlan
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.layers import queries_per_key


class LayerWeights:
    """Maps weights to the layers that use them."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())  # every module, by name
        self._by_weight: dict[int, list[str]] = defaultdict(list)
        for name, module in self.modules.items():
            for parameter in module.parameters(recurse=False):
                self._by_weight[id(parameter)].append(name)

    def of(self, name: str) -> list[str]:
        """Returns the names of the layers that share the weight of ``name``, itself first."""
        weight: Any = self.modules[name].weight
        return [name, *(other for other in self._by_weight[id(weight)] if other != name)]

    def check(self, selections: list[Selection]) -> None:
        """Raises DeepSpeedConfigError if a technique does not fit a layer's weight, its sharing or related layers."""
        for selection in selections:
            self._check_related(selection)
            for name in selection.names:
                if selection.technique == "activation_quantization":
                    continue
                tied = [other for other in self.of(name)[1:] if kind_of(self.modules[other]) is None]
                handles_ties = selection.technique in ("weight_quantization", "sparse_pruning")
                others = [] if handles_ties else self.of(name)[1:]
                if tied or others:
                    raise DeepSpeedConfigError(
                        f"{selection.key('modules')}: {name} shares its weight with {', '.join(tied or others)}, which "
                        f"{selection.technique} does not support; untie them, or leave {name} out"
                    )
                self._check_sizes(name, selection)

    def _check_sizes(self, name: str, selection: Selection) -> None:
        rows, columns = shape_of(self.modules[name])
        if selection.technique == "weight_quantization":
            groups = selection.shared.quantize_groups
            if not self.by_rows(name) and rows * columns % groups:
                raise DeepSpeedConfigError(
                    f"compression_training.weight_quantization.shared_parameters.quantize_groups: {groups} does not "
                    f"divide the {rows * columns:,} weights of {name}; choose a divisor of that number"
                )
        if selection.is_snip:
            plan = SnipPlan.of(selection.shared)
            if not plan.fits(rows, columns):
                raise DeepSpeedConfigError(
                    f"compression_training.sparse_pruning.shared_parameters.block_pattern: the weight of {name}, "
                    f"{rows} x {columns}, cannot be divided into blocks of {selection.shared.block_pattern}; set "
                    "another pattern, or add the layer to excluded_modules"
                )
            if not self.modules[name].weight.requires_grad:
                raise DeepSpeedConfigError(
                    f"compression_training.sparse_pruning: {name} is frozen, and snip_momentum needs gradients; add "
                    "the layer to excluded_modules, or use the method l1"
                )
        if selection.technique == "head_pruning":
            heads = selection.shared.num_heads
            if columns % heads:
                raise DeepSpeedConfigError(
                    f"compression_training.head_pruning.shared_parameters.num_heads: {heads} does not divide the "
                    f"{columns} input features of {name}, which must be the layer after the heads. Set num_heads to "
                    "that of the attention, or select another layer in modules"
                )

    def _check_related(self, selection: Selection) -> None:
        pairs = [
            (name, other)
            for match in selection.matches
            for related in match.related
            for name, other in zip(match.names, related, strict=True)
        ]
        where = selection.key("related_modules")
        for name, other in pairs:
            parent = name.rpartition(".")[0]
            around: Any = self.modules[parent]
            if selection.technique == "head_pruning" and queries_per_key(around) != 1:
                raise DeepSpeedConfigError(
                    f"{where}: in {parent} {queries_per_key(around)} heads share keys and values, so "
                    "single heads cannot be removed; leave related_modules out, so that they become zero instead"
                )
            first, second = self.modules[name], self.modules[other]
            if selection.technique == "head_pruning":
                sizes, words = (shape_of(second)[0], shape_of(first)[1]), ("outputs", "inputs")
            else:
                sizes, words = (inputs_of(second), shape_of(first)[0]), ("inputs", "outputs")
            beside = selection.technique != "head_pruning" and is_beside(shape_of(first)[0], second)
            if not beside and sizes[0] % sizes[1]:
                raise DeepSpeedConfigError(
                    f"{where}: {other} has {sizes[0]} {words[0]}, expected a multiple of the {sizes[1]} {words[1]} of "
                    f"{name}; correct the pattern"
                )
            tied = self.of(other)[1:] if hasattr(second, "weight") else []
            if tied:
                raise DeepSpeedConfigError(
                    f"{where}: {other} shares its weight with {', '.join(tied)}, which would be pruned too; "
                    f"untie them, or leave {other} out"
                )
            if beside:
                continue
            for each, module in ((name, first), (other, second)):
                if isinstance(module, nn.Conv2d) and module.groups > 1:
                    raise DeepSpeedConfigError(
                        f"{where}: {each} has {module.groups} groups, so no channel can be removed; leave it out, "
                        "or prune without related_modules"
                    )

    def by_rows(self, name: str) -> bool:
        """Returns whether each row is a quantization group: for embeddings and layers tied to one."""
        return any(isinstance(self.modules[user], nn.Embedding) for user in self.of(name))


def shape_of(module: Any) -> tuple[int, int]:
    """Returns ``(outputs, weights per output)`` of a layer, whose weight may be sharded."""
    if isinstance(module, nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    shape = tuple(getattr(module.weight, "ds_shape", module.weight.shape))
    if kind_of(module) == "conv1d" or isinstance(module, Conv1DLayer_Compress):
        return shape[1], shape[0]
    return shape[0], math.prod(shape[1:])


def is_beside(rows: int, other: Any) -> bool:
    """Returns whether ``other`` stands beside the pruned layer, which has ``rows`` outputs, and not after it.

    It then has the same number of outputs, and does not take them as inputs. The two halves of a gated layer are an
    example: their outputs are multiplied, so both lose the same rows.
    """
    return isinstance(other, nn.Linear) and shape_of(other)[0] == rows and inputs_of(other) % rows != 0


def inputs_of(module: Any) -> int:
    """Returns the number of input features or channels of a layer."""
    if isinstance(module, nn.BatchNorm2d):
        return module.num_features
    return module.in_channels if isinstance(module, nn.Conv2d) else shape_of(module)[1]
