"""The channel along the tensor axis: the ranks that share layers."""

from __future__ import annotations

from datetime import timedelta

import torch

from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import TENSOR, Mesh
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.connect import channel_over
from deepspeed.comm.transports.transport import Transport


def connect(mesh: Mesh, device: torch.device | None, timeout: timedelta | None) -> Channel:
    """The channel along the tensor axis of a mesh. Every rank of the job must call it, in the same order.

    Args:
        mesh: Of the job.
        device: Where activations live.
        timeout: As of ``Axis.transport``.
    """
    axis = Job.current().axis_over(
        mesh.groups(TENSOR), TENSOR, why="the parts of layers", device=device, timeout=timeout
    )
    return over(axis.transport(device=device, timeout=timeout))


def over(transport: Transport) -> Channel:
    """A channel over a transport that nothing else uses."""
    transport.axis = TENSOR
    transport.owner = transport.next_owner()
    return channel_over(transport)
