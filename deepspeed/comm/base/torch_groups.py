"""Facts of torch.distributed's groups: the rendezvous store, which groups exist, their backends."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def rendezvous_store() -> Any:
    """Returns the store of the default process group, shared by all its ranks, or None without one."""
    return distributed_c10d._get_default_store() if dist.is_initialized() else None


def is_alive(group: Any) -> bool:
    """Returns whether ``group`` has not been destroyed."""
    return group in distributed_c10d._world.pg_map


def is_collecting(group: Any) -> bool:
    """Returns whether torch coalesces collectives of ``group`` (None: all ranks), to start them as one."""
    state = distributed_c10d._world.pg_coalesce_state
    return bool(state) and (dist.group.WORLD if group is None else group) in state


def drop_collected(group: Any) -> None:
    """Ends a coalescing of ``group`` (None: all ranks) and drops what was collected in it; torch keeps it on errors."""
    collected: dict[Any, Any] = distributed_c10d._world.pg_coalesce_state
    collected.pop(dist.group.WORLD if group is None else group, None)


def groups_within(ranks: Collection[int]) -> list[Any]:
    """Returns the groups of two or more ranks that this rank is in and that have no rank outside ``ranks``."""
    groups = [group for group in distributed_c10d._world.pg_map if dist.get_world_size(group) > 1]
    return [group for group in groups if set(dist.get_process_group_ranks(group)) <= set(ranks)]


def operations_of(group: Any) -> int | None:
    """Returns how many operations torch has counted in a group, over the backends of all its devices.

    Gloo counts collectives, sends and recvs; NCCL counts collectives only. None: a backend counts nothing.
    """
    backends: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if all(backend is not other for other in backends):
            backends.append(backend)
    try:
        return sum(int(backend._get_sequence_number_for_group()) for backend in backends)
    except RuntimeError:
        return None


def counts_sends(group: Any, device: torch.device) -> bool:
    """Returns whether :func:`operations_of` also counts sends and recvs of tensors on ``device``."""
    name: str = group._get_backend(device).name()
    return name == "gloo"
