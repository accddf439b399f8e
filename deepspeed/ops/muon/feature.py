"""Muon as a feature of the engine: marks the parameters that are matrices, and installs QK-clip."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from typing_extensions import override

from deepspeed.engine_feature import (
    ISLANDS,
    SEQUENCE_RANKS,
    STAGES,
    Conflict,
    EngineFeature,
    EngineHooks,
    EngineSetup,
)
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.muon.flags import CONVOLUTIONS, mark_convolutions, set_optimizer_flags
from deepspeed.ops.muon.muon import Muon
from deepspeed.ops.muon.qk_clip import KEY, QKClipHooks, is_measured, measure_attention

if TYPE_CHECKING:
    from deepspeed.zero.group import Groups
    from deepspeed.zero.runtime import ZeroRuntime


def _clips(setup: EngineSetup) -> bool:
    if setup.optimizer is not None:
        return getattr(setup.optimizer, "qk_clip_threshold", None) is not None
    section = setup.root.optimizer
    return section is not None and section.type == "Muon" and section.params.get("qk_clip_threshold") is not None


class MuonFlags(EngineFeature):
    """Sets ``use_muon`` on parameters, and measures attention logits for QK-clip."""

    title = "Muon"
    setting = "optimizer.type Muon"
    conflicts = tuple(
        Conflict(
            KEY,
            _clips,
            other,
            "the ranks that hold the weights of a head do not compute all of its logits",
            "leave the key out",
        )
        for other in (STAGES, SEQUENCE_RANKS, ISLANDS)
    )

    @override
    def prepare(self, setup: EngineSetup) -> None:
        if _clips(setup):
            measure_attention(setup.model)

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if isinstance(setup.optimizer, Muon):
            stacked = {id(p) for group in setup.optimizer.param_groups if group.get("stacked") for p in group["params"]}
            for name, module in setup.model.named_modules():
                if isinstance(module, CONVOLUTIONS) and id(module.weight) in stacked:
                    raise DeepSpeedConfigError(
                        f"initialize(optimizer=Muon(...)): {name}.weight, of shape {tuple(module.weight.shape)}, is "
                        "the kernel of a convolution, but is in a group of stacked matrices. Set muon_stacked = False "
                        "on it before the optimizer is made, or give its group stacked=False"
                    )
            if setup.optimizer.qk_clip_threshold is not None and not is_measured(setup.model):
                raise DeepSpeedConfigError(
                    "initialize(optimizer=...): expected Muon(qk_clip_threshold=...) itself, found a "
                    "callable, which is called only after the model was prepared; pass the optimizer"
                )

    @override
    def settle(self, setup: EngineSetup) -> Mapping[str, bool]:
        if setup.optimizer is None:
            set_optimizer_flags(setup.root, setup.model)
        else:  # an optimizer, or a callable that makes one
            mark_convolutions(setup.model)
        return {}

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        if not _clips(setup):
            return None
        assert runtime.updater is not None and isinstance(runtime.updater.optimizer, Muon)
        return QKClipHooks(setup.model, groups.peers, runtime.updater.optimizer)


FEATURE = MuonFlags()
