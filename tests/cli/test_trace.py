"""Traces of steps: what they name, all ranks in one file, and what differs between two."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from deepspeed.cli import trace
from deepspeed.cli.trace import compare_traces, merge_traces
from deepspeed.engine_feature import StepInfo
from deepspeed.errors import DeepSpeedError
from deepspeed.profiling.step_trace import TraceRecorder
from tests.engine.support import engine_of, inputs
from tests.harness import run_ranks
from tests.harness.toy_models import tower
from tests.parallel.pipe import support


def _info(step):
    return StepInfo(step, samples=8 * step, batch=8, own_batch=8, skipped=0, lr=[0.1], norm=1.0, loss_scale=None)


def _write(folder, rank, durations, base=0):
    """A trace of one step, with an operation of each name for so many milliseconds."""
    events = [{"ph": "M", "name": "process_name", "pid": 7, "args": {"name": "python"}}]
    events.append({"ph": "X", "cat": "user_annotation", "name": "step 3", "pid": 7, "ts": 10.0, "dur": 9e3})
    for name, milliseconds in durations.items():
        events.append({"ph": "X", "cat": "cpu_op", "name": name, "pid": 7, "ts": 11.0, "dur": milliseconds * 1e3})
    folder.mkdir(exist_ok=True)
    text = json.dumps({"traceEvents": events, "baseTimeNanoseconds": base})
    (folder / f"rank-{rank:05d}.trace.json").write_text(text)


def test_ranks_of_one_host_do_not_mix_and_share_one_clock(tmp_path):
    _write(tmp_path, 0, {"a": 1.0}, base=5_000_000)
    _write(tmp_path, 1, {"a": 1.0}, base=5_002_000)  # two microseconds later
    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    assert len({event["pid"] for event in events}) == 2
    assert [event["ts"] for event in events if event["name"] == "step 3"] == [0.0, 2.0]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0: python", "rank 1: python"]


def test_what_got_slower_comes_first(tmp_path, capsys):
    for folder, times in (("a", {"gather": 1.0, "gone": 0.5}), ("b", {"gather": 4.0, "new": 0.25})):
        _write(tmp_path / folder, 0, times)
        _write(tmp_path / folder, 1, times)
    found = compare_traces(tmp_path / "a", merge_traces(tmp_path / "b"))
    assert [(c.name, c.before, c.after) for c in found[:3]] == [("gather", 1, 4), ("gone", 0.5, 0), ("new", 0, 0.25)]
    trace.main(["--diff", str(tmp_path / "a"), str(tmp_path / "b"), "--lines", "1"])
    shown = capsys.readouterr().out
    assert "+3.000" in shown and "gone" not in shown


def _write_step(folder, rank, outside, forward, wait, update):
    """A trace of one step of 100 ms or more: what lies outside, then forward with a wait in it, then the update."""
    ranges = [
        ("step 3", 0.0, outside + forward + update),
        ("forward", outside, forward),
        ("wait data: the gather of a", outside, wait),
        ("step", outside + forward, update),
    ]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 7, "tid": 7, "ts": ts * 1e3, "dur": length * 1e3}
        for name, ts, length in ranges
    ]
    sent = {"ph": "X", "cat": "user_annotation", "name": "gloo:send", "pid": 7, "tid": 7, "ts": 5.0, "dur": 2e6}
    folder.mkdir(exist_ok=True)
    (folder / f"rank-{rank:05d}.trace.json").write_text(json.dumps({"traceEvents": [*events, sent]}))


def test_the_cause_of_a_slower_step_is_named_with_its_rank_and_not_the_waits_for_it(tmp_path, capsys):
    for rank in range(2):
        _write_step(tmp_path / "a", rank, outside=10.0, forward=50.0, wait=20.0, update=40.0)
    _write_step(tmp_path / "b", 0, outside=10.0, forward=120.0, wait=90.0, update=40.0)
    _write_step(tmp_path / "b", 1, outside=80.0, forward=50.0, wait=20.0, update=40.0)
    trace.main(["--diff", str(tmp_path / "a"), str(tmp_path / "b")])
    shown = capsys.readouterr().out
    assert shown.startswith(
        "A step takes 170.0 ms, +70.0 ms. Largest increase by the hosts' clocks, waits for other ranks aside: outside "
        "the engine on rank 1, +70.0 ms per step. Waits of all ranks: +35.0 ms per step and rank.\n"
    )
    rows = {row.name: (row.before, row.after) for row in compare_traces(tmp_path / "a", tmp_path / "b")}
    assert rows["whole step"] == (100.0, 170.0) and rows["step"] == (40.0, 40.0) and "gloo:send" not in rows
    merged = json.loads(merge_traces(tmp_path / "b").read_text())["traceEvents"]
    sends = [event for event in merged if event["name"] == "gloo:send"]
    assert [event["ph"] for event in sends] == ["b", "e"] * 2, "they lie across the ranges of their thread"
    assert sends[0]["id"] == sends[1]["id"] != sends[2]["id"] and sends[1]["ts"] - sends[0]["ts"] == 2e6


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"traceEvents": []}', '{"traceEvents": [1]}', '{"traceEvents": 1}'],
    ids=["empty", "list", "no step", "numbers", "number"],
)
def test_what_is_no_trace_is_named(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(DeepSpeedError, match=r"trace\.json: expected"):
        compare_traces(path, path)
    with pytest.raises(DeepSpeedError, match="expected files rank-"):
        merge_traces(tmp_path)


def test_a_file_that_cannot_be_written_is_named(tmp_path, capsys):
    _write(tmp_path, 0, {"a": 1.0})
    with pytest.raises(DeepSpeedError, match=r"none/x\.json: cannot be written"):
        merge_traces(tmp_path, tmp_path / "none" / "x.json")
    with pytest.raises(SystemExit):
        trace.main(["--diff", str(tmp_path), str(tmp_path), "-o", "x.json"])
    assert "--output is the file of a merged trace" in capsys.readouterr().err


def test_a_range_that_an_exception_left_ends_with_its_step(tmp_path):
    traced = TraceRecorder(tmp_path, 0, 1, 1)
    traced.begin("forward")
    with pytest.raises(RuntimeError), traced.during("backward"):
        torch.ones(2).add(1)
        raise RuntimeError
    traced.end("never begun")
    traced.end_step(_info(1), None)
    traced.close()
    events = json.loads((tmp_path / "rank-00000.trace.json").read_text())["traceEvents"]
    times = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "user_annotation"}
    assert times["step 1"][0] <= times["forward"][0] <= times["backward"][0]
    assert times["backward"][1] <= times["forward"][1] <= times["step 1"][1]


def _trace_nothing(folder):
    """Returns what torch's profiler writes to stderr, which it does not as Python's ``sys.stderr``."""
    with tempfile.TemporaryFile() as written:
        stderr = os.dup(2)
        os.dup2(written.fileno(), 2)
        try:
            TraceRecorder(Path(folder), dist.get_rank(), 1, 1).close()
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        written.seek(0)
        return written.read().decode()


def test_only_rank_0_lets_the_profiler_print(tmp_path):
    printed = run_ranks(_trace_nothing, 2, str(tmp_path), fresh=True)
    assert ["Profiler" in text for text in printed] == [True, False], printed


def _train(folder):
    engine = engine_of(tower(), 3, trace={"path": folder, "first_step": 2, "steps": 2})
    for step in range(4):
        engine.backward(engine(inputs(step, 0, engine.global_rank)))
        engine.step()
    engine.destroy()


def test_the_requested_steps_are_traced_on_every_rank(tmp_path):
    run_ranks(_train, 2, str(tmp_path))
    events = json.loads(merge_traces(tmp_path).read_text())["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation"]
    assert len({event["pid"] for event in named}) == 2
    by_name = {name: sum(event["name"] == name for event in named) for name in {event["name"] for event in named}}
    for name in ("step 2", "step 3"):
        assert by_name[name] == 2
    assert "step 1" not in by_name and "step 4" not in by_name
    assert by_name["forward"] == by_name["backward"] == by_name["step"] == 4
    for what in ("gather", "reduction"):
        assert any(name.startswith(f"wait data: the {what} of ") for name in by_name)


def _sends_in_flight(folder):
    """Returns the messages of this stage whose sends may not be complete when a trace of its first step ends."""
    engine = support.engine_of(2, 1, 2, {"trace": {"path": folder, "first_step": 1, "steps": 1}})
    found = []

    def close(recorder):
        found.append(engine.inspect().interpreter.channels.kept)
        closes(recorder)

    closes, TraceRecorder.close = TraceRecorder.close, close
    try:
        support.train(engine, 2, 1)
    finally:
        TraceRecorder.close = closes
    engine.destroy()
    return found


def test_a_trace_ends_after_all_sends_of_its_steps(tmp_path):
    assert run_ranks(_sends_in_flight, 2, str(tmp_path)) == [[0], [0]], "torch's profiler would write to freed memory"
    for file in tmp_path.glob("rank-*.trace.json"):
        assert "gloo:send" in {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}


_ENDS_EARLY = """
import os, signal, sys
import torch
import deepspeed

config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "trace": {"path": sys.argv[1], "first_step": 1, "steps": 9},
}
engine = deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)[0]
for _ in range(2):
    engine.backward(engine(torch.randn(2, 8)).square().mean())
    engine.step()
engine(torch.randn(2, 8))
if os.fork() == 0:  # as a data loader's worker, which ends by a signal too
    os.kill(os.getpid(), signal.SIGTERM)
os.wait()
assert not os.listdir(sys.argv[1]), "a forked process has written the trace"
if sys.argv[2] == "error":
    raise ValueError("in the script")
if sys.argv[2] == "signal":
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("end", "code"), [("return", 0), ("error", 1), ("signal", -signal.SIGTERM)])
def test_a_program_that_ends_inside_the_traced_steps_leaves_what_was_recorded(tmp_path, end, code):
    (tmp_path / "script.py").write_text(_ENDS_EARLY)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "trace"), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    events = json.loads((tmp_path / "trace" / "rank-00000.trace.json").read_text())["traceEvents"]
    assert {"step 1", "step 2", "step 3"} <= {event.get("name") for event in events}
