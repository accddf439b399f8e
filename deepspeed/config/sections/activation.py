"""``activation_checkpointing``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from typing_extensions import override

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int


class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``, which have an effect only where the program calls its functions.

    ``blocks`` and ``recompute_modules`` need no call.
    """

    _feature: ClassVar[str] = "deepspeed.activation_checkpointing.feature"

    blocks: Bool = key(
        False,
        "Recompute repeated blocks in backward and keep only their inputs: children of a ModuleList, or what a "
        "Transformers model checkpoints itself. Only here, not upstream.",
    )
    partition_activations: Bool = key(False, "Split saved activations over the model-parallel ranks.")
    cpu_checkpointing: Bool = key(False, "Keep saved activations in host memory.")
    contiguous_memory_optimization: Bool = key(
        False, "One buffer for saved activations; needs partition_activations and number_checkpoints."
    )
    number_checkpoints: Int | None = key(None, "Number of checkpointed layers.", unit="layers", above=0)
    synchronize_checkpoint_boundary: Bool = key(False, "Synchronise the device at each checkpoint.")
    profile: Bool = key(False, "Time forward and backward of each checkpoint.")
    recompute_modules: list[Literal["core_attn"]] = key(
        None,
        "Parts of the blocks of a Transformers model (or of modules with recompute_core_attention) that are "
        "recomputed in backward; everything else is kept. core_attn: what attention computes between its "
        "projections.",
        factory=list,
    )

    @override
    def _own_features(self) -> Iterator[str]:
        return super()._own_features() if self.recompute_modules or self.blocks else iter(())
