"""The transport and the channel of a group whose ranks share sequences."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch

from deepspeed.comm.job.mesh import SEQUENCE
from deepspeed.comm.transports.along import channel_along, transport_along
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import Transport
from deepspeed.uncompiled import uncompiled

_uses: WeakKeyDictionary[Transport, int] = WeakKeyDictionary()


@uncompiled
def wire_of(group: Any, device: torch.device) -> Transport:
    """Returns the transport of ``group`` for an exchange of tokens; arguments as for ``transport_along``."""
    transport = transport_along(group, device, SEQUENCE)
    _uses[transport] = _uses.get(transport, 0) + 1
    return transport


def uses_of_wires() -> int:
    """Returns how often tokens were exchanged in this process so far, over all groups that are alive."""
    return sum(_uses.values())


@uncompiled
def channel_of(group: Any, device: torch.device) -> Channel:
    """Returns the channel of ``group``, for losses; arguments as of ``comm.transports.along.transport_along``."""
    return channel_along(group, device, SEQUENCE)
