"""Which ranks share what: the registry of parallel groups that ``deepspeed.utils.groups`` shows.

A model-parallel program brings an ``mpu``, an object that knows its groups (``get_data_parallel_group()``,
``get_model_parallel_rank()``, ...); every question that it can answer is passed on to it. Without one the world is
purely data parallel: one data-parallel group of all ranks, and groups of one for everything else.

The leading underscore of most names is what callers in the ecosystem write.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist

from deepspeed.comm.new_groups import group_alone
from deepspeed.comm.process_group import get_all_ranks_from_group
from deepspeed.errors import CallOrderError, NotYetSupportedError

mpu: Any = None

_own_group: Any = None  # the group whose only member is this rank, made when first asked for
_own_group_world: Any = None  # the world it was made in; a new world needs a new one


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Registers ``mpu``. Every rank must call it.

    Args:
        ep_size: Number of ranks that share the experts of a layer; more than 1 is not supported yet.
        mpu: The program's model-parallel unit; None: keep the one registered before, if any.

    Raises:
        NotYetSupportedError: ``ep_size`` is above 1.
        CallOrderError: There is no process group yet.
    """
    if ep_size != 1:
        raise NotYetSupportedError(
            f"groups.initialize(ep_size={ep_size}): expert parallelism is not supported yet; use ep_size=1"
        )
    if not torch_dist.is_initialized():
        raise CallOrderError("groups.initialize needs the process group; call deepspeed.init_distributed() first")
    if mpu is not None:
        set_mpu(mpu)


def set_mpu(unit: Any) -> None:
    """Registers the program's model-parallel unit; None forgets it."""
    global mpu
    mpu = unit


def _ask(*names: str) -> Any:
    """The answer of the first method that the mpu has; None if it has none of them or there is no mpu."""
    for name in names:
        method = getattr(mpu, name, None)
        if method is not None:
            return method()
    return None


def _size_of(group: Any) -> int:
    return torch_dist.get_world_size(group)


def _alone() -> Any:
    """The group of this rank alone. Other ranks need not call it."""
    global _own_group, _own_group_world
    world = torch_dist.group.WORLD
    if _own_group is None or _own_group_world is not world:
        _own_group = group_alone()
        _own_group_world = world
    return _own_group


# --- data parallel: ranks that hold the same part of the model


def _get_data_parallel_group() -> Any:
    """The ranks among which gradients are averaged."""
    return _ask("get_data_parallel_group") or torch_dist.group.WORLD


def _get_data_parallel_world_size() -> int:
    """The size of :func:`_get_data_parallel_group`."""
    answer = _ask("get_data_parallel_world_size")
    return _size_of(_get_data_parallel_group()) if answer is None else answer


def _get_data_parallel_rank() -> int:
    """This rank's place in :func:`_get_data_parallel_group`."""
    answer = _ask("get_data_parallel_rank")
    return torch_dist.get_rank(_get_data_parallel_group()) if answer is None else answer


def _get_broadcast_src_rank() -> int:
    """The global rank of the first member of the data-parallel group."""
    return get_all_ranks_from_group(_get_data_parallel_group())[0]


# --- model (tensor) parallel: ranks that hold different parts of the same layers


def _get_model_parallel_group() -> Any:
    """The ranks among which layers are cut."""
    return _ask("get_model_parallel_group", "get_tensor_model_parallel_group") or _alone()


