"""How many ranks the configuration wants along the axes of the job, and what they leave for data parallelism."""

from __future__ import annotations

import math

from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError

KEYS = {
    "expert": "expert_parallel.autoep_size",
    "sequence": "sequence_parallel_size",
    "tensor": "tensor_parallel.autotp_size",
}
"""The axes of a job that the configuration can ask for, each with its key. Stages are the pipeline module's."""


def degrees(root: Root) -> dict[str, int]:
    """The size that the configuration asks for along each axis of :data:`KEYS`; 1 where it asks for none."""
    experts = root.expert_parallel
    return {
        "expert": experts.autoep_size if experts is not None and experts.enabled else 1,
        "sequence": root.sequence_parallel_size,
        "tensor": max(root.tensor_parallel.autotp_size, 1),
    }


def data_parallel_size(root: Root, world_size: int, *, stages: int = 1) -> int:
    """The ranks that see other samples, in a job of ``world_size`` ranks: ``world / (tensor x sequence x stages)``.

    Experts are spread over ranks that hold the same part of the rest of the model (data x sequence), as Megatron-LM
    folds them, so expert parallelism does not lessen them.

    Args:
        root: The configuration.
        world_size: Ranks of the job.
        stages: Stages of the pipeline.

    Raises:
        DeepSpeedConfigError: The degrees do not divide ``world_size``, or the experts' not what the others leave.
    """
    wanted = degrees(root)
    sizes = {KEYS[axis]: wanted[axis] for axis in KEYS if axis != "expert"} | {"stages of the pipeline": stages}
    others = math.prod(sizes.values())
    if world_size % others:
        named = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise DeepSpeedConfigError(
            f"{named} takes groups of {others} ranks, which do not divide the {world_size} ranks of the job; start a "
            f"multiple of {others}, or lower a degree"
        )
    found = world_size // others
    same = found * wanted["sequence"]
    if same % wanted["expert"]:
        raise DeepSpeedConfigError(
            f"{KEYS['expert']} {wanted['expert']}: experts are spread over ranks that see other samples or other parts "
            f"of sequences, of which there are {same}; choose a divisor of {same}"
        )
    return found
