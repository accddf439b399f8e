"""The transport and the channel of a process group along an axis, for code that is given a process group.

Losses, layers and loaders get a process group from the caller; here it becomes an axis of the job, so that what they
exchange is watched, counted under its axis, and simulated by a plan.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import Transport
from deepspeed.uncompiled import uncompiled


@uncompiled
def transport_along(group: Any, device: torch.device, axis: str) -> Transport:
    """Returns the transport for what the ranks of ``group`` exchange along ``axis``. Later calls return the same one.

    No other rank has to call. All ranks of the group must use it in the same order.

    Args:
        group: A torch process group; None: all ranks.
        device: Where the tensors live.
        axis: For the traffic counters, as ``comm.job.mesh`` names it.
    """
    return Job.current().axis_of(group, axis).transport("layers", device=device)


@uncompiled
def channel_along(group: Any, device: torch.device, axis: str) -> Channel:
    """Returns the channel of ``group`` along ``axis``, made at the first call; arguments as in transport_along."""
    return Job.current().axis_of(group, axis).channel(device)
