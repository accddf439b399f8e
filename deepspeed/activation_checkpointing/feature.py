"""What the engine does for ``activation_checkpointing.recompute_modules``."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from deepspeed.activation_checkpointing.attention import KEY, recompute_attention
from deepspeed.engine_feature import SEQUENCE_RANKS, Conflict, EngineFeature, EngineSetup


def _is_on(setup: EngineSetup) -> bool:
    return bool(setup.root.activation_checkpointing.recompute_modules)


class SelectiveCheckpointing(EngineFeature):
    """Parts of blocks that run again in backward."""

    title = "selective recomputation"
    setting = KEY
    conflicts = (
        Conflict(
            KEY,
            _is_on,
            SEQUENCE_RANKS,
            "attention exchanges tokens between these ranks, and would exchange them again in backward",
            "leave it out, and switch on the model's own gradient_checkpointing_enable()",
        ),
    )

    @override
    def prepare(self, setup: EngineSetup) -> None:
        if not _is_on(setup):
            return
        model: Any = setup.model
        recompute_attention(model, model.transformers_model if setup.has_stages else None)


FEATURE = SelectiveCheckpointing()
