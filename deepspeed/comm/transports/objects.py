"""Small values between ranks that act together, on the host; another thread may send them too."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.comm.base.encoding import decode, encode
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CommunicationError


def gather_objects(transport: Transport, value: Any, *, label: str) -> list[Any]:
    """Returns every rank's ``value``, by rank. Every rank of the group must call it, and it blocks.

    Args:
        transport: Between the ranks, over host memory; see ``Connector.objects``.
        value: What :func:`deepspeed.comm.base.encoding.encode` takes: data, which cannot run code where it arrives.
        label: What the ranks are doing, for messages of waits in vain.

    Raises:
        CommunicationError: A rank's value cannot be sent; on every rank.
    """
    if transport.size == 1:
        return [value]
    try:
        mine = encode(value)
    except TypeError as error:
        mine = b""
        reason = str(error)
    gathered = gather_bytes(transport, mine, label=label)
    unsent = [rank for rank, each in enumerate(gathered) if not each]
    if unsent:
        own = f": {reason}" if transport.rank in unsent else f"; the message of rank {unsent[0]} says which"
        raise CommunicationError(
            f"{label}: expected data (numbers, texts, tensors, containers, dataclasses of a module), found on rank "
            f"{unsent[0]} an object that only code can restore{own}. Leave it out, or give its data instead"
        )
    return [decode(each) for each in gathered]


def gather_bytes(transport: Transport, mine: bytes, *, label: str) -> list[bytes]:
    """Returns every rank's bytes, by rank; arguments as of :func:`gather_objects`."""
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else torch.empty(0, dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = transport.gather_small(length, channel="objects", label=label).flatten().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    rows = transport.gather_small(padded, channel="objects", label=label)
    return [row[:numel].numpy().tobytes() for row, numel in zip(rows, lengths, strict=True)]
