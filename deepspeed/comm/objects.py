"""Python objects between ranks that act together: small messages on the host, which another thread may send too."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from deepspeed.comm.transport import Transport


def gather_objects(transport: Transport, value: Any, *, label: str) -> list[Any]:
    """Everybody's ``value``, by rank; every rank of the group must call it, and it blocks.

    Args:
        transport: Between the ranks, over host memory; see ``connect.objects_transport``.
        value: What pickle takes. The others unpickle it, so all ranks must trust each other.
        label: What the ranks are doing, for whoever waits in vain.
    """
    if transport.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = transport.gather_small(length, channel="objects", label=label).flatten().tolist()
    mine = data.new_zeros(max(lengths))
    mine[: data.numel()] = data
    rows = transport.gather_small(mine, channel="objects", label=label)
    return [pickle.loads(row[:numel].numpy().tobytes()) for row, numel in zip(rows, lengths, strict=True)]
