"""Reads the coordinates and groups of a program's model-parallel unit (``mpu``).

An mpu is an object or a module with the groups of a program: the ranks that see other samples (*data*), the
ranks that hold other parts of the same samples (*sequence*), and the ranks that hold other parts of the model (*tensor*
and *pipe*). Programs spell it in several ways; this module reads all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.axes import DATA, PIPE, SEQUENCE, TENSOR
from deepspeed.comm.job.job import rank_in, size_of
from deepspeed.comm.job.mesh import Mesh, data_mesh
from deepspeed.errors import DeepSpeedConfigError

_STAGE = ("get_pipe_parallel_rank", "get_pipeline_model_parallel_rank", "get_stage_id")


@dataclass(frozen=True)
class RankCoordinates:
    """Holds this rank's place and groups, for each meaning that an axis can have (``deepspeed/axes.py``)."""

    # Torch process group of the ranks that hold the same part of the model (``SAME_PART``), among which ZeRO shards.
    # None: all ranks.
    zero_group: Any
    data_group: Any  # torch process group of the ranks that see other samples (``SAMPLES``); None: all ranks
    zero_size: int  # ranks in ``zero_group``
    zero_rank: int  # this rank's place there
    data_size: int  # ranks that see other samples
    data_rank: int  # this rank's place among them
    sequence_size: int = 1  # ranks that have parts of the same samples (``PARTS_OF_SAMPLES``)
    sequence_group: Any = None  # torch process group of them; None where there is one such rank
    model_size: int = 1  # ranks that hold other parts of one copy of the model (``OTHER_PARTS``)
    tensor_rank: int = 0  # this rank's place among those that hold other parts of the same layers (``PARTS_OF_LAYERS``)
    # The job's mesh, for single axes; ``comm.job.groups.group_along`` has its groups unless it is an mpu's. If an mpu
    # covers only some ranks of the job, the mesh of these ranks.
    mesh: Mesh = Mesh()
    # how many groups like ``zero_group`` there are, of consecutive ranks, each of which trains by itself
    islands: int = 1


def coordinates(mpu: Any) -> RankCoordinates:
    """Returns the coordinates that ``mpu`` gives; None: all ranks are data-parallel.

    Raises:
        DeepSpeedConfigError: It lacks a required method, or its sizes do not make up the job.
    """
    if mpu is None:
        size, rank = size_of(), rank_in()
        return RankCoordinates(None, None, size, rank, size, rank, mesh=data_mesh(size))
    sequence_size = int(call_mpu(mpu, "get_sequence_parallel_world_size", default=1))
    data_group = call_mpu(mpu, "get_data_parallel_group")
    joint = call_mpu(mpu, "get_sequence_data_parallel_group")
    if sequence_size == 1:
        zero_group = data_group if data_group is not None else joint
    else:
        zero_group = joint
    if zero_group is None:
        missing = "get_data_parallel_group()" if sequence_size == 1 else "get_sequence_data_parallel_group()"
        raise DeepSpeedConfigError(
            f"mpu: {missing} is missing or returns None, with {sequence_size} rank(s) per sequence; expected "
            "the torch process group of the ranks that hold the same part of the model, over which ZeRO "
            "shards. Return that group from the method"
        )
    zero_size, zero_rank = size_of(zero_group), rank_in(zero_group)
    found = RankCoordinates(
        zero_group=zero_group,
        data_group=data_group if data_group is not None else zero_group,
        zero_size=zero_size,
        zero_rank=zero_rank,
        data_size=int(call_mpu(mpu, "get_data_parallel_world_size", default=zero_size // sequence_size)),
        data_rank=int(
            call_mpu(mpu, "get_data_parallel_rank", default=_rank_or(data_group, zero_rank // sequence_size))
        ),
        sequence_size=sequence_size,
        sequence_group=call_mpu(mpu, "get_sequence_parallel_group"),
        model_size=_stages(mpu) * _tensor(mpu, "world_size", default=1),
        tensor_rank=_tensor(mpu, "rank", default=0),
    )
    _check(found)
    return found


def zero_group(mpu: Any) -> Any:
    """Returns the torch process group among which ZeRO shards; None (all ranks) without an mpu."""
    return coordinates(mpu).zero_group


def place_of(mpu: Any) -> dict[str, int]:
    """Returns this rank's place on the axes of a mesh, as ``mpu`` returns it.

    Raises:
        DeepSpeedConfigError: It lacks a required method, or its sizes do not make up the job.
    """
    found = coordinates(mpu)
    return {
        PIPE: int(call_mpu(mpu, *_STAGE, default=0)),
        DATA: found.data_rank,
        SEQUENCE: int(
            call_mpu(
                mpu,
                "get_sequence_parallel_rank",
                default=_rank_or(found.sequence_group, found.zero_rank % found.sequence_size),
            )
        ),
        TENSOR: found.tensor_rank,
    }


def knows_its_place(mpu: Any) -> bool:
    """Returns whether :func:`place_of` is this rank's alone: an mpu may know the stages, but not its own."""
    return (_stages(mpu) == 1 or call_mpu(mpu, *_STAGE) is not None) and (
        _tensor(mpu, "world_size", default=1) == 1 or _tensor(mpu, "rank", default=-1) >= 0
    )


def _check(found: RankCoordinates) -> None:
    if found.data_size * found.sequence_size != found.zero_size:
        raise DeepSpeedConfigError(
            f"mpu: {found.data_size} data-parallel ranks x {found.sequence_size} that share a sequence are "
            f"{found.data_size * found.sequence_size}, but the group of both has {found.zero_size} ranks; "
            "these must agree"
        )
    if found.model_size > 1 and found.model_size * found.zero_size != size_of():
        raise DeepSpeedConfigError(
            f"mpu: {found.model_size} model-parallel ranks x {found.zero_size} ranks that hold the same part are "
            f"{found.model_size * found.zero_size}, but the job has {size_of()}; all ranks of the job decide "
            "about an update together. Give the mpu groups that together hold all ranks of the job"
        )


def _rank_or(group: Any, otherwise: int) -> int:
    return otherwise if group is None else rank_in(group)


def call_mpu(mpu: Any, *names: str, default: Any = None) -> Any:
    """Returns the result of the first of these methods that the mpu has; the default without an mpu, too."""
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return default


def call_tensor_mpu(mpu: Any, what: str) -> Any:
    """Returns the mpu's tensor-parallel ``what`` (``group``, ``world_size`` or ``rank``); None if it has none.

    The names of model parallelism come last: they may span stages.
    """
    if hasattr(mpu, "initialize_sequence_parallel"):
        return None  # upstream's own unit: its model-parallel ranks are sequence-parallel ones under an older name
    return call_mpu(mpu, *(f"get_{kind}_parallel_{what}" for kind in ("tensor_model", "slice", "model")))


def _tensor(mpu: Any, what: str, default: int) -> int:
    found = call_tensor_mpu(mpu, what)
    return default if found is None else int(found)


def _stages(mpu: Any) -> int:
    return int(call_mpu(mpu, "get_pipe_parallel_world_size", "get_pipeline_model_parallel_world_size", default=1))
