"""Failures on the page of a run: exceptions, and ranks that were killed."""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from deepspeed.run_report.failures import _KILLED
from deepspeed.run_report.page import write_report
from deepspeed.run_report.page_times import StandbyWriter, report_at_end, report_of_earlier_start
from deepspeed.run_report.rank_file import RankFile
from deepspeed.run_report.recorder import StepRecorder
from tests.engine.support import engine_of
from tests.harness import RanksFailed, run_ranks
from tests.harness.toy_models import tower
from tests.launcher.processes import Launcher, wait_until
from tests.launcher.test_nodes import start
from tests.run_report.runs import step_line, write_rank

_PROGRAM = """
import os, signal, sys
import torch
import deepspeed

config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
config["run_report"] = {"path": sys.argv[1]}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
for step in range(5):
    if step == 3 and sys.argv[2] == "raise":
        raise ValueError("<b>batch 3</b> is broken")
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
if sys.argv[2] == "kill":
    engine.save_checkpoint(sys.argv[1] + "/saved")  # brings the lines to the file
    os.kill(os.getpid(), signal.SIGKILL)
"""


def _run(folder, how):
    places = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(folder), how], env={**os.environ, **places}, capture_output=True, text=True
    )


def test_an_exception_is_the_first_sentence_an_event_and_a_mark(tmp_path):
    done = _run(tmp_path, "raise")
    assert done.returncode == 1 and "ValueError" in done.stderr
    page = (tmp_path / "report.html").read_text()  # written by the program itself
    expected = "Rank 0 failed after step 3: ValueError: &lt;b&gt;batch 3&lt;/b&gt; is broken"
    assert page.index(expected) < page.index("<div class=tiles>")
    assert '<line class="mark failure"' in page and "<b>batch" not in page
    numbers = json.loads((tmp_path / "report.json").read_text())
    (failure,) = numbers["failures"]
    assert (failure["rank"], failure["step"]) == (0, 3)
    assert [event for event in numbers["events"] if event["name"] == "failure"] == [failure]


def _await_page(folder):
    deadline = time.monotonic() + 120
    while not (folder / "report.html").exists():
        assert time.monotonic() < deadline, "no page"
        time.sleep(0.05)
    return json.loads((folder / "report.json").read_text())


def test_the_page_of_a_killed_rank_is_written_at_once_and_names_it(tmp_path):
    assert _run(tmp_path, "kill").returncode == -signal.SIGKILL
    (failure,) = _await_page(tmp_path)["failures"]  # nothing but the standby can have written it
    assert failure["text"] == f"failed after step 5: {_KILLED}"
    last = [json.loads(line)["time"] for line in (tmp_path / "rank-00000.jsonl").read_text().splitlines()][-1]
    assert failure["time"] == last


def _failures(folder):
    write_report(folder)
    return [(f["rank"], f.get("step")) for f in json.loads((folder / "report.json").read_text())["failures"]]


def test_a_rank_of_another_machine_is_lost_if_the_others_failed_or_continued(tmp_path):
    write_rank(tmp_path, 0, [step_line(1), step_line(2)])
    write_rank(tmp_path, 1, [step_line(1), step_line(2)], has_ended=False, pid=1)
    assert _failures(tmp_path) == [], "it may be about to write its end"
    file = RankFile(tmp_path, 0)
    file.write("event", name="failure", step=2, error="CommunicationError", message="rank 1 is gone")
    file.write("end")
    file.close()
    assert _failures(tmp_path) == [(1, 2), (0, 2)], "the cause first"


def test_a_failure_before_a_restart_is_an_event_only(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)], has_ended=False, pid=1)
    write_rank(tmp_path, 0, [step_line(2)], pid=2)
    assert _failures(tmp_path) == []
    events = json.loads((tmp_path / "report.json").read_text())["events"]
    assert [(e["name"], e.get("step")) for e in events] == [("failure", 1), ("restart", None)]


def test_a_rank_that_runs_has_not_failed(tmp_path):
    recorder = StepRecorder(tmp_path, 0, {"host": os.uname().nodename, "pid": os.getpid()})
    assert _failures(tmp_path) == []
    recorder.close()


