"""Estimates the time of a collective between ranks on some nodes.

A ring passes every byte over each link once, so the slowest link on the way gives the rate: inside a node the links
between devices, between nodes the network, of which every device of the node that takes part has its own share. Each
step of the ring adds a latency, so that collectives between many ranks of small buffers do not scale. Sums of small
buffers go along a tree (`NCCL <https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/>`_).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed.plan.machine import Machine

_INSIDE = 1.5e-6  # seconds of one step of a ring inside a node
_BETWEEN = 8e-6  # seconds of one step between two nodes


@dataclass(frozen=True)
class RankGroup:
    """Ranks of a collective: every ``stride``-th rank, ``size`` of them."""

    size: int  # number of ranks
    stride: int = 1  # from one to the next, in ranks of the job


@dataclass(frozen=True)
class NetworkModel:
    """Turns collectives into seconds."""

    machine: Machine

    def spread(self, group: RankGroup) -> tuple[int, int]:
        """Returns on how many link domains a group lies, and the members on each."""
        near = max(1, min(group.size, self.machine.link_domain // group.stride))
        return math.ceil(group.size / near), near

    def gather(self, nbytes: float, group: RankGroup) -> float:
        """Returns the seconds of an all-gather or a reduce-scatter of ``nbytes`` in the full buffer."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        domains, near = self.spread(group)
        inside = nbytes * (group.size - 1) / group.size / self._link if near > 1 else 0.0
        between = nbytes * (domains - 1) / domains / near / self._network
        steps = _INSIDE * (group.size - domains) + _BETWEEN * (domains - 1)
        return max(inside, between) + steps + self._start

    def all_reduce(self, nbytes: float, group: RankGroup) -> float:
        """Returns the seconds of an all-reduce of ``nbytes``."""
        if group.size == 1 or nbytes <= 0:
            return 0.0
        domains, near = self.spread(group)
        steps = 2 * (_INSIDE * near + _BETWEEN * math.log2(domains)) + self._start
        alone = _INSIDE * (group.size - domains) + _BETWEEN * (domains - 1) + self._start
        # On processors a sum of more than two ranks is a reduction and a gather, which each costs a start.
        again = self._start if self.machine.device.cores and group.size > 2 else 0.0
        return 2 * (self.gather(nbytes, group) - alone) + min(steps + again, 2 * alone)

    def all_to_all(self, nbytes: float, group: RankGroup, *, copies: float = 1) -> float:
        """Returns the seconds of an all-to-all in which each rank has ``nbytes``, equally many for every rank.

        ``copies`` of each row are among them, for that many experts at random. One of them crosses to each link domain
        that needs any, and is passed on there.
        """
        if group.size == 1 or nbytes <= 0:
            return 0.0
        domains, near = self.spread(group)
        inside = nbytes * (near - 1) / group.size / self._link
        between = nbytes * (group.size - near) / group.size / self._network
        if copies > 1 and domains > 1:
            reached = (domains - 1) * (1 - (1 - 1 / domains) ** copies)  # other domains of a row, on average
            between = min(between, nbytes / copies * reached / self._network)
            inside = nbytes * (near - 1) / near / self._link
        return max(inside, between) + self._start + (_BETWEEN if domains > 1 else _INSIDE) * math.log2(group.size)

    def sum_of_activations(self, nbytes: float, group: RankGroup) -> float:
        """Returns the seconds of a sum of ``nbytes`` between ranks that share layers."""
        if not self._shares_memory(group):
            return self.all_reduce(nbytes, group)
        return self._shared_seconds(nbytes * (group.size - 1))

    def exchange_of_activations(self, nbytes: float, group: RankGroup, *, copies: float = 1) -> float:
        """Returns the seconds of an exchange of tokens; arguments are those of :meth:`all_to_all`."""
        if not self._shares_memory(group):
            return self.all_to_all(nbytes, group, copies=copies)
        return self._shared_seconds(nbytes * (group.size - 1) / group.size)

    def _shares_memory(self, group: RankGroup) -> bool:
        """Returns whether activations go through memory that all ranks of a group can read."""
        return group.size > 1 and self.machine.device.efficiency.shared_link > 0 and self.spread(group)[0] == 1

    def _shared_seconds(self, nbytes: float) -> float:
        """Returns the seconds that a rank takes to read ``nbytes`` of other ranks from shared memory."""
        if nbytes <= 0:
            return 0.0
        reached = self.machine.device.efficiency
        return nbytes / reached.shared_link + reached.shared_start

    def send(self, nbytes: float, stride: int) -> float:
        """Returns the seconds of a message to the rank that is ``stride`` further."""
        domains, _ = self.spread(RankGroup(2, stride))
        rate, latency = (self._network, _BETWEEN) if domains > 1 else (self._link, _INSIDE)
        return nbytes / rate + latency + self._start

    def slowdown(self, seconds: float, waits: float) -> float:
        """Returns the seconds by which a collective of ``seconds`` slows computation in all but its ``waits``."""
        return self.machine.device.efficiency.contention * max(0.0, seconds - waits)

    @property
    def _link(self) -> float:
        return self.machine.device.link * self.machine.device.efficiency.link

    @property
    def _network(self) -> float:
        return self.machine.network * self.machine.device.efficiency.network

    @property
    def _start(self) -> float:
        return self.machine.device.efficiency.start
