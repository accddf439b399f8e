"""Timers, against a clock that the test turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from deepspeed.profiling import timer as timer_module
from deepspeed.profiling.ranges import instrument_w_nvtx
from deepspeed.profiling.timer import (
    NoopTimer,
    SynchronizedWallClockTimer,
    ThroughputTimer,
    memory_line,
    see_memory_usage,
)


@pytest.fixture
def clock(monkeypatch):
    state = SimpleNamespace(now=100.0, waits=0)

    def now(synchronize=True):
        state.waits += bool(synchronize)
        return state.now

    monkeypatch.setattr(timer_module, "_now", now)
    return state


@pytest.fixture
def lines(monkeypatch):
    collected: list[str] = []
    monkeypatch.setattr(timer_module, "log_dist", lambda line, ranks=None: collected.append(line))
    return collected


def test_stopwatch(clock):
    watch = SynchronizedWallClockTimer()("forward")
    for seconds in (1.0, 2.0):
        watch.start()
        clock.now += seconds
        watch.stop(record=True)
    assert clock.waits == 4
    assert watch.records == [1000.0, 2000.0] and watch.mean() == 1500.0
    assert watch.elapsed(reset=False) == watch.elapsed() == 3000.0
    assert watch.elapsed() == 0.0
    watch.start()
    clock.now += 1.0
    assert watch.elapsed(reset=False) == 1000.0 and watch.started
    clock.now += 1.0
    watch.stop(reset=True)
    assert watch.elapsed() == 1000.0
    watch.reset()
    assert watch.mean() == 0.0


def test_mean_leaves_out_the_extremes(clock):
    watch = SynchronizedWallClockTimer()("x")
    watch.records = [1000.0] + [10.0] * 8 + [0.0]
    assert watch.mean() == 10.0


def test_misuse_is_named(clock):
    watch = SynchronizedWallClockTimer()("step")
    with pytest.raises(RuntimeError, match="'step' is not running; start it"):
        watch.stop()
    watch.start()
    with pytest.raises(RuntimeError, match="'step' is running already; stop it"):
        watch.start()
    with pytest.raises(ValueError, match="normalizer"):
        SynchronizedWallClockTimer().log(["a"], normalizer=0)


def test_log_and_means(clock, lines):
    timers = SynchronizedWallClockTimer()
    for name, seconds in (("forward", 1.0), ("backward", 3.0)):
        timers(name).start()
        clock.now += seconds
        timers(name).stop(record=True)
    assert timers("forward") is timers("forward") and timers.has_timer("forward") and not timers.has_timer("step")
    assert timers.get_mean(["forward", "unknown"], normalizer=2.0, reset=False) == {"forward": 500.0}
    timers.log(["forward", "backward", "unknown"], normalizer=2.0, memory_breakdown=True)
    assert lines[0] == "time (ms) | forward: 500.00 | backward: 1500.00"
    assert "device allocated" in lines[1]
    assert timers("forward").elapsed() == 0.0


def test_noop_timer_takes_every_call():
    timers = NoopTimer()
    timers("a").start()
    timers("a").stop(record=True)
    assert timers("a").elapsed(reset=False) == timers("a").mean() == 0.0
    timers("a").reset()
    timers.log(["a"], normalizer=2)
    assert timers.has_timer("a") and timers.get_timers() == timers.get_mean(["a"]) == {}


def throughput(**options):
    lines: list[str] = []
    config = SimpleNamespace(enabled=True, synchronized=False)
    return ThroughputTimer(config, batch_size=10, logging_fn=lines.append, **options), lines


def test_throughput_counts_global_steps_after_the_first(clock):
    meter, lines = throughput(start_step=2, steps_per_output=2)
    assert meter.avg_samples_per_sec() == float("-inf")
    for step in range(6):
        for micro in range(2):
            meter.start()
            clock.now += 100.0 if step < 2 else 0.5
            meter.stop(global_step=micro == 1)
    assert meter.global_step_count == 6 and meter.micro_step_count == 12
    assert meter.avg_samples_per_sec() == pytest.approx(10.0)  # 10 samples per step of 1 s
    assert len(lines) == 2 and "step 4: 10.00 samples/s, 10.00 on average" in lines[0]
    meter.start()
    clock.now += 5.0
    meter.stop()
    assert meter.avg_samples_per_sec() == pytest.approx(10.0), "the first half of a step has no samples yet"
    meter.update_epoch_count()
    assert (meter.epoch_count, meter.micro_step_count) == (1, 0)


def test_throughput_lines_only_when_wanted(clock):
    meter, lines = throughput(start_step=0, steps_per_output=1, monitor_memory=True)
    meter.start()
    meter.stop(global_step=True, report_speed=False)
    assert lines == []
    meter.start()
    clock.now += 1
    meter.stop(global_step=True)
    assert "device allocated" in lines[0]
    meter, lines = throughput(start_step=0)
    meter.start()
    meter.stop(global_step=True)
    assert lines == []
    endless, lines = throughput(start_step=0, steps_per_output=float("inf"))
    endless.start()
    endless.stop(global_step=True)
    assert lines == []


def test_throughput_switched_off(clock):
    meter = ThroughputTimer(SimpleNamespace(enabled=True, synchronized=False), 1)
    assert not meter.initialized
    meter.start()
    assert meter.initialized
    meter = ThroughputTimer(SimpleNamespace(enabled=False, synchronized=True), 1)
    meter.start()
    meter.stop(global_step=True)
    assert meter.global_step_count == 0 and clock.waits == 0


def test_memory_line_only_if_forced(monkeypatch):
    from deepspeed.profiling import timer

    lines: list[str] = []
    monkeypatch.setattr(timer, "log_dist", lines.append)
    see_memory_usage("quiet")
    see_memory_usage("after forward", force=True)
    assert len(lines) == 1 and lines[0].startswith("after forward | device allocated ")
    assert "this process" in memory_line()


def test_ranges(monkeypatch):
    from deepspeed.profiling import ranges

    calls: list[object] = []
    device = SimpleNamespace(range_push=calls.append, range_pop=lambda: calls.append("pop"))
    monkeypatch.setattr(ranges, "get_accelerator", lambda: device)

    @instrument_w_nvtx
    def fails(value: int) -> int:
        """Its text."""
        raise ValueError(value)

    with pytest.raises(ValueError):
        fails(1)
    assert calls == [fails.__qualname__, "pop"] and fails.__doc__ == "Its text."
