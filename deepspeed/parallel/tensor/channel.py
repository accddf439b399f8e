"""The channel along the tensor axis: the ranks that share layers."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch

from deepspeed.axes import TENSOR
from deepspeed.comm.job.connect import channel_over
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.channel import Channel


def connect(job: Job, mesh: Mesh, device: torch.device | None, timeout: timedelta | None) -> Channel:
    """Returns the channel along the tensor axis of a mesh. Every rank of the job must call it, in the same order.

    Activations live on ``device``; ``timeout`` is that of a communicator that is made, None: torch's.
    """
    return connect_lists(job, mesh.groups(TENSOR), "the parts of layers", device, timeout)


def connect_lists(
    job: Job, lists: Sequence[Sequence[int]], why: str, device: torch.device | None, timeout: timedelta | None
) -> Channel:
    """Returns the channel between the ranks of this rank's list. Every rank of the job must call it, in the same order.

    Each rank of the job is in exactly one of ``lists``; ``why`` describes what is sent, for messages. Models with equal
    ``lists`` and ``why`` share a communicator, as layers exchange in program order.
    """
    axis = job.axis_over(lists, TENSOR, why=why, device=device, timeout=timeout)
    return channel_over(job.connector.over(axis.group, device, TENSOR, is_numbered=True))
