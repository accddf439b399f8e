"""One transport and one channel for each process group and axis, for code that is given a process group.

The engines' own transports are made where the engines are (``comm.connect``). Losses, layers and loaders get a process
group from the caller; here it becomes a transport, so that what they exchange is watched, in the books of its axis, and
played by a plan.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.channel import Channel
from deepspeed.comm.connect import transport_over
from deepspeed.comm.process_group import get_world_group
from deepspeed.comm.store import is_alive
from deepspeed.comm.transport import LocalTransport, Transport
from deepspeed.comm.world import PlayedGroup, is_initialized, stand_in
from deepspeed.uncompiled import uncompiled

_made: dict[tuple[int, str], tuple[Any, Transport]] = {}
_channels: dict[int, tuple[Transport, Channel]] = {}


@uncompiled
def transport_along(group: Any, device: torch.device, axis: str) -> Transport:
    """Returns the transport of ``group`` for everything that its ranks exchange along ``axis``; made once.

    No ranks meet. All ranks of the group must use it in the same order.

    Args:
        group: A torch process group; None: all ranks.
        device: Where the tensors live.
        axis: For the books, as ``comm.mesh`` names it.
    """
    others: Any = stand_in()
    if others is not None:  # played ranks have groups of their own, or those of the mesh
        ranks = group.ranks if isinstance(group, PlayedGroup) else others.mesh.group(others.rank, axis)
        return _kept(others, axis, lambda: others.transport(device, ranks))
    if not is_initialized():
        return LocalTransport()
    group = get_world_group() if group is None else group
    for key in [key for key, (old, _) in _made.items() if not is_alive(old)]:
        _channels.pop(id(_made.pop(key)[1]), None)
    return _kept(group, axis, lambda: transport_over(group, device))


@uncompiled
def channel_along(group: Any, device: torch.device, axis: str) -> Channel:
    """Returns a channel over :func:`transport_along`; made once, and no ranks meet: sums are the transport's."""
    transport = transport_along(group, device, axis)
    known = _channels.get(id(transport))
    if known is None or known[0] is not transport:
        known = _channels[id(transport)] = transport, Channel(transport)
    return known[1]


def forget() -> None:
    """Forgets all of them, for tests."""
    _made.clear()
    _channels.clear()


def _kept(group: Any, axis: str, make: Any) -> Transport:
    key = id(group), axis
    known = _made.get(key)
    if known is None or known[0] is not group:
        transport = make()
        transport.axis = axis
        transport.owner = transport.next_owner()  # its tags are those of no engine
        known = _made[key] = group, transport
    return known[1]
