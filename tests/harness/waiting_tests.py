"""A worker of pytest-xdist of its own for tests that mostly wait, so that they leave no core idle.

Such a test waits for the end of a process, a time limit or a pause of its own, and with one worker per core that core
has nothing to do meanwhile. ``-n logical`` starts one worker more than there are cores: it runs these tests and ends,
while the others share the rest.
"""

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import WorkStealingScheduling
from xdist.scheduler.worksteal import MIN_PENDING
from xdist.workermanage import WorkerController

WAITING = (
    "tests/checkpoint/test_failures.py",
    "tests/comm/",
    "tests/elasticity/",
    "tests/examples/",
    "tests/gpu/",
    "tests/harness/",
    "tests/launcher/",
    "tests/parallel/pipe/test_never_hang.py",
    "tests/preemption/",
    "tests/run_report/",
    "tests/zero/gather/test_agreement.py",
)
"""Prefixes of the node ids of tests that wait for much of their time. One worker runs them; the others take some of
them when they have run everything else."""


def workers() -> int:
    """Returns how many workers ``-n logical`` starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


class WaitingTestsScheduling(WorkStealingScheduling):
    """``--dist worksteal`` in which the last of three or more workers runs tests of ``WAITING`` and nothing else.

    The others steal from it when their own tests are done, so that it is never the last one for long.

    Args:
        config: Of the process that distributes the tests.
        log: Where xdist notes what it does.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._is_divided = False
        self._waiting: WorkerController | None = None

    def check_schedule(self) -> None:
        if not self._is_divided:
            self._is_divided = True
            self._divide()
        waiting = self._waiting
        if waiting is not None and len(self.node2pending.get(waiting, ())) < MIN_PENDING:
            self._waiting = None
            if waiting in self.node2pending:
                waiting.shutdown()  # it runs its last test and ends, so it gets no others
        super().check_schedule()

    def _divide(self) -> None:
        """Gives the last worker its tests."""
        assert self.collection is not None
        waiting = [index for index in self.pending if self.collection[index].startswith(WAITING)]
        if len(self.nodes) < 3 or not 0 < len(waiting) < len(self.pending) / 2:
            return
        rest = sorted(set(self.pending) - set(waiting))
        self.pending[:] = waiting + rest
        self._waiting = self.nodes[-1]
        self._send_tests(self._waiting, len(waiting))
