"""Which transport serves a group of ranks. Each is watched as part of the job's (``comm.watch.watched_group``)."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.comm.host.message_queue import Mail
from deepspeed.comm.host.shared_exchange import SameHostTransport
from deepspeed.comm.host.sockets import connect_on_host, limit_waits
from deepspeed.comm.job.new_groups import groups_beside, my_group
from deepspeed.comm.job.torch_groups import backend_for, is_alive
from deepspeed.comm.job.world import ranks_of, stand_in
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.comm.watch.watched_group import party_of
from deepspeed.errors import DeepSpeedConfigError


def create_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """A transport over ``group``; every rank of the default group must call it in the same order.

    Args:
        group: A torch process group; None is the default group. Ranks may give different groups, which together hold
            every rank once. Without an initialised process group the result is the transport of one rank.
        device: Where the buffers live; a group with several backends is used through the one of this device. None: the
            host, or the accelerator's current device where the backend is none of the host's.
        timeout: Time limit of the communicator that is made where order matters (not gloo), so that the transfers of
            two transports do not wait for each other.
    """
    if (others := stand_in()) is not None:
        return others.transport(device, None if group is None else ranks_of(group))
    if not dist.is_initialized():
        return LocalTransport()
    group = group if group is not None else dist.group.WORLD
    backend = backend_for(group, device)
    if backend != "gloo":
        beside = groups_beside(group, timeout)
        if len(beside) < dist.get_world_size():
            group = my_group(beside, backend=backend, timeout=timeout, why="an engine's transfers")
    return _over(group, backend, device)


def part_of_transport(peers: Transport, group: Any) -> Transport:
    """A transport over some of the ranks of ``peers``.

    Args:
        peers: All ranks that make the same calls.
        group: The torch process group, of the same backend and for this transport alone where order matters.
    """
    native = isinstance(peers, NativeTransport)
    if (others := stand_in()) is not None:
        played: Transport = others.transport(peers.device if native else None, ranks_of(group))  # type: ignore[attr-defined]
        played.belongs_to(peers)
        return played
    transport = _over(group, "native" if native else "gloo", peers.device if native else None)  # type: ignore[attr-defined]
    transport.belongs_to(peers)
    return transport


def transport_over(group: Any, device: torch.device | None = None) -> Transport:
    """A transport over a group that exists; no ranks meet.

    Args:
        group: A torch process group. Where order matters (not gloo), what else travels in it must come in one order on
            all of its ranks too.
        device: Where the tensors live.
    """
    return _over(group, backend_for(group, device), device)


def _over(group: Any, backend: str, device: torch.device | None) -> Transport:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    party = party_of(group)
    if party is None:
        return LocalTransport()
    transport: Transport
    if backend == "gloo":
        _refuse_device_memory(device)
        transport = SameHostTransport(group, rank, size)
    else:
        transport = NativeTransport(group, rank, size, device or torch.device(get_accelerator().current_device_name()))
    transport.joins(party)
    return transport


def _refuse_device_memory(device: torch.device | None) -> None:
    """Raises where gloo, which reads and writes host memory, would be given buffers in an accelerator's memory."""
    accelerator = get_accelerator()
    if device is None or device.type != accelerator.device_name() or accelerator.shares_host_memory(device):
        return
    name = accelerator.communication_backend_name()
    raise DeepSpeedConfigError(
        f"the process group has the backend 'gloo', which carries host memory only, but the buffers of this engine are "
        f"on {device}: expected {name!r}. Start the group with init_distributed(dist_backend={name!r}) or "
        f"'cpu:gloo,{device.type}:{name}', or train on the processor with DS_ACCELERATOR=cpu"
    )


def objects_transport(group: Any, *, patience: timedelta, why: str) -> Transport:
    """A transport over ``group`` for objects on the host, apart from the engines'; it may serve another thread.

    Every rank of the default group must call it, in the same order. No group is made where gloo serves ``group``.

    Args:
        group: A torch process group; None is the default group.
        patience: The longest wait for the other ranks.
        why: What it is for, in words.
    """
    if stand_in() is not None or not dist.is_initialized():
        return LocalTransport()
    group = group if group is not None else dist.group.WORLD
    if backend_for(group, None) != "gloo" and dist.get_world_size(group) > 1:
        group = my_group(groups_beside(group, None), backend="gloo", timeout=patience, why=why)
    transport = _over(group, "gloo", None)
    if isinstance(transport, GlooTransport):
        assert transport.watch is not None
        transport.patience = patience
        transport.owner = transport.watch.next_owner(f"{transport.scope}objects")
    return transport


_OUTSIDE_ENGINES = -1  # the owner of what is shared while there is no engine


def shared_transport(
    group: Any = None, *, device: torch.device | None = None, timeout: timedelta | None = None
) -> Transport:
    """The one transport of a group for what happens outside engines; arguments as of :func:`create_transport`."""
    if stand_in() is not None or not dist.is_initialized():
        return create_transport(group, device=device)
    group = group if group is not None else dist.group.WORLD
    for key in [key for key, (old, _) in _outside.items() if not is_alive(old)]:
        del _outside[key]
    if id(group) not in _outside:
        transport = create_transport(group, device=device, timeout=timeout)
        transport.owner = _OUTSIDE_ENGINES
        _outside[id(group)] = group, transport
    return _outside[id(group)][1]


_outside: dict[int, tuple[Any, Transport]] = {}


def warm_up(transport: Transport) -> None:
    """Connects every pair of ranks once, so that the first step does not pay for it."""
    transport.gather_small(torch.zeros(1, dtype=torch.int64), channel="call", label="the engine's start")
    open_mail(transport)


def open_mail(transport: Transport) -> Mail | None:
    """Connects the ranks of ``transport`` for short messages; None where they are not all on one host, or not on gloo.

    Every rank of ``transport`` must call it, at the same time. What there is of the process group is used again.
    """
    party = transport.party
    if party is None:
        return None
    if not party.has_met:
        party.mail = connect_on_host(transport, _made_mail, "finding the ranks of one host")
        party.has_met = True
        if party.mail is not None:
            party.watch.supervise(party.mail)
    return party.mail


def _made_mail(transport: Transport, connections: dict[int, socket.socket]) -> Mail:
    seconds = [limit_waits(connection, transport) for connection in connections.values()]
    return Mail(connections, seconds[0])
