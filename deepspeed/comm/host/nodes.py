"""Gathers in two steps over groups that span several nodes: first between nodes, then inside each.

Ranks with the same position on their nodes exchange slices, so every slice is sent to each other node once instead of
once per rank there; then neighbors exchange what they received. Each rank sends as many bytes as in one step, but only
one in ``width`` of the bytes between nodes. Slices arrive in the same places as in one step, with the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.environment import ranks_per_node
from deepspeed.comm.base.recorder import timed
from deepspeed.comm.host.gloo import GlooGather, GlooTransport
from deepspeed.comm.transports.native import NativeTransport, NativeWork
from deepspeed.comm.transports.transport import DoneWork, Transport, Work
from deepspeed.errors import DeepSpeedConfigError

HIERARCHICAL = "zero_optimization.mics_hierarchical_params_gather"


@dataclass(frozen=True)
class Nodes:
    """Describes the ranks of a group by node: ``width`` of them on each of ``count`` nodes, numbered node by node."""

    count: int
    width: int

    def neighbors(self, rank: int) -> list[int]:
        """Returns the other ranks on the node of ``rank``."""
        first = rank - rank % self.width
        return [other for other in range(first, first + self.width) if other != rank]

    def counterparts(self, rank: int) -> list[int]:
        """Returns the ranks with the same place on the other nodes."""
        return [other for other in range(rank % self.width, self.count * self.width, self.width) if other != rank]


def nodes_under(reports: Sequence[tuple[int, int]], groups: Sequence[Sequence[int]]) -> Nodes | str:
    """Returns the nodes under groups of ranks, the same for all of them; or a text why two steps are not needed.

    Args:
        reports: For every rank of the job: how many ranks its node has, and its place among them.
        groups: The ranks of each group, ascending; as many in each.

    Raises:
        DeepSpeedConfigError: The groups lie on nodes in different ways, or ranks are not numbered node by node. Equal
            on all ranks of the job.
    """
    width, size = reports[0][0], len(groups[0])
    for rank, (found, place) in enumerate(reports):
        if found != width or place != rank % width:
            raise DeepSpeedConfigError(
                f"{HIERARCHICAL}: expected nodes with equally many ranks, numbered node by node; found {width} ranks "
                f"on the node of rank 0, and rank {rank} as number {place} of {found} on its node (LOCAL_RANK and "
                "LOCAL_WORLD_SIZE show it). Start as many ranks on every node, or leave the key out"
            )
    if width == 1:
        return "every node has one rank"
    on_each = {count for ranks in groups for count in Counter(rank // width for rank in ranks).values()}
    if on_each == {size}:
        return f"the {size} ranks that share parameters are on one node of {width}"
    if on_each == {1}:
        return f"the {size} ranks that share parameters are on as many nodes"
    if len(on_each) > 1:
        raise DeepSpeedConfigError(
            f"{HIERARCHICAL}: the {size} ranks that share parameters (zero_optimization.mics_shard_size) do not fill "
            f"whole nodes of {width} ranks; choose a multiple or a divisor of {width}, or leave the key out"
        )
    here = on_each.pop()
    return Nodes(size // here, here)


def exchange_nodes(everyone: Transport, environ: Mapping[str, str], groups: Sequence[Sequence[int]]) -> Nodes | str:
    """Returns the nodes under ``groups``, as :func:`nodes_under`, which also raises. Every rank must call it."""
    width = ranks_per_node(environ, everyone.size, get_accelerator().device_count())
    place = int(environ.get("LOCAL_RANK") or everyone.rank % width)
    mine = torch.tensor([width, place], dtype=torch.int64)
    rows = everyone.gather_small(mine, channel="call", label="the numbers of ranks per node").tolist()
    return nodes_under([(row[0], row[1]) for row in rows], groups)


class _GlooGatherByNodes(GlooGather):
    """A gather in two steps; ``hand_on`` sends slices from other nodes to the neighbors."""

    def __init__(self, transport: GlooByNodes, flat: torch.Tensor, key: int, label: str) -> None:
        nodes, rank = transport.nodes, transport.rank
        length = flat.numel() // transport.size
        ticket = transport.issue("gather", key)
        self._nodes = nodes
        self._slices = flat.split(length)
        self._key = key
        far, near = nodes.counterparts(rank), nodes.neighbors(rank)
        self._from_far = [transport.receive(self._slices[peer], peer, key) for peer in far]
        # A neighbor sends its own slice, then those of its counterparts in rank order; one key keeps that order.
        works = [
            transport.receive(self._slices[source], peer, key)
            for peer in near
            for source in (peer, *nodes.counterparts(peer))
        ]
        works += [transport.send(self._slices[rank], peer, key) for peer in (*far, *near)]
        confirmations, more = transport.exchange_confirmations(sorted((*far, *near)), key)
        super().__init__(transport, works + more, flat, ticket, label, confirmations)
        transport.enqueue_forward(self)

    def hand_on(self) -> None:
        """Waits for slices from other nodes and sends them to the neighbors."""
        transport = self._transport
        from_far, self._from_far = self._from_far, []
        transport.guard_all(from_far, self._ticket, self._label)
        self._works += [
            transport.send(self._slices[source], peer, self._key)
            for peer in self._nodes.neighbors(transport.rank)
            for source in self._nodes.counterparts(transport.rank)
        ]

    @override
    def wait(self) -> None:
        self._transport.progress_pending(self)
        super().wait()


class GlooByNodes(GlooTransport):
    """Sends and receives that cross nodes once, instead of those of ``plain``."""

    def __init__(self, plain: GlooTransport, nodes: Nodes) -> None:
        super().__init__(plain.group, plain.rank, plain.size)
        self.take_place_of(plain)
        self.nodes = nodes

    @override
    def send(self, tensor: torch.Tensor, peer: int, key: int) -> Any:
        is_near = peer // self.nodes.width == self.rank // self.nodes.width
        where = "send inside nodes" if is_near else "send between nodes"
        traffic.record_ran(where, tensor.numel() * tensor.element_size(), self.axis)
        return self.start(self.group.send, tensor, peer, key)

    @override
    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        traffic.record_requested("all_gather", flat.numel() * flat.element_size(), self.axis)
        if flat.numel() == 0:
            return DoneWork()
        return _GlooGatherByNodes(self, flat, key, label)


class _JoinedWork:
    """Wraps several of torch's works as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class NativeByNodes(NativeTransport):
    """Two of the backend's gathers. The second is queued at once, behind the first, on a stream of its own.

    ``far`` are the ranks with this one's place, in node order; ``near`` those on this one's node.
    """

    def __init__(self, plain: NativeTransport, nodes: Nodes, far: NativeTransport, near: NativeTransport) -> None:
        super().__init__(plain.group, plain.rank, plain.size, plain.device)
        self.take_place_of(plain)
        self.nodes = nodes
        self._far = far
        self._near = near
        self._stream: Any = None

    @override
    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        traffic.record_requested("all_gather", flat.numel() * flat.element_size(), self.axis)
        if flat.numel() == 0:
            return DoneWork()
        count, width = self.nodes.count, self.nodes.width
        length = flat.numel() // self.size
        place = self.rank % width
        crossed = flat.new_empty(count * length)
        nbytes = length * flat.element_size()
        traffic.record_ran("all_gather_into_tensor between nodes", nbytes, self.axis)
        first = self._far.group._allgather_base(crossed, self.my_slice(flat))
        with self._behind(flat.device):
            first.wait()
            flat.view(count, width, length)[:, place].copy_(crossed.view(count, length))
            works = []
            for node in flat.view(count, width * length):
                works.append(self._near.group._allgather_base(node, node.narrow(0, place * length, length)))
                traffic.record_ran("all_gather_into_tensor inside nodes", nbytes, self.axis)
        return NativeWork(_JoinedWork(works), self, self.issue("gather", key), label, None, (flat, crossed))

    @contextmanager
    def _behind(self, device: torch.device) -> Iterator[None]:
        """Runs what is queued inside on a side stream, so that the current stream and it do not wait for each other."""
        accelerator = get_accelerator()
        if device.type == "cpu":
            yield
            return
        if self._stream is None:
            self._stream = accelerator.Stream()
        self._stream.wait_stream(accelerator.current_stream())
        with accelerator.stream(self._stream):
            yield
