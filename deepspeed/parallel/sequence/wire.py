"""The transport of a group whose ranks share sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed.comm.connect import transport_over
from deepspeed.comm.mesh import SEQUENCE
from deepspeed.comm.process_group import get_world_group as world_group
from deepspeed.comm.store import is_alive
from deepspeed.comm.transport import LocalTransport, Transport
from deepspeed.comm.world import is_initialized, stand_in
from deepspeed.uncompiled import uncompiled


@dataclass
class _Made:
    """The transport of one group, and how often it was asked for."""

    group: Any
    transport: Transport
    uses: int = 0


_made: dict[int, _Made] = {}


@uncompiled
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
    for key in [key for key, made in _made.items() if not is_alive(made.group)]:
        del _made[key]
    return _kept(group, lambda: transport_over(group, device))


def uses_of_wires() -> int:
    """How often tokens were exchanged in this process so far, over all groups that are alive."""
    return sum(made.uses for made in _made.values())


def _kept(group: Any, make: Callable[[], Transport]) -> Transport:
    known = _made.get(id(group))
    if known is None or known.group is not group:
        transport = make()
        transport.axis = SEQUENCE
        transport.owner = transport.next_owner()  # its tags are those of no engine
        known = _made[id(group)] = _Made(group, transport)
    known.uses += 1
    return known.transport
