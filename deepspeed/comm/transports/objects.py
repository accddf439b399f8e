"""Small values between ranks that act together, on the host; another thread may send them too."""

from __future__ import annotations

import json
import pickle
from typing import Any

import torch

from deepspeed.comm.transports.transport import Transport


def gather_objects(transport: Transport, value: Any, *, label: str) -> list[Any]:
    """Returns every rank's ``value``, by rank. Every rank of the group must call it, and it blocks.

    The transport (``Connector.objects``) is over host memory. The others unpickle the value, so all ranks must trust
    each other.
    """
    if transport.size == 1:
        return [value]
    return [pickle.loads(each) for each in _gather(transport, pickle.dumps(value), label)]


def gather_json(transport: Transport, value: Any, *, label: str) -> list[Any]:
    """Returns every rank's ``value``, by rank, as :func:`gather_objects` does. What comes is data and cannot run code.

    Tuples arrive as lists, this rank's own included.
    """
    text = json.dumps(value).encode()
    return [json.loads(each) for each in ([text] if transport.size == 1 else _gather(transport, text, label))]


def _gather(transport: Transport, mine: bytes, label: str) -> list[bytes]:
    data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    length = torch.tensor([data.numel()], dtype=torch.int64)
    lengths = transport.gather_small(length, channel="objects", label=label).flatten().tolist()
    padded = data.new_zeros(max(lengths))
    padded[: data.numel()] = data
    rows = transport.gather_small(padded, channel="objects", label=label)
    return [row[:numel].numpy().tobytes() for row, numel in zip(rows, lengths, strict=True)]