@pytest.mark.parametrize(
    ("error", "expected"), [(KeyError("k"), ["KeyError"]), (SystemExit(0), []), (SystemExit(3), ["SystemExit"])]
)
def test_an_engine_that_is_closed_while_an_exception_passes_writes_it(tmp_path, error, expected):
    recorder = StepRecorder(tmp_path, 0, {})
    with pytest.raises(type(error)):  # noqa: PT012
        try:
            raise error
        finally:
            recorder.close()
    lines = [json.loads(line) for line in recorder._writer.file.path.read_text().splitlines()]
    assert [line["error"] for line in lines if line["kind"] == "event"] == expected
    assert lines[-1]["kind"] == "end"


def _block_and_terminate(folder):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    recorder = StepRecorder(Path(folder), 0, {"pid": os.getpid(), "host": os.uname().nodename})
    recorder.event("save", step=1)
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    child = os.fork()
    if child == 0:
        os.kill(os.getppid(), signal.SIGTERM)
        os._exit(0)
    libc.pthread_mutex_lock(mutex)  # in native code, for ever, as in a collective
    recorder.close()


def test_sigterm_ends_a_rank_that_waits_in_native_code_and_is_on_its_page(tmp_path):
    with pytest.raises(RanksFailed, match="SIGTERM|signal 15|-15"):
        run_ranks(_block_and_terminate, 1, str(tmp_path), fresh=True)
    write_report(tmp_path)
    (failure,) = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert failure["text"] == f"failed after step 1: {_KILLED}"


def test_signals_are_left_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    recorder = StepRecorder(tmp_path, 0, {})
    assert signal.getsignal(signal.SIGTERM) is before
    recorder.close()


def test_a_rank_that_fails_writes_the_page_as_rank_0_may_be_killed(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)], has_ended=False, pid=1)
    recorder = StepRecorder(tmp_path, 1, {}, on_close=partial(report_at_end, tmp_path, 1))
    with pytest.raises(ValueError, match="broken"):  # noqa: PT012
        try:
            raise ValueError("broken batch")
        finally:
            recorder.close()
    failures = json.loads((tmp_path / "report.json").read_text())["failures"]
    assert [failure["rank"] for failure in failures] == [1, 0], "the cause first, though rank 0 wrote nothing later"
    assert "ValueError: broken batch" in (tmp_path / "report.html").read_text()
    assert not list(tmp_path.glob("*.part"))


def test_a_rank_that_ends_well_leaves_the_page_to_rank_0(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)])
    StepRecorder(tmp_path, 1, {}, on_close=partial(report_at_end, tmp_path, 1)).close()
    assert not (tmp_path / "report.html").exists()
    StepRecorder(tmp_path, 0, {}, on_close=partial(report_at_end, tmp_path, 0)).close()
    assert (tmp_path / "report.html").exists()


def test_the_standby_ends_when_the_page_is_written(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)])
    standby = StandbyWriter(tmp_path)
    assert standby._process.poll() is None
    report_at_end(tmp_path, 0, False, standby)
    assert standby._process.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-00000.jsonl", "report.html", "report.json"]


def _ignores(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"^SigIgn:\s*(\w+)", status, re.MULTILINE)[1], 16) >> (number - 1) & 1


def test_the_standby_survives_the_signals_of_a_shutdown(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)])
    standby = StandbyWriter(tmp_path)
    wait_until(lambda: _ignores(standby._process.pid, signal.SIGTERM), 120, "the shell to ignore signals")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.killpg(standby._process.pid, number)
    standby._process.stdin.close()  # as if this process were gone
    assert standby._process.wait(120) == 0
    assert (tmp_path / "report.html").exists()


def _first_step_of_the_next_start(folder):
    engine = engine_of(tower(), 1, run_report={"path": folder})
    page = (Path(folder) / "report.html").read_text()
    engine.destroy()
    return page, (Path(folder) / "report.html").read_text()


