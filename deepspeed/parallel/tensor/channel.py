"""The channel along the tensor axis: the ranks that share layers."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed.comm.job.mesh import TENSOR, Mesh
from deepspeed.comm.job.new_groups import my_group
from deepspeed.comm.job.torch_groups import backend_for
from deepspeed.comm.job.world import rank_in, stand_in
from deepspeed.comm.transports.channel import Channel, channel_over
from deepspeed.comm.transports.connect import create_transport
from deepspeed.comm.transports.transport import Transport


def connect(mesh: Mesh, device: torch.device | None, timeout: timedelta | None) -> Channel:
    """The channel along the tensor axis of a mesh. Every rank of the job must call it, in the same order.

    Args:
        mesh: Of the job.
        device: Where activations live.
        timeout: As of ``comm.transports.connect.create_transport``.
    """
    if (others := stand_in()) is not None:
        made: Transport = others.transport(device, mesh.group(rank_in(), TENSOR))
    elif mesh.size(TENSOR) == mesh.world_size:
        made = create_transport(None, device=device, timeout=timeout)
    else:
        backend = backend_for(dist.group.WORLD, device)
        group = my_group(mesh.groups(TENSOR), backend=backend, timeout=timeout, why="the parts of layers")
        made = create_transport(group, device=device, timeout=timeout)
    return over(made)


def over(transport: Transport) -> Channel:
    """A channel over a transport that nothing else uses."""
    transport.axis = TENSOR
    transport.owner = transport.next_owner()
    return channel_over(transport)
