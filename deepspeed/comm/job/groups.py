"""The parallel groups of the job, under the names of ``deepspeed.utils.groups``.

A model-parallel program passes an ``mpu``, an object with its groups (``get_data_parallel_group()``,
``get_model_parallel_rank()``, ...), whose methods take precedence. Methods that it lacks are answered from a registered
mesh. Without either the world is purely data parallel: one data-parallel group of all ranks,
and groups of one for everything else.

A pipeline grid's ``get_model_parallel_*`` span its stages and the ranks that cut layers; those that cut layers it calls
``get_slice_parallel_*``.

The leading underscore of most names is what callers in the ecosystem write.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from deepspeed.axes import DATA, EXPERT, OTHER_PARTS, PIPE, SAME_EXPERTS, SAME_PART, SAMPLES, SEQUENCE, TENSOR
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.expert_groups import along_mesh
from deepspeed.comm.job.expert_groups import group_name as group_name_of
from deepspeed.comm.job.job import Job, is_initialized, rank_in, ranks_of, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.mpu import call_mpu, call_tensor_mpu
from deepspeed.errors import CallOrderError, DeprecatedException

if TYPE_CHECKING:
    mesh: Mesh | None
    mpu: Any
else:

    def __getattr__(name: str) -> Any:
        """Resolves ``mpu`` and ``mesh`` to those of the current job."""
        if name in ("mpu", "mesh"):
            return getattr(_job(), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _job() -> Job:
    return Job.adopt()


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Registers ``mpu``. Every rank must call it.

    Args:
        ep_size: Only 1: how many ranks share experts belongs to the layer, ``deepspeed.moe.layer.MoE(ep_size=...)``.
        mpu: The program's model-parallel unit; None: keep the one registered before, if any.

    Raises:
        DeprecatedException: ``ep_size`` is not 1.
        CallOrderError: There is no process group yet.
    """
    if ep_size != 1:
        raise DeprecatedException(
            f"groups.initialize(ep_size={ep_size}): how many ranks share experts belongs to the layer; leave it out "
            f"here and build the layer as deepspeed.moe.layer.MoE(..., ep_size={ep_size})"
        )
    if not is_initialized():
        raise CallOrderError("groups.initialize needs the process group; call deepspeed.init_distributed() first")
    if mpu is not None:
        set_mpu(mpu)


def set_mpu(unit: Any) -> None:
    """Registers the program's model-parallel unit; None forgets it.

    This module itself and a unit that only returns values of the registered mesh are not registered.
    """
    is_ours = unit is sys.modules[__name__] or getattr(unit, "is_part_of_the_mesh", False)
    _job().mpu = None if is_ours else unit


def set_mesh(found: Mesh | None, timeout: timedelta | None = None) -> None:
    """Registers the mesh of the job and makes the groups along its axes; None forgets it. Every rank must call it.

    Arguments and errors as in ``Job.set_mesh``.
    """
    _job().set_mesh(found, timeout)


def group_along(*axes: str, timeout: timedelta | None = None) -> Any:
    """Returns this rank's torch process group along axes of the registered mesh.

    Every rank must call it, in the same order; arguments and errors as in ``Job.group_along``.
    """
    return _job().group_along(*axes, timeout=timeout)


def _along(*axes: str) -> Any:
    return _job().known_group_along(*axes)


def _mesh_size(*axes: str) -> int:
    return _job().size_along(*axes)


def _mesh_place(*axes: str) -> int:
    return _job().place_along(*axes)


def _mesh_or_data(*axes: str) -> Any:
    """Returns a fact of the mpu's data-parallel ranks, if there is an mpu; otherwise one of the mesh."""
    job = _job()
    return _get_data_parallel_group() if job.mpu is not None or job.mesh is None else _along(*axes)


def _call_mpu(*names: str) -> Any:
    return call_mpu(_job().mpu, *names)


def group_of_one() -> Any:
    """Returns the group of this rank alone. Other ranks need not call it."""
    return _job().process_groups.alone()


# --- data parallel: ranks that hold the same part of the model


def _get_data_parallel_group() -> Any:
    """Returns the ranks among which gradients are averaged."""
    return _call_mpu("get_data_parallel_group") or _along(*SAMPLES) or _job().ranks.world


def _get_data_parallel_world_size() -> int:
    """Returns the size of :func:`_get_data_parallel_group`."""
    answer = _call_mpu("get_data_parallel_world_size")
    return size_of(_get_data_parallel_group()) if answer is None else answer


def _get_data_parallel_rank() -> int:
    """Returns this rank's place in :func:`_get_data_parallel_group`."""
    answer = _call_mpu("get_data_parallel_rank")
    return rank_in(_get_data_parallel_group()) if answer is None else answer


def _get_broadcast_src_rank() -> int:
    """Returns the global rank of the first member of the data-parallel group."""
    return ranks_of(_get_data_parallel_group())[0]


