"""Taking pruned rows, heads and channels out of a model, with what depended on them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deepspeed.compression.packing import QuantizationLevels
from deepspeed.compression.sizes import is_beside
from deepspeed.logging import log_dist

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_key_value_heads", "n_kv_heads")
_WIDTHS = ("all_head_size", "split_size")


class LayerPruner:
    """Cuts layers, and keeps the levels of their rounded weights in step.

    Args:
        model: With plain layers, whose weights are final.
        kinds: The kind of each compressed layer, by name.
        levels: Of the rounded weights, by the layer's name; changed in place, None where a cut destroys them.
    """

    def __init__(self, model: nn.Module, kinds: dict[str, str], levels: dict[str, QuantizationLevels | None]) -> None:
        self._model, self._kinds, self._levels = model, kinds, levels

    def rows(self, name: str, keep: torch.Tensor, related: Iterable[str]) -> None:
        """Removes all outputs of ``name`` but ``keep`` (1-D indices).

        Related layers lose the inputs that these outputs feed, or the same outputs.
        """
        total = self._outputs(name)
        self._cut(name, rows=keep)
        for other in related:
            if isinstance(self._model.get_submodule(other), nn.BatchNorm2d):
                self._cut_norm(other, keep)
                continue
            if is_beside(total, self._model.get_submodule(other)):
                self._cut(other, rows=keep)
                continue
            inputs = self._inputs(other)
            self._cut(other, columns=_blocks(keep, inputs // total))  # flattened images have a block for each channel

    def heads(self, name: str, keep: torch.Tensor, heads: int, related: Iterable[str]) -> None:
        """Removes all heads but ``keep`` (1-D indices): inputs of ``name`` and outputs of each related layer.

        Fused layers have the outputs of a head several times.
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
        self._adapt(touched, {heads: len(keep)}, {width: len(inputs)})

    def _adapt(self, names: set[str], heads: dict[int, int], widths: dict[int, int]) -> None:
        """Numbers of heads that the modules around the layers remember."""
        for parent in sorted({name.rpartition(".")[0] for name in names}):
            module = self._model.get_submodule(parent)
            for attributes, values in ((_HEADS, heads), (_WIDTHS, widths)):
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

    def _cut_norm(self, name: str, keep: torch.Tensor) -> None:
        module: Any = self._model.get_submodule(name)
        for each in ("weight", "bias"):
            if (value := getattr(module, each)) is not None:
                setattr(module, each, nn.Parameter(value.detach()[keep], value.requires_grad))
        for each in ("running_mean", "running_var"):
            if (value := getattr(module, each)) is not None:
                setattr(module, each, value[keep])
        module.num_features = len(keep)


def _blocks(index: torch.Tensor, length: int) -> torch.Tensor:
    """Places of whole blocks of so many columns."""
    return (index[:, None] * length + torch.arange(length, device=index.device)).flatten()
