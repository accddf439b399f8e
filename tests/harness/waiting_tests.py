"""A worker of pytest-xdist of its own for tests that mostly wait, so that they leave no core idle.

Such a test waits for the end of a process, a time limit or a pause of its own, and with one worker per core that core
has nothing to do meanwhile. ``-n logical`` starts one worker more than there are cores: it runs these tests and ends,
while the others share the rest.
"""

import os

import pytest
from xdist.remote import Producer
from xdist.scheduler import WorkStealingScheduling

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
"""Prefixes of the node ids of tests that wait for much of their time. One worker runs them all, so together they must
take less time than the share of each other worker."""


def workers() -> int:
    """Returns how many workers ``-n logical`` starts."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores + 1


class WaitingTestsScheduling(WorkStealingScheduling):
    """``--dist worksteal`` in which the last of three or more workers runs the tests of ``WAITING`` and nothing else.

    Args:
        config: Of the process that distributes the tests.
        log: Where xdist notes what it does.
    """

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._is_divided = False

    def check_schedule(self) -> None:
        if not self._is_divided:
            self._is_divided = True
            self._divide()
        super().check_schedule()

    def _divide(self) -> None:
        """Gives the last worker its tests. As it is to end after them, it neither gets others nor loses any."""
        assert self.collection is not None
        waiting = [index for index in self.pending if self.collection[index].startswith(WAITING)]
        if len(self.nodes) < 3 or not 0 < len(waiting) < len(self.pending) / 2:
            return
        rest = sorted(set(self.pending) - set(waiting))
        self.pending[:] = waiting + rest
        self._send_tests(self.nodes[-1], len(waiting))
        self.nodes[-1].shutdown()
