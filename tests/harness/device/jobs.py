"""What runs beside the host: the transfers of a communicator, one after another in a thread of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

POLL = 0.001  # seconds between looks for what other ranks have sent


class Aborted(Exception):
    """The communicator was aborted while a job waited for other ranks."""


class Job:
    """One transfer. An aborted one is over too, with whatever is in its buffers, as NCCL's kernels are.

    Args:
        run: Does it; raises :class:`Aborted` if its queue is aborted meanwhile.
        after: Jobs that must be over first.
    """

    def __init__(self, run: Callable[[], None], after: Sequence[Job]) -> None:
        self._run = run
        self._after = after
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Blocks the calling thread; short waits, so that signals get through."""
        while not self._over.wait(0.1):
            pass

    def work(self, is_aborted: Callable[[], bool]) -> None:
        """Runs the transfer. Called by the queue's thread."""
        try:
            while not is_aborted() and any(not job.is_over for job in self._after):
                time.sleep(POLL)
            if not is_aborted():
                self._run()
        except Aborted:
            pass
        finally:
            self._run = _nothing  # it holds tensors
            self._after = ()
            self._over.set()


def _nothing() -> None:
    pass


def unfinished(*jobs: Sequence[Job]) -> tuple[Job, ...]:
    """Returns the jobs that are not over, each once."""
    return tuple(dict.fromkeys(job for some in jobs for job in some if not job.is_over))


class JobQueue:
    """Runs jobs in the order in which they were put.

    Args:
        name: Of its thread.
    """

    def __init__(self, name: str) -> None:
        self.is_aborted = False
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, run: Callable[[], None], after: Sequence[Job]) -> Job:
        job = Job(run, after)
        self._jobs.put(job)
        return job

    def abort(self) -> None:
        """Aborts the running job, and all later ones before they start."""
        self.is_aborted = True

    def close(self) -> None:
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.work(lambda: self.is_aborted)
