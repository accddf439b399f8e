"""Runs torch's collectives with their waits supervised by the job's watch.

Where a transfer runs on a stream (NCCL), the call returns at once, so it is passed to torch unchanged. On the host it
is started first, so that torch itself reports wrong arguments, and then waited for.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from typing import Any

import torch

from deepspeed.comm.base.torch_groups import is_collecting
from deepspeed.comm.job.job import Job
from deepspeed.comm.watch.watched_group import WatchedGroup


class SupervisedWork:
    """A torch ``Work`` whose wait is supervised; all else is forwarded to the work."""

    def __init__(
        self,
        work: Any,
        watched: WatchedGroup,
        ticket: tuple[str, int],
        label: str,
        members: tuple[int, ...] | None = None,
    ) -> None:
        self._work = work
        self._watched = watched
        self._ticket = ticket
        self._label = label
        self._members = members

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Blocks until the transfer is done; may be called again."""
        arrived: list[bool] = []
        arguments = () if timeout is None else (timeout,)
        self._watched.guard(
            lambda: arrived.append(self._work.wait(*arguments)), self._ticket, self._label, self._members
        )
        return arrived[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def collective(name: str, start: Callable[..., Any], group: Any, tensor: torch.Tensor | None, async_op: bool) -> Any:
    """Runs a collective.

    Args:
        name: Its name in torch; equal on all ranks that take part.
        start: Torch's function with all arguments but ``async_op``.
        tensor: One of the tensors sent, any shape; None if the call blocks the host on every backend.
        async_op: Return at once, with a handle.

    Raises:
        DivergenceError: Some of the ranks wait for something else.
        CommunicationError: A rank has ended or died.
    """
    watched = _watching(group, tensor)
    work = start(async_op=async_op or watched is not None)
    if watched is None or work is None:
        return work
    handle = SupervisedWork(work, watched, watched.issue("collective", _key(name)), _words(name, tensor, watched))
    if async_op:
        return handle
    handle.wait()
    return None


def blocking(name: str, call: Callable[[], Any], group: Any, patience: float | None = None) -> None:
    """Runs a collective that torch offers only as one blocking call; ``patience`` as in ``Watch.wait``.

    Raises:
        DivergenceError: Some of the ranks wait for something else.
        CommunicationError: A rank has ended or died.
    """
    watched = _watching(group, None)
    if watched is None:
        call()
        return
    watched.guard(call, watched.issue("collective", _key(name)), _words(name, None, watched), patience=patience)


def between(
    name: str, start: Callable[[], Any], group: Any, tensor: torch.Tensor, peer: int, *, sends: bool, tag: int
) -> Any:
    """Starts a send or a receive of ``tensor`` (any shape) and returns its handle.

    ``start`` is torch's function with all its arguments, ``name`` its name; ``peer`` is the other rank's number in the
    job.
    """
    work = start()
    watched = _watching(group, tensor)
    if watched is None or work is None:
        return work
    ends = (watched.watch.rank, peer) if sends else (peer, watched.watch.rank)
    ticket = watched.issue(f"from {ends[0]} to {ends[1]}, {tag}")
    words = f"{name} of {tensor.numel()} elements {'to' if sends else 'from'} rank {peer}"
    return SupervisedWork(work, watched, ticket, words, ends)


def recv_from_any(call: Callable[[], Any], group: Any) -> None:
    """Runs a receive from whichever rank sends first; failures found by other ranks still end it."""
    watched = _watching(group, None)
    if watched is None:
        call()
    else:
        watched.guard(call, watched.issue("from anybody"), "recv from any rank", members=())


def _watching(group: Any, tensor: torch.Tensor | None) -> WatchedGroup | None:
    """Returns the watch of the wait; None where the host does not wait."""
    if torch.compiler.is_compiling() or is_collecting(group):
        return None
    watched = Job.adopt().watched.of(group)
    if watched is None or tensor is None:
        return watched
    return watched if watched.waits_on_host and tensor.device.type == "cpu" else None


@cache
def _key(name: str) -> int:
    return zlib.crc32(name.encode())


def _words(name: str, tensor: torch.Tensor | None, watched: WatchedGroup) -> str:
    what = "" if tensor is None else f" of {tensor.numel()} elements"
    among = f" among ranks {', '.join(map(str, watched.ranks))}" if watched.scope and len(watched.ranks) <= 16 else ""
    purpose = Job.current().purpose
    return f"{name}{what}{among}{f' ({purpose})' if purpose else ''}"
