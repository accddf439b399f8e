"""Calls that every rank must make alike: compared before any data moves, so that a difference raises everywhere."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from deepspeed.comm.transport import Transport
from deepspeed.errors import DivergenceError

_WORDS = 240  # bytes of a call's description that travel when calls differ


def compare_calls(transport: Transport, words: str, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Makes sure that all ranks that train the same model make the same call.

    Every one of them must call it; a rank that never does is found out by ``comm.watch``.

    Args:
        transport: Of the group, or of a part of it.
        words: The call with everything that must be equal: the text is compared and shown when it differs.
        numbers: Further numbers to tell the others; they may differ. As many on every rank.

    Returns:
        ``numbers`` of every rank, in rank order.

    Raises:
        DivergenceError: The ranks made different calls; raised on every rank.
    """
    transport = transport.everyone
    digest = zlib.crc32(words.encode())
    mine = torch.tensor([digest, *numbers], dtype=torch.int64)
    rows = transport.gather_small(mine, channel="call", label=words).tolist()
    if any(row[0] != digest for row in rows):
        text = words.encode()[:_WORDS].ljust(_WORDS, b"\0")
        texts = transport.gather_small(
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64), channel="call", label=words
        )
        said = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts.tolist()]
        raise DivergenceError(
            "ranks made different calls where all must make the same one: "
            + "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(said))
            + ". Nothing was moved. Call it on every rank of the group, with the same parameters"
        )
    return [row[1:] for row in rows]
