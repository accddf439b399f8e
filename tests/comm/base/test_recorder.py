"""The communication log: what it counts, what it leaves out, what it prints."""

import itertools
import logging

import pytest
import torch

import deepspeed.comm as dist
from deepspeed.comm.base.recorder import CommsLog, bandwidths, log, num_bytes
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
from tests.harness import on_ranks, run_ranks


@pytest.fixture(autouse=True)
def fresh_log():
    before = dict(vars(log))
    yield
    vars(log).update(before)
    dist.reset_log()


def check_counts() -> dict:
    dist.configure(enabled=True, prof_all=True)
    try:
        tensor = torch.ones(8)
        for _ in range(3):
            dist.all_reduce(tensor)
        handle = dist.all_reduce(torch.ones(2, dtype=torch.bfloat16), async_op=True)
        assert dist.get_comm_operation_count() == 3  # it counts when it is complete
        handle.wait()
        handle.wait()
        assert handle.is_completed()
        dist.all_gather_into_tensor(torch.empty(8 * dist.get_world_size()), tensor, log_name="gather_weights")
        dist.barrier()
        assert dist.get_comm_operation_count() == 6
        numbers = dist.log_summary(show_straggler=True, return_dict=True)
        names = dist.get_logged_comm_ops()
        dist.reset_log()
        assert not dist.has_comm_data()
        assert names == sorted(numbers)
        return numbers
    finally:
        dist.configure(enabled=False)


def test_counts_bytes_and_times():
    for numbers in run_ranks(check_counts, 2):
        assert {name: {size: row["count"] for size, row in sizes.items()} for name, sizes in numbers.items()} == {
            "all_reduce": {32: 3, 4: 1},
            "gather_weights": {64: 1},
            "barrier": {0: 1},
        }
        row = numbers["all_reduce"][32]
        assert row["total_ms"] == pytest.approx(3 * row["avg_ms"]) and row["avg_ms"] > 0
        # At two ranks an all-reduce puts the whole message on the wire once.
        assert row["busbw_gbps"] == pytest.approx(row["algbw_gbps"])
        assert row["straggler_ms"] >= 0


def check_straggler_time() -> float:
    for seconds in (0.25 + dist.get_rank(), 0.25):
        log.add("all_reduce", 4, seconds, dist.get_world_size())
    try:
        return dist.log_summary(show_straggler=True, return_dict=True)["all_reduce"][4]["straggler_ms"]
    finally:
        dist.reset_log()


def test_straggler_time_is_that_beyond_the_shortest_wait():
    assert run_ranks(check_straggler_time, 2) == [0.0, 1000.0]


@on_ranks(1)
def test_off_by_default() -> None:
    dist.all_reduce(torch.ones(1), prof=True)
    assert not dist.has_comm_data()


def check_selection() -> list:
    dist.configure(deepspeed_config={"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["broadcast"]}})
    try:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
        dist.all_reduce(tensor, prof=True, log_name="this_one")
        return dist.get_logged_comm_ops()
    finally:
        dist.configure(enabled=False, prof_all=True, prof_ops=[])
        dist.reset_log()


def test_selected_operations():
    assert run_ranks(check_selection, 1) == [["broadcast", "this_one"]]


def test_an_operation_that_was_stopped_is_recorded_when_it_is_named_again():
    log.enabled = True
    log.stop_profiling_op(["broadcast"])
    assert not log.wants("broadcast", False)
    dist.configure(prof_all=False, prof_ops=["broadcast"])
    assert log.wants("broadcast", False) and not log.wants("all_reduce", False)
    log.start_profiling_op(["broadcast"])  # the fixture keeps the set of stopped operations


def test_arguments_win_over_the_config():
    section = {"enabled": True, "prof_all": False, "prof_ops": ["x"], "verbose": True}
    dist.configure(deepspeed_config={"comms_logger": section}, verbose=False)
    assert (log.enabled, log.prof_all, log.prof_ops, log.verbose) == (True, False, ["x"], False)
    dist.configure(deepspeed_config={})
    assert log.enabled  # an absent section changes nothing
    dist.configure(deepspeed_config=parse({"train_batch_size": 1, "comms_logger": {"prof_ops": ["y"]}}))
    assert (log.enabled, log.prof_ops) == (False, ["y"])


def test_config_file_and_wrong_settings(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text('{"train_batch_size": "auto", "comms_logger": {"enabled": true, "prof_all": false}}')
    dist.configure(deepspeed_config=str(path))
    assert log.enabled and not log.prof_all
    with pytest.raises(DeepSpeedConfigError, match="comms_logger.prof_oops.*prof_ops"):
        dist.configure(deepspeed_config={"comms_logger": {"enabled": True, "prof_oops": []}})


def test_bandwidths():
    assert bandwidths("all_reduce", 10**9, 2.0, 4) == pytest.approx((4.0, 6.0))
    assert bandwidths("all_gather_into_tensor", 10**9, 2.0, 4) == pytest.approx((4.0, 3.0))
    assert bandwidths("allgather_fn", 10**9, 2.0, 4) == pytest.approx((4.0, 3.0))
    assert bandwidths("broadcast", 10**9, 2.0, 4) == pytest.approx((4.0, 4.0))
    assert bandwidths("all_reduce", 1, 0.0, 4) == (0.0, 0.0)


def test_num_bytes():
    half = torch.empty(3, dtype=torch.bfloat16)
    assert num_bytes(half) == 6
    assert num_bytes([half, [half, torch.empty(1)]]) == 16
    assert num_bytes("text") == num_bytes(None) == 0
    objects = iter([1, 2])
    assert num_bytes([objects, itertools.count()]) == 0
    assert list(objects) == [1, 2]  # an object to send, which the log must not consume


def check_callers_are_named() -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    dist.configure(enabled=True, verbose=True, debug=True)
    try:
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0, debug="another")
        return [line.rpartition("caller: ")[2] for line in lines]
    finally:
        logger.removeHandler(handler)
        dist.configure(enabled=False, verbose=False, debug=False)
        dist.reset_log()


def test_callers_are_named():
    assert run_ranks(check_callers_are_named, 1) == [["check_callers_are_named", "another"]]


def test_verbose_line_and_table():
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        log.verbose = log.debug = True
        log.add("broadcast", 1024, 0.002, 2, caller="me")
        log.verbose = False
        log.add("broadcast", 1024, 0.004, 2)
        dist.log_summary()
    finally:
        logger.removeHandler(handler)
    assert "broadcast" in lines[0] and "2.00" in lines[0] and "1024" in lines[0] and "me" in lines[0]
    assert len(lines) == 2
    row = next(line for line in lines[1].splitlines() if "broadcast" in line)
    assert ["1,024", "2", "6.00", "3.000"] == [cell.strip() for cell in row.split("│")][2:6]
    assert CommsLog().enabled is False
