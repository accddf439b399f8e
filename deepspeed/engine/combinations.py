"""Sections of the configuration that cannot be used together with ranks that share layers or sequences."""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.comm.job.mesh import TENSOR
from deepspeed.comm.job.mpu import Standing
from deepspeed.config.sections.root import Root
from deepspeed.engine.efficiency import hands_over_lengths, random_ltd_of
from deepspeed.engine.model_compression import eigenvalue_of
from deepspeed.errors import DeepSpeedConfigError


def refuse_combinations(root: Root, ranks: Standing) -> None:
    """Raises where each of two sections would do its work on what the other has taken away.

    Args:
        root: The configuration.
        ranks: Where this rank stands, whoever said so.

    Raises:
        DeepSpeedConfigError: There are such sections; all of them are listed.
    """
    problems = [*_with_shared_sequences(root, ranks.sequence_size), *_with_shared_layers(root, ranks.mesh.size(TENSOR))]
    if problems:
        raise DeepSpeedConfigError("\n".join(problems), tuple(problems))


def _with_shared_sequences(root: Root, size: int) -> Iterator[str]:
    """What looks at a whole sequence, of which a rank has a part only."""
    if size == 1:
        return
    shared = f"where {size} ranks share a sequence (sequence_parallel_size)"
    sparse = root.sparse_attention
    if sparse is not None and sparse.apply_to == "model":
        yield (
            f'sparse_attention.apply_to "model" {shared}: each rank would attend to its own tokens only; leave the '
            "section out, or set sequence_parallel_size to 1"
        )
    if hands_over_lengths(root):
        yield (
            f'curriculum_learning.curriculum_type "seqlen" {shared}: the forward would cut its part to the length of '
            "the whole; leave the key out and cut whole sequences before they are divided, to "
            "engine.curriculum_scheduler_legacy.get_current_difficulty() tokens"
        )
    if eigenvalue_of(root) is not None:
        yield (
            f"eigenvalue.enabled {shared}: attention between ranks has no second derivative; set it to false, or set "
            "sequence_parallel_size to 1"
        )
    if random_ltd_of(root) is not None:
        yield (
            f"data_efficiency.data_routing.random_ltd {shared}: its schedule counts the tokens of whole sequences, and "
            "each rank would keep so many of its part; disable it, or set sequence_parallel_size to 1"
        )


def _with_shared_layers(root: Root, size: int) -> Iterator[str]:
    """What replaces layers, or works on heads, that have been cut."""
    if size == 1:
        return
    shared = f"where {size} ranks share a layer (tensor_parallel.autotp_size)"
    sparse = root.sparse_attention
    if sparse is not None and sparse.apply_to == "model":
        yield (
            f'sparse_attention.apply_to "model" {shared}: its pattern is for all heads, and each rank has some of '
            "them; leave the section out, or set tensor_parallel.autotp_size to 1"
        )
    if root.weight_quantization is not None and root.weight_quantization.enabled:
        yield (
            f"weight_quantization.enabled {shared}: layers of few bits take the place of those that add gradients up "
            "over the ranks; disable it, or set tensor_parallel.autotp_size to 1 and let ZeRO stage 3 share the weights"
        )
