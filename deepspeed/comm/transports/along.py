"""One transport and one channel for each process group and axis, for code that is given a process group.

The engines' own transports are made where the engines are (``comm.transports.connect``). Losses, layers and loaders get
a process group from the caller; here it becomes a transport, so that what they exchange is watched, in the books of its
axis, and played by a plan.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed.comm.job.torch_groups import is_alive
from deepspeed.comm.job.world import PlayedGroup, is_initialized, stand_in
from deepspeed.comm.start.process_group import get_world_group
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.connect import transport_over
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.uncompiled import uncompiled

_BELOW_ENGINES = -2  # -1 is that of ``comm.transports.connect.shared_transport``
_made: dict[tuple[int, str], tuple[Any, Channel]] = {}
_played: WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], Channel]] = WeakKeyDictionary()
"""By the world that plays the ranks."""


def transport_along(group: Any, device: torch.device, axis: str) -> Transport:
    """Returns the transport of ``group`` for everything that its ranks exchange along ``axis``; made once.

    No ranks meet. All ranks of the group must use it in the same order.

    Args:
        group: A torch process group; None: all ranks.
        device: Where the tensors live.
        axis: For the books, as ``comm.job.mesh`` names it.
    """
    return channel_along(group, device, axis).transport


@uncompiled
def channel_along(group: Any, device: torch.device, axis: str) -> Channel:
    """Returns the channel of ``group`` along ``axis``, made at the first call; making it exchanges nothing."""
    others: Any = stand_in()
    if others is not None:  # played ranks have groups of their own, or those of the mesh
        ranks = group.ranks if isinstance(group, PlayedGroup) else tuple(others.mesh.group(others.rank, axis))
        played = _played.setdefault(others, {})
        if (ranks, axis) not in played:
            played[ranks, axis] = _channel(others.transport(device, ranks), axis)
        return played[ranks, axis]
    if not is_initialized():
        return Channel(LocalTransport())
    group = get_world_group() if group is None else group
    for key in [key for key, (old, _) in _made.items() if not is_alive(old)]:
        del _made[key]
    if (id(group), axis) not in _made:
        _made[id(group), axis] = group, _channel(transport_over(group, device), axis)
    return _made[id(group), axis][1]


def forget() -> None:
    """Forgets all of them, for tests."""
    _made.clear()
    _played.clear()


def _channel(transport: Transport, axis: str) -> Channel:
    transport.axis = axis
    # Its tags are those of no engine. Engines are counted apart: all ranks of a job make them, but a loss or a layer
    # that exchanges something may be on some stages only, and the engines of all stages must have one number.
    transport.owner = _BELOW_ENGINES - transport.next_owner("along")
    return Channel(transport)
