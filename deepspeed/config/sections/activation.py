"""``activation_checkpointing``."""

from __future__ import annotations

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int


class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``; they do nothing until the program calls its functions."""

    partition_activations: Bool = key(False, "Split saved activations over the model-parallel ranks.")
    cpu_checkpointing: Bool = key(False, "Keep saved activations in host memory.")
    contiguous_memory_optimization: Bool = key(
        False, "One buffer for saved activations; needs partition_activations and number_checkpoints."
    )
    number_checkpoints: Int | None = key(None, "Number of checkpointed layers.", unit="layers", above=0)
    synchronize_checkpoint_boundary: Bool = key(False, "Synchronise the device at each checkpoint.")
    profile: Bool = key(False, "Time forward and backward of each checkpoint.")
