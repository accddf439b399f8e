"""Small collectives of optimizers along an axis of the job."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.job.axis import Axis


def add_over_ranks(tensor: Tensor, axis: Axis | None, purpose: str) -> None:
    """Adds ``tensor``, contiguous, of one shape on all ranks of ``axis`` (if any), in place. Every one must call it."""
    if axis is None:
        return
    summed = axis.channel(tensor.device).sum(tensor, purpose)
    if summed.data_ptr() != tensor.data_ptr():
        tensor.copy_(summed)


def largest_over_ranks(tensor: Tensor, axis: Axis | None, purpose: str) -> None:
    """Replaces ``tensor`` (any shape) by its elementwise maximum over the ranks of ``axis``, in place.

    Every one of them must call it. The arguments are those of :func:`add_over_ranks`.
    """
    if axis is not None:
        tensor.copy_(axis.channel(tensor.device).largest(tensor, purpose))


def exchange_parts(
    incoming: Tensor, outgoing: Tensor, numels: tuple[list[int], list[int]], axis: Axis, purpose: str
) -> None:
    """Sends a part of ``outgoing`` to each rank and fills ``incoming`` with the parts that the ranks send.

    Every rank of the axis must call it.

    Args:
        incoming: 1-D; receives the parts in the order of their source ranks.
        outgoing: 1-D; the parts in the order of their destination ranks.
        numels: Numbers of elements from each rank, and for each rank.
    """
    received, sent = numels
    transport = axis.transport("layers", device=outgoing.device)
    transport.all_to_all(outgoing, sent, incoming, received, label=purpose).wait()


def exchange_device(params: Iterable[Tensor], axis: Axis | None) -> torch.device:
    """Returns the device of the tensors, of any shape, that a collective along ``axis`` (if any) needs.

    It is the device of the parameters. If they are on the host and the backend works on accelerators only, it is the
    accelerator; a rank without parameters uses a device that the backend supports.
    """
    device = next((param.device for param in params), None)
    if axis is None or (device is not None and device.type != "cpu"):
        return device or torch.device("cpu")
    backend = comm.get_backend(axis.group)
    if backend == "nccl" or (device is None and "nccl" in backend):
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())
    return device or torch.device("cpu")
