"""What the engine does for long sequences: shares them between ranks, and computes them in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from typing_extensions import override

from deepspeed.engine_feature import EngineFeature, EngineSetup
from deepspeed.parallel.sequence.offloaded import offload_checkpoints
from deepspeed.parallel.sequence.tiled_models import tile_model
from deepspeed.parallel.sequence.ulysses import adopt_model, recompute_between_exchanges, with_all_data_ranks


class SequenceParallelism(EngineFeature):
    """Sequences of which each rank has a part, and layers that compute a sequence piece by piece."""

    title = "sequence parallelism"
    setting = "sequence_parallel_size, sequence_parallel"

    @override
    def read_config(self, config: Any, mpu: Any) -> Any:
        return with_all_data_ranks(config, mpu)

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        section, ranks = setup.root.sequence_parallel, setup.ranks
        stages: Any = setup.model if setup.has_stages else None
        if section.tiled_mlp or section.tiled_loss:
            tile_model(
                setup.model,
                mlp=section.tiled_mlp,
                loss=section.tiled_loss,
                tokens=section.tile_tokens,
                in_evaluation=section.evaluation == "loss",
            )
        if section.offload_checkpoints:
            offload_checkpoints(setup.model)
        if ranks.sequence_size == 1:
            return {}
        if setup.mesh_is_ours:
            adopt_model(
                setup.model,
                ranks.sequence_group,
                ranks.mesh,
                section.mode,
                section.evaluation,
                recompute_exchange=section.recompute_exchange,
                whole=stages.transformers_model if stages is not None else None,
            )
        if setup.root.activation_checkpointing.recompute_modules:
            recompute_between_exchanges(setup.model)
        if stages is not None:
            stages.share_loss(own_share=section.loss == "own_share")
        return {}


FEATURE = SequenceParallelism()
