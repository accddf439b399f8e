"""What the engine does for ``activation_checkpointing.recompute_modules`` and ``activation_checkpointing.blocks``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed.activation_checkpointing.attention import KEY, offers_recomputation, recompute_attention
from deepspeed.activation_checkpointing.blocks import BlockCheckpointing
from deepspeed.engine_feature import STAGES, Conflict, EngineFeature, EngineSetup
from deepspeed.errors import DeepSpeedConfigError

BLOCKS = "activation_checkpointing.blocks"


def _is_on(setup: EngineSetup) -> bool:
    return bool(setup.root.activation_checkpointing.recompute_modules)


def _has_blocks(setup: EngineSetup) -> bool:
    return setup.root.activation_checkpointing.blocks


class SelectiveCheckpointing(EngineFeature):
    """Blocks, or parts of them, that run again in backward."""

    title = "recomputation by configuration"
    setting = f"{KEY}, {BLOCKS}"
    conflicts = (
        Conflict(
            BLOCKS,
            _has_blocks,
            STAGES,
            "a PipelineModule checkpoints its layers itself",
            "set pipeline.activation_checkpoint_interval instead",
        ),
    )

    @override
    def prepare(self, setup: EngineSetup) -> None:
        if not _is_on(setup):
            return
        model: Any = setup.model
        whole = model.transformers_model if setup.has_stages else None
        if setup.ranks.sequence_size == 1 or (whole is None and offers_recomputation(model)):
            recompute_attention(model, whole)  # otherwise whoever shares sequences does it, between the exchanges

    @override
    def refuse(self, setup: EngineSetup) -> None:
        if not _has_blocks(setup):
            return
        if _is_on(setup):
            raise DeepSpeedConfigError(
                f"{BLOCKS} and {KEY}: whole blocks run again, so parts of them need not be named; leave one of the "
                "two out"
            )
        BlockCheckpointing(setup.model)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        if _has_blocks(setup):
            BlockCheckpointing(setup.model).on()
        return {}


FEATURE = SelectiveCheckpointing()
