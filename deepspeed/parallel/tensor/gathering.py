"""``GatherReplacedLayerParams``: makes parameters that are cut over tensor-parallel ranks whole inside a block."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

import torch
from torch import nn

from deepspeed.logging import warn_once
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.tiling.parts import part_owners_of


class GatherReplacedLayerParams:
    """Inside the block, ``data`` of the given parameters is the whole tensor, at every ZeRO stage.

    For reading: edits are dropped when the block ends, with a warning. Every tensor-parallel and data-parallel rank
    must enter it with the same parameters.

    Args:
        params: One parameter of any shape, or any iterable of them.
        module: The model; where the parts are is recorded in the parameters, so it is not read.
        enabled: False: do nothing.
    """

    def __init__(self, params: torch.Tensor | Iterable[torch.Tensor], module: nn.Module, enabled: bool = True) -> None:
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = listed if enabled else []
        self._gathered = GatheredParameters(self._params)
        self._swapped: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]] = []

    def __enter__(self) -> None:
        self._gathered.__enter__()
        for parameter in self._params:
            owners = part_owners_of(parameter)
            if owners is not None:
                part = parameter.data
                whole = owners.whole(part, "a parameter of a layer that is cut")
                parameter.data = whole
                self._swapped.append((parameter, part, whole, whole._version))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for parameter, part, whole, version in self._swapped:
            parameter.data = part
            if whole._version != version:
                warn_once(
                    "GatherReplacedLayerParams",
                    "GatherReplacedLayerParams: a parameter was changed inside the block; expected reads only, so the "
                    "change is dropped. Use deepspeed.utils.safe_set_full_fp32_param to change it",
                )
        self._swapped.clear()
        self._gathered.__exit__(kind, error, trace)
