"""Which transport serves a group of ranks, and the one watch that all transports of a group share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.gloo import GlooTransport
from deepspeed.comm.native import NativeTransport
from deepspeed.comm.store import is_alive, rendezvous_store
from deepspeed.comm.transport import LocalTransport, Transport
from deepspeed.comm.watch import Watch
from deepspeed.comm.world import stand_in


def create_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """A transport over ``group``; every rank of the default group must call it in the same order.

    Args:
        group: A torch process group; None is the default group. Without an initialised process group the result is the
            transport of one rank.
        device: Where the buffers live; a group with several backends is used through the one of this device. None: the
            host, or the accelerator's current device where the backend is none of the host's.
        timeout: Time limit of the communicator that is made where order matters (not gloo), so that the transfers of
            two transports do not wait for each other.
    """
    if (others := stand_in()) is not None:
        return others.transport(device)
    if not dist.is_initialized():
        return LocalTransport()
    group = group if group is not None else dist.group.WORLD
    size = dist.get_world_size(group)
    if size == 1:
        return LocalTransport()
    rank = dist.get_rank(group)
    backend = backend_for(group, device)
    ranks = dist.get_process_group_ranks(group)
    if backend == "gloo":
        transport: Transport = GlooTransport(group, rank, size)
    else:
        alone = dist.new_group(ranks, timeout=timeout, backend=backend)
        transport = NativeTransport(alone, rank, size, device or torch.device(get_accelerator().current_device_name()))
    transport.ranks = tuple(ranks)
    transport.watch = _watch_of(group, ranks, rank, transport.abort)
    return transport


def part_of_transport(everyone: Transport, group: Any, scope: str) -> Transport:
    """A transport over some of the ranks of ``everyone``, watched together with it.

    Args:
        everyone: All ranks that make the same calls.
        group: The torch process group, of the same backend and for this transport alone where order matters.
        scope: Name of the group, unique among those of ``everyone``.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    transport: Transport
    if isinstance(everyone, NativeTransport):
        transport = NativeTransport(group, rank, size, everyone.device)
    else:
        transport = GlooTransport(group, rank, size)
    transport.ranks = tuple(dist.get_process_group_ranks(group))
    transport.scope = f"{scope}/"
    transport.members = tuple(everyone.ranks.index(rank) for rank in transport.ranks)
    transport.watch = everyone.watch
    transport.belongs_to(everyone)
    if everyone.watch is not None:
        everyone.watch.aborts[id(group)] = transport.abort
    return transport


_OUTSIDE_ENGINES = -1  # the owner of what is shared while there is no engine


def shared_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """The one transport of a group for what happens outside engines; arguments as of :func:`create_transport`."""
    if dist.is_initialized():
        group = group if group is not None else dist.group.WORLD
        known = _watches.get(id(group))
        if known is not None and known[0] is group and known[1].outside is not None:
            return known[1].outside
    transport = create_transport(group, device=device, timeout=timeout)
    transport.owner = _OUTSIDE_ENGINES
    if transport.watch is not None:
        transport.watch.outside = transport
    return transport


_watches: dict[int, tuple[Any, Watch]] = {}
_watched: dict[str, int] = {}
"""How many groups of the same ranks have had a watch: what one of them posts must not be taken for the other's word."""


def _watch_of(group: Any, ranks: list[int], rank: int, abort: Callable[[], None]) -> Watch:
    """The one watch of a process group: deadlocks between two engines on it are seen too."""
    for key, (old, watch) in list(_watches.items()):
        if not is_alive(old):
            watch.stop()
            del _watches[key]
    known = _watches.get(id(group))
    if known is None or known[0] is not group:
        members = "-".join(map(str, ranks)) if len(ranks) <= 8 else str(hash(tuple(ranks)))
        _watched[members] = _watched.get(members, 0) + 1
        scope = f"deepspeed/{members}/{_watched[members]}"
        known = (group, Watch(rendezvous_store(), scope, rank, len(ranks), abort))
        _watches[id(group)] = known
    return known[1]


def backend_for(group: Any, device: torch.device | None) -> str:
    """Name of the backend for tensors of ``device``: ``gloo`` for the CPU of ``cpu:gloo,cuda:nccl``."""
    kind = device.type if device is not None else "cpu"
    by_device = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(",") if ":" in entry)
    return by_device.get(kind) or dist.get_backend(group)


def warm_up(transport: Transport) -> None:
    """Connects every pair of ranks once, so that the first step does not pay for it."""
    transport.gather_small(torch.zeros(1, dtype=torch.int64), channel="call", label="the engine's start")
