"""Small collectives of optimizers, each by the transport of its group and axis (``comm.job.job``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from deepspeed import comm
from deepspeed.comm.job.job import channel_along, transport_along


def add_over_ranks(tensor: Tensor, group: object | None, purpose: str, axis: str) -> None:
    """Adds ``tensor`` over the ranks of ``group``, in place. Every rank of the group must call it.

    Args:
        tensor: Contiguous, floating, of any shape that is equal on all ranks.
        group: The process group; None: the tensor stays unchanged.
        purpose: Names the collective in messages about timeouts.
        axis: Name of the axis along which the ranks lie, for the traffic counters.
    """
    if group is None:
        return
    summed = channel_along(group, tensor.device, axis).sum(tensor, purpose)
    if summed.data_ptr() != tensor.data_ptr():
        tensor.copy_(summed)


def largest_over_ranks(tensor: Tensor, group: object | None, purpose: str, axis: str) -> None:
    """Replaces ``tensor`` (any shape) by its elementwise maximum over the ranks of ``group``, in place.

    Every rank of the group must call it. The arguments are those of :func:`add_over_ranks`.
    """
    if group is not None:
        tensor.copy_(channel_along(group, tensor.device, axis).largest(tensor, purpose))


def exchange_parts(
    incoming: Tensor, outgoing: Tensor, numels: tuple[list[int], list[int]], group: object, purpose: str, axis: str
) -> None:
    """Sends a part of ``outgoing`` to each rank and fills ``incoming`` with the parts that the ranks send.

    Every rank of the group must call it.

    Args:
        incoming: 1-D; receives the parts in the order of their source ranks.
        outgoing: 1-D; the parts in the order of their destination ranks.
        numels: Numbers of elements from each rank, and for each rank.
        group: The process group.
        purpose: Names the collective in messages about timeouts.
        axis: Name of the axis along which the ranks lie, for the traffic counters.
    """
    received, sent = numels
    transport_along(group, outgoing.device, axis).all_to_all(outgoing, sent, incoming, received, label=purpose).wait()


def exchange_device(params: Iterable[Tensor], group: object | None) -> torch.device:
    """Returns the device of the tensors that a collective over ``group`` needs.

    It is the device of the parameters. If they are on the host and the backend works on accelerators only, it is the
    accelerator; a rank without parameters uses a device that the backend supports.

    Args:
        params: This rank's parameters, of any shape.
        group: The process group; None means that nothing is exchanged.
    """
    device = next((param.device for param in params), None)
    if group is None or (device is not None and device.type != "cpu"):
        return device or torch.device("cpu")
    backend = comm.get_backend(group)
    if backend == "nccl" or (device is None and "nccl" in backend):
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())
    return device or torch.device("cpu")
