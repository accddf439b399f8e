"""Keeps gloo's event loops from preempting the thread that holds the lock they wait for.

gloo's thread for a group's sockets tries the lock of a connection and, while another thread holds it, asks the kernel
again at once (https://github.com/pytorch/gloo/issues/246). Where there are fewer cores than ranks, the holder often is
a thread that has just been interrupted in favor of such a loop, because a message has arrived: a quarter of the
processor time of a training went into such loops. A thread of the policy ``SCHED_BATCH`` interrupts nobody when it
wakes up. It gets its turn when another thread waits for something or at the end of a time slice, as all others do.
"""

import os
import sys


def interrupt_nobody() -> None:
    """Sets ``SCHED_BATCH`` for this thread, and for the threads and processes that it starts later."""
    if sys.platform == "linux":
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
