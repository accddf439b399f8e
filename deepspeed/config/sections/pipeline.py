"""``pipeline``: settings of pipeline modules, which the program builds."""

from __future__ import annotations

from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int, IntOrAuto

_MODULE = "this is an argument of PipelineModule"
_OWN_PEER = "each tensor-parallel rank sends its part to its peer on the next stage"


class PipelineSection(Section):
    """Settings of pipeline modules (``deepspeed.pipe.PipelineModule``); other models do not read them."""

    _feature: ClassVar[str] = "deepspeed.parallel.pipe.feature"

    schedule: str | None = key(
        None,
        "Order of forwards and backwards: gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev. If it needs another "
        "division of layers over stages than the module has, the layers are built again. null: the module's.",
    )
    num_chunks: Int | None = key(
        None, "Chunks of layers per stage, for schedules with several. null: the module's.", above=0
    )
    activation_checkpoint_interval: Int = key(
        0,
        "Layers that are recomputed together in backward; above 0 it overrides the module's own.",
        unit="layers",
        minimum=0,
    )
    use_reentrant: Bool = key(
        False, "With activation_checkpoint_interval: use torch's reentrant activation checkpointing."
    )
    pipe_partitioned: Bool = key(True, "Split activations over tensor-parallel ranks.", no_effect=_OWN_PEER)
    grad_partitioned: Bool = key(True, "Split gradients over tensor-parallel ranks.", no_effect=_OWN_PEER)
    stages: IntOrAuto = key("auto", "Number of stages.", own_auto=True, above=0, no_effect=_MODULE)
    partition: str = key("best", "How layers are divided over stages.", no_effect=_MODULE)
    seed_layers: Bool = key(False, "Use a seed per layer.", no_effect=_MODULE)