# --- model parallel: ranks that hold different parts of the model


def _call_model_mpu(what: str) -> Any:
    """Calls the mpu for model-parallel ranks; None if the mpu uses these names for sequence-parallel ranks."""
    if hasattr(_job().mpu, "initialize_sequence_parallel"):
        return None
    return _call_mpu(f"get_model_parallel_{what}", f"get_tensor_model_parallel_{what}")


def _get_model_parallel_group() -> Any:
    """Returns the ranks that hold different parts of one copy of the model: tensor ranks of all pipeline stages."""
    return _call_model_mpu("group") or _along(*OTHER_PARTS) or group_of_one()


def _get_model_parallel_world_size() -> int:
    """Returns the size of :func:`_get_model_parallel_group`; 1 without an mpu or a mesh."""
    answer = _call_model_mpu("world_size")
    return _mesh_size(*OTHER_PARTS) if answer is None else answer


def _get_model_parallel_rank() -> int:
    """Returns this rank's place in :func:`_get_model_parallel_group`; 0 without an mpu or a mesh."""
    answer = _call_model_mpu("rank")
    return _mesh_place(*OTHER_PARTS) if answer is None else answer


# --- sequence parallel: ranks that hold different parts of the same sequences


def _get_sequence_parallel_group() -> Any:
    """Returns the ranks that share a sequence."""
    return _call_mpu("get_sequence_parallel_group") or _along(SEQUENCE) or group_of_one()


def _get_sequence_parallel_world_size() -> int:
    """Returns the size of :func:`_get_sequence_parallel_group`; 1 without an mpu or a mesh."""
    answer = _call_mpu("get_sequence_parallel_world_size")
    return _mesh_size(SEQUENCE) if answer is None else answer


def _get_sequence_parallel_rank() -> int:
    """Returns this rank's place in :func:`_get_sequence_parallel_group`; 0 without an mpu or a mesh."""
    answer = _call_mpu("get_sequence_parallel_rank")
    return _mesh_place(SEQUENCE) if answer is None else answer


def _get_sequence_data_parallel_group() -> Any:
    """Returns the sequence- and data-parallel ranks together: those among which ZeRO shards."""
    return _call_mpu("get_sequence_data_parallel_group") or _mesh_or_data(*SAME_PART)


def _get_sequence_data_parallel_world_size() -> int:
    """Returns the size of :func:`_get_sequence_data_parallel_group`."""
    answer = _call_mpu("get_sequence_data_parallel_world_size")
    return size_of(_get_sequence_data_parallel_group()) if answer is None else answer


def _get_sequence_data_parallel_rank() -> int:
    """Returns this rank's place in :func:`_get_sequence_data_parallel_group`."""
    answer = _call_mpu("get_sequence_data_parallel_rank")
    return rank_in(_get_sequence_data_parallel_group()) if answer is None else answer


# --- expert parallel: by name, ``ep_size_<n>``; each rank holds all experts unless layers or a mesh spread them


def _expert_groups(group_name: str) -> tuple[Any, Any]:
    if group_name != group_name_of(_mesh_size(EXPERT)) or group_name in _made():
        return _job().experts.groups(group_name)
    return _along(EXPERT) or group_of_one(), _mesh_or_data(*SAME_EXPERTS)


def _made() -> list[str]:
    return [group_name_of(size) for size in _job().experts.sizes(made=True)]


def _get_expert_parallel_group(group_name: str = "ep_size_1") -> Any:
    """Returns the ranks among which the experts of a layer are spread."""
    return _expert_groups(group_name)[0]


def _get_expert_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_parallel_group(name) for name in _made()}


def _get_expert_parallel_world_size(group_name: str = "ep_size_1") -> int:
    return size_of(_get_expert_parallel_group(group_name))


def _get_expert_parallel_rank(group_name: str = "ep_size_1") -> int:
    """Returns this rank's place in :func:`_get_expert_parallel_group`."""
    return rank_in(_get_expert_parallel_group(group_name))


def _get_expert_parallel_group_ranks(group_name: str = "ep_size_1") -> list[int]:
    """Returns the global ranks of :func:`_get_expert_parallel_group`."""
    return list(ranks_of(_get_expert_parallel_group(group_name)))


def _get_expert_parallel_src_rank(group_name: str = "ep_size_1") -> int:
    """Returns the global rank of the first of those among which experts are spread."""
    return _get_expert_parallel_group_ranks(group_name)[0]


def _get_expert_data_parallel_group(group_name: str = "ep_size_1") -> Any:
    """Returns the ranks that hold the same experts."""
    return _expert_groups(group_name)[1]


def _get_expert_data_parallel_group_dict() -> dict[str, Any]:
    return {name: _get_expert_data_parallel_group(name) for name in _made()}


