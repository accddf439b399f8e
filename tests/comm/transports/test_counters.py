"""What is counted while somebody reads it."""

from __future__ import annotations

from deepspeed.comm.transports.counters import WaitClock


def test_the_clock_runs_until_its_last_reader_leaves():
    clock = WaitClock()
    clock.start()
    clock.start()
    clock.stop()
    assert clock.is_running
    clock.stop()
    assert not clock.is_running