def test_the_next_start_writes_the_page_of_a_start_that_was_killed(tmp_path):
    write_rank(tmp_path, 0, [step_line(n) for n in range(1, 4)], has_ended=False, pid=1)
    (tmp_path / "rank-00000.jsonl").open("a").write('{"kind": "st')  # torn by the kill
    ((at_start, at_end),) = run_ranks(_first_step_of_the_next_start, 1, str(tmp_path))
    assert "Run of 1 rank, 3 steps" in at_start and "Not ended: rank 0 after step 3" in at_start
    assert _KILLED in at_end and "Not ended" not in at_end
    page = tmp_path / "report.html"
    page.write_text("as it was")
    report_of_earlier_start(tmp_path)
    assert page.read_text() == "as it was", "no rank has written after it"
    (tmp_path / "plan.json").write_text("{")
    os.utime(page, (0, 0))
    report_of_earlier_start(tmp_path)  # a damaged file does not hold up the start
    assert page.read_text() == "as it was"
    (tmp_path / "plan.json").unlink()
    report_of_earlier_start(tmp_path)
    assert "3 steps" in page.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_launcher_writes_the_page_where_rank_0_was_killed(tmp_path, how):
    script = """
        import ctypes, signal, torch, deepspeed
        deepspeed.init_distributed("gloo")
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        config["run_report"] = {"path": "report"}
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
        for step in range(3):
            engine.backward(engine(torch.randn(2, 4)).square().mean())
            engine.step()
        torch.distributed.barrier()
        if rank == 0:
            libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
            libc.pthread_mutex_lock(mutex)
            if sys.argv[-1] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            libc.pthread_mutex_lock(mutex)
        elif sys.argv[-1] == "raise":
            raise ValueError("<b>broken</b> batch")
        time.sleep(600)
    """
    code, _, err = Launcher(tmp_path, script, "--num_gpus=2", arguments=(how,)).finish()
    assert code == (1 if how == "raise" else 128 + signal.SIGKILL)
    assert f"run report: {tmp_path / 'report' / 'report.html'}" in err
    failures = json.loads((tmp_path / "report" / "report.json").read_text())["failures"]
    assert sorted(failure["rank"] for failure in failures) == [0, 1]
    assert how == "kill" or failures[0]["text"].endswith("ValueError: <b>broken</b> batch"), "the cause first"


_WAITING = """
import os, signal, sys, time, torch, deepspeed
deepspeed.init_distributed("gloo")
config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
config["run_report"] = {"path": "report"}
engine, *_ = deepspeed.initialize(model=torch.nn.Linear(4, 4), config=config)
for step in range(3):
    engine.backward(engine(torch.randn(2, 4)).square().mean())
    engine.step()
engine.save_checkpoint("saved")  # brings the lines to the file
if engine.global_rank == int(sys.argv[-2]):
    os.kill(os.getpid(), getattr(signal, sys.argv[-1]))
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [(0, "SIGKILL"), (1, "SIGKILL"), (0, "SIGTERM")])
def test_the_page_of_a_run_of_torchrun_is_written_at_once(tmp_path, signalled):
    (tmp_path / "train.py").write_text(_WAITING)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py"]
    done = subprocess.run(
        [*torchrun, *map(str, signalled)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 1
    failures = _await_page(tmp_path / "report")["failures"]
    assert sorted((failure["rank"], failure["step"]) for failure in failures) == [(0, 3), (1, 3)]


@pytest.mark.slow
def test_the_launcher_of_rank_0_writes_the_page_of_a_run_on_two_machines(tmp_path):
    first, second = start(tmp_path, _WAITING, ranks=(1, 1), arguments=("1", "SIGKILL"))
    (code, _, err), _ = first.finish(), second.finish()
    assert code == 128 + signal.SIGKILL
    assert f"run report: {tmp_path / 'report' / 'report.html'}" in err and "had left running" not in err
    failures = json.loads((tmp_path / "report" / "report.json").read_text())["failures"]
    assert sorted((failure["rank"], failure["step"]) for failure in failures) == [(0, 3), (1, 3)]