def _get_model_parallel_world_size() -> int:
    """The size of :func:`_get_model_parallel_group`; 1 without an mpu."""
    answer = _ask("get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    return 1 if answer is None else answer


def _get_model_parallel_rank() -> int:
    """This rank's place in :func:`_get_model_parallel_group`; 0 without an mpu."""
    answer = _ask("get_model_parallel_rank", "get_tensor_model_parallel_rank")
    return 0 if answer is None else answer


# --- sequence parallel: ranks that hold different parts of the same sequences


def _get_sequence_parallel_group() -> Any:
    """The ranks that share a sequence."""
    return _ask("get_sequence_parallel_group") or _alone()


def _get_sequence_parallel_world_size() -> int:
    """The size of :func:`_get_sequence_parallel_group`; 1 without an mpu."""
    answer = _ask("get_sequence_parallel_world_size")
    return 1 if answer is None else answer


def _get_sequence_parallel_rank() -> int:
    """This rank's place in :func:`_get_sequence_parallel_group`; 0 without an mpu."""
    answer = _ask("get_sequence_parallel_rank")
    return 0 if answer is None else answer


def _get_sequence_data_parallel_group() -> Any:
    """Sequence- and data-parallel ranks together: those among which ZeRO shards."""
    return _ask("get_sequence_data_parallel_group") or _get_data_parallel_group()


def _get_sequence_data_parallel_world_size() -> int:
    """The size of :func:`_get_sequence_data_parallel_group`."""
    answer = _ask("get_sequence_data_parallel_world_size")
    return _size_of(_get_sequence_data_parallel_group()) if answer is None else answer


def _get_sequence_data_parallel_rank() -> int:
    """This rank's place in :func:`_get_sequence_data_parallel_group`."""
    answer = _ask("get_sequence_data_parallel_rank")
    return torch_dist.get_rank(_get_sequence_data_parallel_group()) if answer is None else answer


# --- expert parallel: each rank holds all experts until expert parallelism exists


def _check_expert_group(group_name: str) -> None:
    if group_name != "ep_size_1":
        raise NotYetSupportedError(
            f"expert group {group_name!r}: expert parallelism is not supported yet; the only group is 'ep_size_1'"
        )


def _get_expert_parallel_group(group_name: str = "ep_size_1") -> Any:
    """The ranks among which the experts of a layer are spread."""
    _check_expert_group(group_name)
    return _alone()


def _get_expert_parallel_world_size(group_name: str = "ep_size_1") -> int:
    """The size of :func:`_get_expert_parallel_group`."""
    _check_expert_group(group_name)
    return 1


def _get_expert_parallel_rank(group_name: str = "ep_size_1") -> int:
    """This rank's place in :func:`_get_expert_parallel_group`."""
    _check_expert_group(group_name)
    return 0


def _get_expert_data_parallel_group(group_name: str = "ep_size_1") -> Any:
    """The ranks that hold the same experts."""
    _check_expert_group(group_name)
    return _get_data_parallel_group()


def _get_expert_data_parallel_world_size(group_name: str = "ep_size_1") -> int:
    """The size of :func:`_get_expert_data_parallel_group`."""
    _check_expert_group(group_name)
    return _get_data_parallel_world_size()


def _get_expert_data_parallel_rank(group_name: str = "ep_size_1") -> int:
    """This rank's place in :func:`_get_expert_data_parallel_group`."""
    _check_expert_group(group_name)
    return _get_data_parallel_rank()


def _get_expert_broadcast_src_rank(group_name: str = "ep_size_1") -> int:
    """The global rank of the first of those that hold the same experts."""
    return get_all_ranks_from_group(_get_expert_data_parallel_group(group_name))[0]


# --- the names that Megatron-style programs use


def get_tensor_model_parallel_group() -> Any:
    """The ranks among which layers are cut."""
    return _get_model_parallel_group()


def get_tensor_model_parallel_world_size() -> int:
    """The number of ranks among which layers are cut."""
    return _get_model_parallel_world_size()


def get_tensor_model_parallel_rank() -> int:
    """This rank's place among those that share a layer."""
    return _get_model_parallel_rank()


def get_tensor_model_parallel_src_rank() -> int:
    """The global rank of the first of those that share a layer."""
    if _get_model_parallel_world_size() == 1:
        return torch_dist.get_rank()
    return get_all_ranks_from_group(_get_model_parallel_group())[0]


get_model_parallel_group = get_tensor_model_parallel_group
get_model_parallel_world_size = get_tensor_model_parallel_world_size
get_model_parallel_rank = get_tensor_model_parallel_rank


def get_data_parallel_group() -> Any:
    """The ranks among which gradients are averaged."""
    return _get_data_parallel_group()


def get_data_parallel_world_size() -> int:
    """The number of ranks among which gradients are averaged."""
    return _get_data_parallel_world_size()


def get_data_parallel_rank() -> int:
    """This rank's place among those that average gradients."""
    return _get_data_parallel_rank()
