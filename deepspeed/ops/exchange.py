"""Where an optimizer's own small collectives take place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def add_over_ranks(tensor: Tensor, group: object | None, purpose: str, axis: str = "data") -> None:
    """Adds ``tensor`` over the ranks of ``group``, in place; a collective unless that is None.

    Args:
        tensor: What is added.
        group: The process group.
        purpose: What it is for, for whoever waits in vain.
        axis: Along which the ranks lie, for the books of what travels.
    """
    if group is None:
        return
    from deepspeed import comm
    from deepspeed.comm import supervised
    from deepspeed.comm.counters import traffic

    nbytes = 2 * tensor.numel() * tensor.element_size()
    traffic.record_asked("all_reduce", nbytes, axis)
    traffic.record_ran("all_reduce", nbytes, axis)
    with supervised.purpose(purpose):
        comm.all_reduce(tensor, group=group)


def most_over_ranks(tensor: Tensor, group: object | None, purpose: str) -> None:
    """As :func:`add_over_ranks`, with the largest value in the place of the sum."""
    if group is None:
        return
    from deepspeed import comm
    from deepspeed.comm import supervised
    from deepspeed.comm.counters import traffic

    nbytes = 2 * tensor.numel() * tensor.element_size()
    traffic.record_asked("all_reduce", nbytes, "data")
    traffic.record_ran("all_reduce", nbytes, "data")
    with supervised.purpose(purpose):
        comm.all_reduce(tensor, op=comm.ReduceOp.MAX, group=group)


def exchange_parts(
    incoming: Tensor, outgoing: Tensor, numels: tuple[list[int], list[int]], kept: int, group: object, purpose: str
) -> None:
    """Sends a part of ``outgoing`` to each rank and fills ``incoming`` with what they send; a collective.

    Args:
        incoming: 1-D; the parts in the order of the ranks they come from.
        outgoing: 1-D; the parts in the order of the ranks they are for.
        numels: Elements from each rank, elements for each rank.
        kept: Of those, how many this rank sends to itself.
        group: The process group.
        purpose: What it is for, for whoever waits in vain.
    """
    from deepspeed import comm
    from deepspeed.comm import supervised
    from deepspeed.comm.counters import traffic

    traffic.record_asked("all_to_all", outgoing.numel() * outgoing.element_size(), "data")
    traffic.record_ran("all_to_all", (outgoing.numel() - kept) * outgoing.element_size(), "data")
    with supervised.purpose(purpose):
        comm.all_to_all_single(incoming, outgoing, *numels, group=group)


def exchange_device(params: Iterable[Tensor], group: object | None) -> torch.device:
    """The device of the tensors that a collective over ``group`` needs.

    That of the parameters, unless they lie on the host and the group's backend works on accelerators only; a rank
    without parameters follows the backend.

    Args:
        params: This rank's parameters.
        group: The process group; None means that nothing is exchanged.
    """
    device = next((param.device for param in params), None)
    if group is None or (device is not None and device.type != "cpu"):
        return device or torch.device("cpu")
    from deepspeed import comm

    backend = comm.get_backend(group)
    if backend == "nccl" or (device is None and "nccl" in backend):
        from deepspeed.accelerator import get_accelerator

        return torch.device(get_accelerator().current_device_name())
    return device or torch.device("cpu")
