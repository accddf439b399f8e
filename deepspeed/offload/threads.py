"""Threads for updates on the host: a fair share of the cores, while an engine of this process offloads something."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.logging import log_dist

_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def choose_threads(
    environment: Mapping[str, str], current: int, defaults: Collection[int], cores: int, local_ranks: int
) -> int | None:
    """Returns the threads of a rank: its share of the cores; None where the program has set a number itself.

    Args:
        environment: The environment variables with which torch has started.
        current: Threads that torch uses now.
        defaults: Those that torch may use where nobody has set a number.
        cores: Processors that this rank may run on.
        local_ranks: Ranks that run on these processors, this one included.
    """
    if "MKL_NUM_THREADS" in environment:
        return None
    if "OMP_NUM_THREADS" in environment:
        # torchrun sets 1 where it starts several ranks and the user has set nothing.
        if environment["OMP_NUM_THREADS"] != "1" or "TORCHELASTIC_RUN_ID" not in environment:
            return None
        defaults = (1,)
    return max(1, cores // local_ranks) if current in defaults else None


class CoreLease:
    """Holds this rank's share of the cores until :meth:`give_back`; several engines hold it together.

    Every rank of ``job`` must make one at the same place of the program.
    """

    # Of all engines of this process: how many hold the share, torch's threads before, and the share.
    _engines, _before, _share = 0, 0, 0

    def __init__(self, job: Transport) -> None:
        cores = usable_cores()
        place = [zlib.crc32(text.encode()) for text in (socket.gethostname(), str(sorted(cores)))]
        # srun and mpirun may bind each rank to cores of its own: ranks with other cores take none of this one's.
        rows = job.gather_small(torch.tensor(place), channel="call", label="the cores of each rank").tolist()
        current = torch.get_num_threads()
        if CoreLease._engines:
            self._holds = current == CoreLease._share
        else:
            share = choose_threads(os.environ, current, default_threads(cores), len(cores), rows.count(place))
            self._holds = share is not None
            if share is not None:
                CoreLease._before, CoreLease._share = current, share
                if share != current:
                    torch.set_num_threads(share)
                    log_dist(f"updates on the host: {share} threads, this rank's share of the cores, not {current}")
        CoreLease._engines += self._holds

    def give_back(self) -> None:
        """Returns to the threads before, where no other engine holds the share and the program has set no other."""
        if self._holds:
            self._holds = False
            CoreLease._engines -= 1
            if not CoreLease._engines and torch.get_num_threads() == CoreLease._share:
                torch.set_num_threads(CoreLease._before)


def usable_cores() -> set[int]:
    """Returns the processors that this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def default_threads(cores: Collection[int]) -> set[int]:
    """Returns the numbers that torch may begin with on ``cores``: one thread for each, or for each without SMT."""
    found = {len(cores)}
    with contextlib.suppress(OSError):
        found.add(len({Path(_SIBLINGS.format(core)).read_text() for core in cores}))
    return found
