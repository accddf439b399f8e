"""Saving beside training: what is saved is the state at the call, failures come at the next call."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest
import torch

from deepspeed import comm
from deepspeed.checkpoint import disk
from deepspeed.checkpoint import save as saving
from deepspeed.checkpoint.directory import tags
from deepspeed.checkpoint.writer import FileWriter
from deepspeed.errors import CheckpointError
from tests.checkpoint.faults import faults
from tests.checkpoint.training import engine, fragments, joined, other_state, train
from tests.harness import assert_states_equal, run_ranks


class Gate:
    """Holds the writing back until it is opened."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._original = saving._write_files

    def __enter__(self) -> Gate:
        def write(*given):
            assert self._opened.wait(60)
            return self._original(*given)

        saving._write_files = write
        return self

    def open(self) -> None:
        self._opened.set()

    def __exit__(self, *_: object) -> None:
        self.open()
        saving._write_files = self._original


def save_beside(folder: str, stage: int, by_config: str | None):
    settings = {"checkpoint": {by_config: {"decoupled": True} if by_config == "writer" else True}} if by_config else {}
    run = engine(stage, "bf16", **settings)
    train(run, range(3))
    expected = fragments(run), other_state(run)
    rng = torch.get_rng_state()
    with Gate() as gate:
        assert run.save_checkpoint(folder, tag="one", **({} if by_config else {"async_save": True}))
        comm.barrier()
        assert not list(tags(Path(folder)))
        losses = train(run, range(3, 6))  # collectives of training and of the save do not meet
        gate.open()
        run.wait_for_checkpoint()
    again = engine(stage, "bf16", seed=8)
    again.load_checkpoint(folder, tag="one")
    assert torch.equal(torch.get_rng_state(), rng)
    found = fragments(again), other_state(again)
    return expected, found, losses, train(again, range(3, 6))


@pytest.mark.parametrize(("stage", "by_config"), [(0, None), (2, "async_save"), (3, "writer")])
def test_what_is_saved_is_the_state_at_the_call(stage, by_config, tmp_path):
    results = run_ranks(save_beside, 2, str(tmp_path), stage, by_config)
    for expected, found, losses, resumed in results:
        assert_states_equal(found[1], expected[1])
        assert resumed == losses
    assert_states_equal(joined([r[1][0] for r in results]), joined([r[0][0] for r in results]))


def next_save_waits(folder: str):
    run = engine(1, "fp32")
    order = []
    with Gate() as gate:
        run.save_checkpoint(folder, tag="one", async_save=True)
        opener = threading.Timer(0.3, lambda: (order.append("opened"), gate.open()))
        opener.start()
        run.save_checkpoint(folder, tag="two")
        order.append("saved")
        opener.join()
    comm.barrier()
    return order, list(tags(Path(folder))), (Path(folder) / "latest").read_text()


def test_the_next_save_waits(tmp_path):
    for order, names, latest in run_ranks(next_save_waits, 2, str(tmp_path)):
        assert order == ["opened", "saved"] and names == ["one", "two"] and latest == "two"


def other_calls_wait(folder: str):
    """Calls that exchange messages over the channel of checkpoints, on which the save in the background does too."""
    run = engine(1, "fp32")
    weights = {name: value.clone() for name, value in run.module.state_dict().items()}
    calls = {
        "save_16bit_model": lambda: run.save_16bit_model(folder, "weights.bin"),
        "export_weights": lambda: list(run.export_weights()),
        "consolidated": run._consolidated_16bit_state_dict,
        "load_module_state_dict": lambda: run.load_module_state_dict({"module": weights}),
    }
    order = []
    for name, call in calls.items():
        with Gate() as gate:
            run.save_checkpoint(folder, tag=name, async_save=True)
            opener = threading.Timer(0.1, lambda gate=gate: (order.append("opened"), gate.open()))
            opener.start()
            call()
            order.append(name)
            opener.join()
            run.wait_for_checkpoint()
    return order, [each for name in calls for each in ("opened", name)]


def test_calls_that_write_or_load_weights_wait_for_a_save(tmp_path):
    for order, expected in run_ranks(other_calls_wait, 2, str(tmp_path)):
        assert order == expected


def failing_beside(folder: str, failing: int, then: str):
    run = engine(2, "fp32")
    run.save_checkpoint(folder, tag="good")
    with faults(2 if comm.get_rank() == failing else None):
        run.save_checkpoint(folder, tag="bad", async_save=True)
        train(run, range(2))  # continues meanwhile
        with pytest.raises(CheckpointError, match="the last save, in the background, failed") as raised:
            {
                "save": lambda: run.save_checkpoint(folder, tag="next"),
                "load": lambda: run.load_checkpoint(folder),
                "wait": run.wait_for_checkpoint,
                "destroy": run.destroy,
            }[then]()
    comm.barrier()
    assert list(tags(Path(folder))) == ["good"]
    run.save_checkpoint(folder, tag="after", async_save=True)
    run.wait_for_checkpoint()
    comm.barrier()
    return str(raised.value), sorted(tags(Path(folder)))


