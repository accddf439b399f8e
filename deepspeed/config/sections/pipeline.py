"""``pipeline``: settings of pipeline modules, which the program builds."""

from __future__ import annotations

from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int, IntOrAuto

_MODULE = "an argument of PipelineModule says this"
_OWN_PEER = "each tensor-parallel rank sends what it has to its own peer on the next stage"


class PipelineSection(Section):
    """Settings of pipeline modules (``deepspeed.pipe.PipelineModule``); other models do not read them."""

    _feature: ClassVar[str] = "deepspeed.parallel.pipe.feature"

    schedule: str | None = key(
        None,
        "Order of forwards and backwards: gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev. Where it cuts the layers "
        "otherwise than the module was cut, they are built anew. Null: the module's.",
    )
    num_chunks: Int | None = key(
        None, "Chunks of layers per stage, with a schedule that has several. Null: the module's.", above=0
    )
    activation_checkpoint_interval: Int = key(
        0,
        "Layers that are recomputed together in backward; above 0 it overrides the module's own.",
        unit="layers",
        minimum=0,
    )
    use_reentrant: Bool = key(
        False, "With activation_checkpoint_interval: torch's reentrant kind of activation checkpoint."
    )
    pipe_partitioned: Bool = key(True, "Split activations over tensor-parallel ranks.", no_effect=_OWN_PEER)
    grad_partitioned: Bool = key(True, "The same for gradients.", no_effect=_OWN_PEER)
    stages: IntOrAuto = key("auto", "Number of stages.", own_auto=True, above=0, no_effect=_MODULE)
    partition: str = key("best", "Way of cutting the layers.", no_effect=_MODULE)
    seed_layers: Bool = key(False, "A seed per layer.", no_effect=_MODULE)
