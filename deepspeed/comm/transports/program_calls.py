"""Counts the transfers that a program starts by itself: what torch has counted, less what this package has started."""

from __future__ import annotations

from collections.abc import Collection

from deepspeed.comm.job.job import Job
from deepspeed.comm.job.torch_groups import groups_within, operations_of
from deepspeed.comm.transports.transport import Transport


def program_calls(ranks: Collection[int]) -> int | None:
    """Returns how many collectives, sends and recvs the program has started among ``ranks`` so far, in this process.

    Calls of ``torch.distributed`` and of ``deepspeed.comm`` count; transfers of a :class:`Transport` do not. Only the
    difference between two results has a meaning. On NCCL torch counts no sends and recvs.

    Args:
        ranks: Their numbers in the job. Groups that also have other ranks do not count.

    Returns:
        The number; None where the backend of a group counts nothing. There must be a process group.
    """
    transports = [member for member in list(Job.current().watched.watch.members) if isinstance(member, Transport)]
    total = 0
    for group in groups_within(ranks):
        counted = operations_of(group)
        if counted is None:
            return None
        total += counted - sum(transport.started for transport in transports if transport.group is group)
    return total
