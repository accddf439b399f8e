"""The transport of a group whose ranks share sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepspeed.comm.connect import transport_over
from deepspeed.comm.mesh import SEQUENCE
from deepspeed.comm.process_group import get_world_group as world_group
from deepspeed.comm.store import is_alive
from deepspeed.comm.transport import LocalTransport, Transport
from deepspeed.comm.world import is_initialized, stand_in

_made: dict[int, tuple[Any, Transport]] = {}


def wire_of(group: Any, device: torch.device) -> Transport:
    """The transport of ``group`` for everything that its ranks exchange; made once.

    No ranks meet. All ranks of the group must use it in the same order.

    Args:
        group: A torch process group; None: all ranks.
        device: Where the tensors live.
    """
    others: Any = stand_in()
    if others is not None:  # a rehearsal knows no process groups, but has a mesh
        return _kept(others, lambda: others.transport(device, others.mesh.group(others.rank, SEQUENCE)))
    if not is_initialized():
        return LocalTransport()
    group = world_group() if group is None else group
    for key in [key for key, (old, _) in _made.items() if not is_alive(old)]:
        del _made[key]
    return _kept(group, lambda: transport_over(group, device))


def _kept(group: Any, make: Callable[[], Transport]) -> Transport:
    known = _made.get(id(group))
    if known is None or known[0] is not group:
        transport = make()
        transport.axis = SEQUENCE
        transport.owner = transport.next_owner()  # its tags are those of no engine
        known = _made[id(group)] = group, transport
    return known[1]
