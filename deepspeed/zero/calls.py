"""Compares calls that every rank must make, before any data moves; a difference raises on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DivergenceError

_WORDS = 240  # bytes of a call's description that are sent when calls differ


def compare_calls(transport: Transport, words: str, numbers: Sequence[int] = ()) -> list[list[int]]:
    """Makes sure that all ranks that train the same model make the same call.

    Every one of them must call it; ``comm.watch.watchdog`` detects a rank that never does.

    Args:
        words: The call with everything that must be equal: the text is compared and shown when it differs.

    Returns:
        ``numbers`` of every rank, in rank order.

    Raises:
        DivergenceError: The ranks made different calls; raised on every rank.
    """
    transport = transport.peers
    digest = zlib.crc32(words.encode())
    # Sent alone, since different calls send different numbers of numbers.
    mine = torch.tensor([digest], dtype=torch.int64)
    digests = transport.gather_small(mine, channel="call", label=words)
    if bool((digests != digest).any()):
        text = words.encode()[:_WORDS].ljust(_WORDS, b"\0")
        texts = transport.gather_small(
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64), channel="call", label=words
        )
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in texts.tolist()]
        raise DivergenceError(
            "ranks made different calls where all must make the same one: "
            + "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
            + ". Nothing was moved. Call it on every rank of the group, with the same parameters"
        )
    if not numbers:
        return [[] for _ in digests]
    gathered = transport.gather_small(torch.tensor(numbers, dtype=torch.int64), channel="call", label=words)
    return gathered.tolist()


def agree_to_go_on(transport: Transport, where: str, is_mixed: bool) -> bool:
    """Makes sure that an exception in work that ranks share left all of them at the same point.

    Otherwise the new transfers of a rank that starts over would be matched with those that the others expect of its
    abandoned work.

    Returns:
        Whether ``is_mixed`` holds on any rank.

    Raises:
        DivergenceError: Some rank did not fail, or failed at another point; raised on every rank.
    """
    rows = compare_calls(transport, f"agreement to continue after an exception in {where}", [is_mixed])
    return any(row[0] for row in rows)
