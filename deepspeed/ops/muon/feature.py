"""What the engine does for the optimizer ``Muon``: tells it which parameters are matrices."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import override

from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.ops.muon.flags import set_optimizer_flags


class MuonFlags(EngineFeature):
    """The flag ``use_muon`` of parameters."""

    title = "Muon"
    setting = "optimizer.type Muon"

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        if setup.optimizer is None:
            set_optimizer_flags(setup.root, setup.model)
        return {}


FEATURE = MuonFlags()
