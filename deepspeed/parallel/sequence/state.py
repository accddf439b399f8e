"""Process groups of ranks that share sequences, for programs that make them before ``deepspeed.initialize``.

This module is an mpu: ``deepspeed.initialize(mpu=parallel_state_sp)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deepspeed.axes import DATA, SEQUENCE
from deepspeed.comm.job import groups
from deepspeed.comm.job.job import rank_in, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import CallOrderError, DeepSpeedConfigError

is_part_of_the_mesh = True  # see comm.groups.set_mpu
_ds_features = ("deepspeed.parallel.sequence.feature",)  # when this module is the mpu


if TYPE_CHECKING:
    mesh: Mesh | None
else:

    def __getattr__(name: str) -> Any:
        if name == "mesh":  # deepspeed.initialize reads the groups from the mesh
            return _mesh()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class IndivisibleRanksError(DeepSpeedConfigError, RuntimeError):
    """The ranks of the job cannot be divided into groups of this size."""


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Makes the groups: neighboring ranks share sequences. Every rank must call it.

    Calling it again with the same number does nothing.

    Raises:
        DeepSpeedConfigError: (a ``ValueError``) The number is not above 1.
        IndivisibleRanksError: (also a ``RuntimeError``) The number of ranks is not divisible by it.
        CallOrderError: The job has another mesh already.
    """
    if sequence_parallel_size <= 1:
        raise DeepSpeedConfigError(
            f"initialize_sequence_parallel({sequence_parallel_size}): expected at least 2 ranks that share a sequence; "
            "without sequence parallelism leave the call out"
        )
    size = size_of()
    if size % sequence_parallel_size:
        raise IndivisibleRanksError(
            f"initialize_sequence_parallel({sequence_parallel_size}): the job has {size} ranks, which groups of "
            f"{sequence_parallel_size} do not make up; choose a divisor of {size}"
        )
    if groups.mesh is not None and groups.mesh.size(SEQUENCE) == sequence_parallel_size:
        return
    if groups.mesh is not None and groups.mesh.size(SEQUENCE) != 1:
        raise CallOrderError(
            f"initialize_sequence_parallel({sequence_parallel_size}): the job has groups for "
            f"{groups.mesh.size(SEQUENCE)} ranks that share a sequence already; use one number in the whole program"
        )
    groups.set_mesh(Mesh(((DATA, size // sequence_parallel_size), (SEQUENCE, sequence_parallel_size))))


def get_sequence_parallel_group() -> Any:
    """Returns the torch process group of the ranks that share a sequence."""
    return groups.group_along(SEQUENCE)


def get_sequence_parallel_world_size() -> int:
    """Returns the number of ranks that share a sequence."""
    return _mesh().size(SEQUENCE)


def get_sequence_parallel_rank() -> int:
    """Returns this rank's place among them."""
    return _mesh().position(rank_in(), SEQUENCE)


def get_data_parallel_group() -> Any:
    """Returns the torch process group of the ranks that see other samples."""
    return groups.group_along(DATA)


def get_data_parallel_world_size() -> int:
    """Returns the number of ranks that see other samples."""
    return _mesh().size(DATA)


def get_data_parallel_rank() -> int:
    """Returns this rank's place among them."""
    return _mesh().position(rank_in(), DATA)


def get_sequence_data_parallel_group() -> Any:
    """Returns the torch process group of sequence- and data-parallel ranks together, over which ZeRO shards."""
    return groups.group_along(DATA, SEQUENCE)


def get_sequence_data_parallel_world_size() -> int:
    """Returns the number of sequence- and data-parallel ranks together."""
    return _mesh().size(DATA, SEQUENCE)


def get_sequence_data_parallel_rank() -> int:
    """Returns this rank's place among sequence- and data-parallel ranks together."""
    return _mesh().position(rank_in(), DATA, SEQUENCE)


get_model_parallel_group = get_sequence_parallel_group
get_model_parallel_world_size = get_sequence_parallel_world_size
get_model_parallel_rank = get_sequence_parallel_rank


def _mesh() -> Mesh:
    if groups.mesh is None:
        raise CallOrderError(
            "parallel_state_sp: there are no groups yet; call initialize_sequence_parallel(n) on every rank first"
        )
    return groups.mesh
