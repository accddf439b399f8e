"""What the engine does for the optimizer ``Muon``: tells it which parameters are matrices."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.muon.flags import CONVOLUTIONS, mark_convolutions, set_optimizer_flags
from deepspeed.ops.muon.muon import Muon


class MuonFlags(EngineFeature):
    """The flag ``use_muon`` of parameters."""

    title = "Muon"
    setting = "optimizer.type Muon"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if isinstance(setup.optimizer, Muon):
            _refuse_stacked_convolutions(setup.optimizer, setup.model)

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        if setup.optimizer is None:
            set_optimizer_flags(setup.root, setup.model)
        else:  # it may be a callable that makes one
            mark_convolutions(setup.model)
        return {}


def _refuse_stacked_convolutions(optimizer: Muon, model: nn.Module) -> None:
    stacked = {id(p) for group in optimizer.param_groups if group.get("stacked") for p in group["params"]}
    for name, module in model.named_modules():
        if isinstance(module, CONVOLUTIONS) and id(module.weight) in stacked:
            raise DeepSpeedConfigError(
                f"initialize(optimizer=Muon(...)): {name}.weight, of shape {tuple(module.weight.shape)}, is the kernel "
                "of a convolution, but is in a group of stacked matrices. Set muon_stacked = False on it before the "
                "optimizer is made, or give its group stacked=False"
            )


FEATURE = MuonFlags()
