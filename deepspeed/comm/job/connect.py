"""Chooses the transport of a group of ranks. The job's watch supervises all of them (``comm.watch.watched_group``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.accelerator import get_accelerator
from deepspeed.axes import DATA
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.host.gloo import GlooTransport
from deepspeed.comm.host.message_queue import MessageQueue
from deepspeed.comm.host.nodes import HIERARCHICAL, GlooByNodes, NativeByNodes, exchange_nodes
from deepspeed.comm.host.shared_exchange import SameHostTransport, same_host_sums
from deepspeed.comm.host.sockets import connect_on_host, limit_waits
from deepspeed.comm.job.new_groups import Owner, ProcessGroups
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.comm.watch.watched_group import GroupRecord, ShortMessages, WatchedGroups
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

HostTransport = GlooTransport
"""The backend for buffers in host memory where ranks share no memory."""

_OUTSIDE_ENGINES = -1  # owner number of transports used outside engines
_BELOW_ENGINES = -2  # first owner number of transports for losses, layers and loaders


class Connector:
    """Makes the transports of a job."""

    def __init__(self, ranks: Ranks, watched: WatchedGroups, process_groups: ProcessGroups) -> None:
        self._ranks = ranks
        self._watched = watched
        self._process_groups = process_groups

    def create(
        self,
        group: Any,
        device: torch.device | None,
        timeout: timedelta | None,
        axis: str = DATA,
        *,
        owner: Owner = "engine",
    ) -> Transport:
        """Returns a new transport over ``group``. Every rank of the job must call it, in the same order.

        Args:
            group: A torch process group; None is the group of all ranks. Ranks may give different groups, which
                together hold every rank once.
            device: Where the buffers live; selects the backend of a group with several. None:
                the host, or the accelerator's current device if the backend is not a host backend.
            timeout: Time limit of the communicator that is made where order matters (not gloo), so that the transfers
                of two transports do not wait for each other.
            axis: Along which the ranks lie, as ``comm.job.mesh`` names it.
            owner: The owner of that communicator.
        """
        if not self._ranks.is_initialized():
            return LocalTransport()
        group = group if group is not None else self._ranks.world
        backend = self._ranks.backend_for(group, device)
        if backend != "gloo":
            beside = self._process_groups.beside(group, timeout)
            if len(beside) < self._ranks.size_of():
                why = "an engine's transfers" if owner == "engine" else "transfers outside engines"
                group = self._process_groups.mine(beside, backend=backend, timeout=timeout, why=why, owner=owner)
        return self._over(group, backend, device, axis)

    def over(
        self, group: Any, device: torch.device | None, axis: str = DATA, *, is_numbered: bool = False
    ) -> Transport:
        """Returns a new transport over a group that exists; no other rank has to call.

        Where order matters (not gloo), what else is sent in the group must come in one order on all of its ranks too.
        With ``is_numbered`` its transfers have a number of their own, as those of an engine have.
        """
        made = self._over(group, self._ranks.backend_for(group, device), device, axis)
        if is_numbered:
            made.owner = made.next_owner()
        return made

    def subgroup_of(self, peers: Transport, group: Any, axis: str = DATA) -> Transport:
        """Returns a new transport over some of the ranks of ``peers``, all of which make the same calls.

        The torch process group has the same backend, and serves this transport alone where order matters.
        """
        native = isinstance(peers, NativeTransport)
        made = self._over(group, "native" if native else "gloo", peers.device if native else None, axis)  # type: ignore[attr-defined]
        made.belongs_to(peers)
        return made

    def outside_engines(
        self, record: GroupRecord, axis: str, device: torch.device | None, timeout: timedelta | None
    ) -> Transport:
        """Returns the one transport of a group for what happens outside engines; arguments as in :meth:`create`.

        Its axis is that of the first call.
        """
        if "outside" not in record.transports:
            made = self.create(record.group, device, timeout, axis, owner="job")
            made.owner = _OUTSIDE_ENGINES
            record.transports["outside"] = made
        found: Transport = record.transports["outside"]
        return found

    def below_engines(self, record: GroupRecord, axis: str, device: torch.device | None) -> Transport:
        """Returns the one transport of a group for what layers, losses and loaders exchange along ``axis``.

        No other rank has to call.
        """
        key = "layers", axis
        if key not in record.transports:
            made = self.over(record.group, device, axis)
            # Its tags are those of no engine. Engines are counted apart: all ranks of a job make them, but a loss or a
            # layer that exchanges something may be on some stages only, and the engines of all stages must have one
            # number.
            made.owner = _BELOW_ENGINES - made.next_owner("along")
            record.transports[key] = made
        found: Transport = record.transports[key]
        return found

    def objects(self, group: Any, *, patience: timedelta, why: str, axis: str = DATA) -> Transport:
        """Returns a new transport over ``group`` (None: all ranks) for objects on the host, perhaps of another thread.

        Every rank of the job must call it, in the same order. No group is made where gloo serves ``group``.
        ``patience`` is the longest wait for the other ranks.
        """
        if not self._ranks.is_initialized():
            return LocalTransport()
        group = group if group is not None else self._ranks.world
        if self._ranks.backend_for(group, None) != "gloo" and self._ranks.size_of(group) > 1:
            beside = self._process_groups.beside(group, None)
            group = self._process_groups.mine(beside, backend="gloo", timeout=patience, why=why)
        transport = self._over(group, "gloo", None, axis)
        if isinstance(transport, GlooTransport):
            assert transport.watch is not None
            transport.patience = patience
            transport.owner = transport.watch.next_owner(f"{transport.scope}objects")
        return transport

    def by_nodes(
        self,
        plain: Transport,
        everyone: Transport,
        groups: Sequence[Sequence[int]],
        *,
        device: torch.device | None,
        timeout: timedelta | None,
    ) -> Transport:
        """Returns a transport that gathers between nodes first, then inside each.

        Every rank of the job must call it, in the same order. It returns ``plain``, between the ranks that share
        slices, if these do not span nodes (logged in one line) or have nothing to wait for. ``groups`` are the ranks
        that share slices, of all groups of the job.

        Raises:
            DeepSpeedConfigError: A group has only some ranks of a node, or there are ranks outside ``everyone``.
        """
        if plain.watched is None:
            return plain
        if everyone.size != self._ranks.size_of():
            raise DeepSpeedConfigError(
                f"{HIERARCHICAL}: expected every rank to be data-parallel, found {everyone.size} data-parallel "
                f"ranks of {self._ranks.size_of()}. Leave the mpu out, or the key"
            )
        nodes = exchange_nodes(everyone, os.environ, groups)
        if isinstance(nodes, str):
            log_dist(f"{HIERARCHICAL} has no effect: {nodes}")
            return plain
        log_dist(
            f"parameters are gathered in two steps: between {nodes.count} nodes, then among the {nodes.width} of each"
        )
        if isinstance(plain, GlooTransport):
            return GlooByNodes(plain, nodes)
        assert isinstance(plain, NativeTransport)
        near = [ranks[first : first + nodes.width] for ranks in groups for first in range(0, plain.size, nodes.width)]
        far = [ranks[place :: nodes.width] for ranks in groups for place in range(nodes.width)]
        made = []
        backend = self._ranks.backend_for(self._ranks.world, device)
        for axis in (far, near):
            group = self._process_groups.mine(axis, backend=backend, timeout=timeout, why="gathers by nodes")
            transport = self.subgroup_of(everyone, group)
            assert isinstance(transport, NativeTransport)
            warm_up(transport)
            made.append(transport)
        return NativeByNodes(plain, nodes, *made)

    def _over(self, group: Any, backend: str, device: torch.device | None, axis: str) -> Transport:
        watched = self._watched.of(group)
        if watched is None:
            return LocalTransport()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        transport: Transport
        if backend == "gloo":
            _refuse_device_memory(device)
            transport = SameHostTransport(group, rank, size, axis)
        else:
            device = device or torch.device(get_accelerator().current_device_name())
            transport = NativeTransport(group, rank, size, device, axis)
        transport.joins(watched)
        return transport


def _refuse_device_memory(device: torch.device | None) -> None:
    """Raises if the backend is gloo, which needs host memory, and the buffers are on an accelerator."""
    accelerator = get_accelerator()
    if device is None or device.type != accelerator.device_name() or accelerator.shares_host_memory(device):
        return
    name = accelerator.communication_backend_name()
    raise DeepSpeedConfigError(
        f"the process group has the backend 'gloo', which carries host memory only, but the buffers of this engine are "
        f"on {device}: expected {name!r}. Start the group with init_distributed(dist_backend={name!r}) or "
        f"'cpu:gloo,{device.type}:{name}', or train on the processor with DS_ACCELERATOR=cpu"
    )


def warm_up(transport: Transport) -> None:
    """Connects every pair of ranks in advance, so that the first step does not include that time."""
    transport.gather_small(torch.zeros(1, dtype=torch.int64), channel="call", label="the engine's start")
    open_message_queue(transport)


def open_message_queue(transport: Transport) -> ShortMessages | None:
    """Connects the ranks of ``transport`` for short messages; None where they are not all on one host, or not on gloo.

    Every rank of ``transport`` must call it, at the same time. What there is of the process group is used again.
    """
    watched = transport.watched
    if watched is None:
        return None
    if not watched.has_met:

        def made_queue(transport: Transport, connections: dict[int, socket.socket]) -> MessageQueue:
            seconds = [limit_waits(connection, transport) for connection in connections.values()]
            return MessageQueue(connections, seconds[0])

        watched.queue = connect_on_host(transport, made_queue, "finding the ranks of one host")
        watched.has_met = True
        if watched.queue is not None:
            watched.watch.supervise(watched.queue)
    return watched.queue


def channel_over(transport: Transport) -> Channel:
    """Returns a channel over a transport; sums go through shared memory where all ranks are on one host."""
    return Channel(transport, same_host_sums(transport))
