"""``pipeline``: settings of pipeline modules, which the program builds."""

from __future__ import annotations

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int, IntOrAuto

_MODULE = "the pipeline module is told this when it is built"
_LATER = "pipeline modules do not exist here yet"


class Pipeline(Section):
    """Settings that the engine hands to a pipeline module. ZeRO stage 0 or 1 only."""

    activation_checkpoint_interval: Int = key(
        0,
        "Layers between activation checkpoints; above 0 it overrides the module's own.",
        unit="layers",
        minimum=0,
        no_effect=_LATER,
    )
    pipe_partitioned: Bool = key(True, "Split activations over model-parallel ranks when sending.", no_effect=_LATER)
    grad_partitioned: Bool = key(True, "The same for gradients.", no_effect=_LATER)
    use_reentrant: Bool = key(True, "The reentrant kind of activation checkpoint.", no_effect=_LATER)
    stages: IntOrAuto = key("auto", "Number of stages.", own_auto=True, above=0, no_effect=_MODULE)
    partition: str = key("best", "Way of cutting the layers.", no_effect=_MODULE)
    seed_layers: Bool = key(False, "A seed per layer.", no_effect=_MODULE)