def _get_expert_data_parallel_world_size(group_name: str = "ep_size_1") -> int:
    return size_of(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_rank(group_name: str = "ep_size_1") -> int:
    """Returns this rank's place in :func:`_get_expert_data_parallel_group`."""
    return rank_in(_get_expert_data_parallel_group(group_name))


def _get_expert_data_parallel_group_ranks(group_name: str = "ep_size_1") -> list[int]:
    """Returns the global ranks of :func:`_get_expert_data_parallel_group`."""
    return list(ranks_of(_get_expert_data_parallel_group(group_name)))


def _get_expert_broadcast_src_rank(group_name: str = "ep_size_1") -> int:
    """Returns the global rank of the first of those that hold the same experts."""
    return _get_expert_data_parallel_group_ranks(group_name)[0]


def _get_max_expert_size() -> int:
    """Returns the largest number of ranks that share the experts of a layer; 1 where every rank has all experts."""
    return max(_job().experts.sizes(made=True), default=_mesh_size(EXPERT))


def _get_max_expert_size_name() -> str:
    return group_name_of(_get_max_expert_size())


def _get_max_expert_parallel_group() -> Any:
    return _get_expert_parallel_group(_get_max_expert_size_name())


def _get_expert_parallel_ranks(
    world_size: int,
    tensor_parallel_size_: int,
    expert_parallel_size_: int,
    pipeline_parallel_size_: int = 1,
    use_data_before_expert_parallel_: bool = False,
) -> tuple[list[list[int]], list[list[int]]]:
    """Returns which ranks share experts, and which hold the same ones; creates no groups.

    Neighbors cut the same layers, and stages have neighboring ranks. ``use_data_before_expert_parallel_`` is the
    configuration's ``use_data_before_expert_parallelism``.
    """
    samples = world_size // (tensor_parallel_size_ * pipeline_parallel_size_)
    axes = ((PIPE, pipeline_parallel_size_), (DATA, samples), (TENSOR, tensor_parallel_size_))
    found = along_mesh(Mesh(axes).check(world_size), expert_parallel_size_, data_first=use_data_before_expert_parallel_)
    return [list(ranks) for ranks in found.sharing], [list(ranks) for ranks in found.same]


def declare_expert_groups(ep_size: int, data_first: bool | None = None) -> None:
    """Declares the groups of layers whose experts ``ep_size`` ranks share, on the ranks of the job as they are known.

    Every rank must call it. Arguments and errors as in ``ExpertGroups.declare``.
    """
    job = _job()
    if ep_size in job.experts.sizes() and data_first is None:
        job.experts.declare(ep_size)
        return
    dense = () if job.mpu is None else job.process_groups.beside(_get_sequence_data_parallel_group(), None)
    job.experts.declare(ep_size, mesh=None if dense else job.mesh, dense=dense, data_first=data_first)


def expert_axis(ep_size: int, device: torch.device | None = None) -> Axis:
    """Returns the ranks that share the experts of a layer, for layers at their forward; see ``Job.axis``."""
    return _job().axis(EXPERT, size=ep_size, device=device)


def _create_expert_and_data_parallel(
    expert_parallel_size_: int, use_data_before_expert_parallel_: bool = False
) -> None:
    """Makes the groups of a size. Every rank must call it; ``deepspeed.initialize`` does for the layers of a model."""
    declare_expert_groups(expert_parallel_size_, use_data_before_expert_parallel_ or None)
    _job().experts.make_groups(expert_parallel_size_)


def _create_expert_data_and_model_parallel(
    expert_parallel_size_: int, mpu: Any, use_data_before_expert_parallel_: bool = False
) -> None:
    """Registers ``mpu``, which has tensor ranks, and makes the groups of a size. Every rank must call it."""
    set_mpu(mpu)
    _create_expert_and_data_parallel(expert_parallel_size_, use_data_before_expert_parallel_)


# --- the names that Megatron-style programs use


def get_tensor_model_parallel_group() -> Any:
    """Returns the ranks among which layers are cut."""
    return call_tensor_mpu(_job().mpu, "group") or _along(TENSOR) or group_of_one()


def get_tensor_model_parallel_world_size() -> int:
    """Returns the number of ranks among which layers are cut."""
    answer = call_tensor_mpu(_job().mpu, "world_size")
    return _mesh_size(TENSOR) if answer is None else answer


def get_tensor_model_parallel_rank() -> int:
    """Returns this rank's place among those that share a layer."""
    answer = call_tensor_mpu(_job().mpu, "rank")
    return _mesh_place(TENSOR) if answer is None else answer


def get_tensor_model_parallel_src_rank() -> int:
    """Returns the global rank of the first of those that share a layer."""
    if get_tensor_model_parallel_world_size() == 1:
        return rank_in()
    return ranks_of(get_tensor_model_parallel_group())[0]


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def get_data_parallel_group() -> Any:
    """Returns the ranks among which gradients are averaged."""
    return _get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """Returns the number of ranks among which gradients are averaged."""
    return _get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """Returns this rank's place among those that average gradients."""
    return _get_data_parallel_rank()