@pytest.mark.parametrize(("failing", "then"), [(0, "save"), (1, "load"), (1, "wait"), (0, "destroy")])
def test_a_failure_is_raised_at_the_next_call(failing, then, tmp_path):
    first, second = run_ranks(failing_beside, 2, str(tmp_path), failing, then)
    assert first == second
    assert f"rank {failing}" in first[0] and "No space left" in first[0] and first[1] == ["after", "good"]


def two_engines(folder: str):
    """Each has a channel of its own."""
    first, second = engine(1, "fp32"), engine(3, "bf16")
    for step in range(3):
        first.save_checkpoint(folder + "/first", async_save=True)
        second.save_checkpoint(folder + "/second", async_save=True)
        train(first, range(step, step + 1))
        train(second, range(step, step + 1))
    first.wait_for_checkpoint()
    second.wait_for_checkpoint()
    comm.barrier()
    return list(tags(Path(folder) / "first")), list(tags(Path(folder) / "second"))


def test_two_engines_save_at_once(tmp_path):
    expected = [f"global_step{step}" for step in range(3)]
    assert run_ranks(two_engines, 2, str(tmp_path)) == [(expected, expected)] * 2


def niceness_of_saves(folder: str):
    run = engine(1, "bf16")
    train(run, range(1))
    found = {}

    def noting(name, function):
        def noted(*given):
            found.setdefault(name, set()).add(os.getpriority(os.PRIO_PROCESS, 0))
            return function(*given)

        return noted

    functions = disk.write_all, disk.sync_and_close
    disk.write_all, disk.sync_and_close = noting("write", functions[0]), noting("sync", functions[1])
    try:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        run.save_checkpoint(folder, tag="beside", async_save=True)
        run.wait_for_checkpoint()
        beside = dict(found)
        found.clear()
        run.save_checkpoint(folder, tag="synchronous")
    finally:
        disk.write_all, disk.sync_and_close = functions
    return before, beside, found, os.getpriority(os.PRIO_PROCESS, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_save_in_the_background_leaves_the_processor_to_training(tmp_path):
    ((before, beside, synchronous, after),) = run_ranks(niceness_of_saves, 1, str(tmp_path))
    lower = {min(before + 10, 19)}
    assert beside == {"write": lower, "sync": lower}
    assert synchronous == {"write": {before}, "sync": {before}}
    assert after == before


def test_a_long_save_logs_its_progress(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(saving.logger, "info", lambda text, *values: lines.append(text % values))
    times = iter([0.0, 5.0, 16.0, 20.0, 40.0])
    progress = saving.SaveProgress("step7", 4 * 10**9, clock=lambda: next(times))
    with FileWriter(tmp_path, progress.add) as writer:
        for name in ("a", "b", "c", "d"):
            writer.write_bytes(name, b"x" * 10**6)
    assert lines == [
        "saving step7: rank 0 has written 0.0 of 4.0 GB in 16 s, about 31984 s are left",
        "saving step7: rank 0 has written 0.0 of 4.0 GB in 40 s, about 39960 s are left",
    ]


def test_a_save_in_the_background_rests_as_long_as_it_works(monkeypatch):
    used = iter([0.5, 0.75, 2.0, 2.0])
    pace = saving.SavePace(clock=lambda: next(used))
    rests: list[float] = []
    monkeypatch.setattr(pace._awaited, "wait", rests.append)
    for _ in range(4):
        pace.rest()
    assert rests == [0.5, 0.25, 1.25, 0.0]


def rests_for_ever(folder: str) -> list[str]:
    run = engine(1, "bf16")
    train(run, range(1))
    resting = threading.Event()
    pace = saving.SavePace

    def clock() -> float:
        resting.set()
        return float(1 << 20)  # seconds that the first write is set to have taken

    with mock.patch.object(saving, "SavePace", lambda: pace(clock)):
        run.save_checkpoint(folder, tag="beside", async_save=True)
        assert resting.wait(120)
        assert run._checkpoints._saver._thread.is_alive()
        run.wait_for_checkpoint()
    return list(tags(Path(folder)))


def test_a_save_that_is_waited_for_rests_no_longer(tmp_path):
    assert run_ranks(rests_for_ever, 1, str(tmp_path)) == [["beside"]]
