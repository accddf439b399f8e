"""What one rank writes about its steps."""

import json
from pathlib import Path

import pytest
import torch

from deepspeed import comm
from deepspeed.comm.base.counters import traffic, waiting
from deepspeed.engine_feature import StepInfo
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.run_report.rank_file import RankFile, has_end
from deepspeed.run_report.recorder import StepRecorder
from deepspeed.run_report.run_data import read_run
from tests.engine.support import engine_of, inputs
from tests.harness import on_ranks, run_ranks
from tests.harness.toy_models import tower


class Ticks:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def seconds(self, begin, end):
        return end - begin


def _lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"rank-{rank:05d}.jsonl").read_text().splitlines()]


def _info(step):
    return StepInfo(step, samples=8 * step, batch=8, own_batch=8, skipped=0, lr=[0.1], norm=1.0, loss_scale=None)


def _spend(clock, recorder, phase, seconds, axis="", waited=0.0):
    with recorder.during(phase):
        clock.now += seconds - waited
        if axis:
            mark = recorder.wait_begins(axis, "something")
            clock.now += waited
            recorder.wait_ends(axis, mark)


def test_phases_waits_and_what_lies_outside_make_up_the_step(tmp_path):
    clock = Ticks()
    recorder = StepRecorder(tmp_path, 0, {"host": "here"}, clock)
    _spend(clock, recorder, "forward", 3.0, "tensor", 1.0)
    clock.now += 0.5
    with recorder.during("backward"):
        clock.now += 1.0
        _spend(clock, recorder, "forward", 2.0, "data", 0.25)  # recomputation is a part of the backward
    recorder.add_tokens(12)
    recorder.end_step(_info(1), torch.tensor(0.5))
    recorder.close()
    recorder.close()
    start, step, end = _lines(tmp_path)
    assert start["host"] == "here" and end["kind"] == "end"
    assert step["seconds"] == 6.5 and step["loss"] == 0.5 and step["tokens"] == 12
    assert step["phases"] == {"forward": 3.0, "backward": 3.0, "outside": 0.5}
    assert step["waits"] == {"forward": {"tensor": 1.0}, "backward": {"data": 0.25}}
    assert not waiting.is_running


def test_phases_inside_a_schedule_count_for_themselves_and_the_rest_for_it(tmp_path):
    clock = Ticks()
    recorder = StepRecorder(tmp_path, 0, {}, clock)
    for step in (1, 2):
        clock.now += 2.0  # loads data
        with recorder.during("schedule"):
            mark = recorder.wait_begins("pipe", "activations")
            clock.now += 0.5
            recorder.wait_ends("pipe", mark)
            _spend(clock, recorder, "forward", 3.0, "tensor", 1.0)
            clock.now += 0.25
            recorder.end_step(_info(step), None)
            clock.now += 0.125  # the loss is sent to all stages
    recorder.close()
    first, second = (line for line in _lines(tmp_path) if line["kind"] == "step")
    assert first["phases"] == {"schedule": 0.75, "forward": 3.0, "outside": 2.0} and first["seconds"] == 5.75
    assert first["waits"] == second["waits"] == {"schedule": {"pipe": 0.5}, "forward": {"tensor": 1.0}}
    assert second["phases"] == {"schedule": 0.875, "forward": 3.0, "outside": 2.0}


def test_a_phase_that_an_exception_left_begins_again(tmp_path):
    clock = Ticks()
    recorder = StepRecorder(tmp_path, 0, {}, clock)
    recorder.begin("forward")
    clock.now += 7.0
    _spend(clock, recorder, "forward", 2.0)
    recorder.end_step(_info(1), None)
    recorder.close()
    assert _lines(tmp_path)[1]["phases"] == {"forward": 2.0, "outside": 7.0}


def test_a_step_is_read_when_the_next_one_is_done(tmp_path):
    """So that nobody waits for a device that runs behind its host."""
    clock = Ticks()
    recorder = StepRecorder(tmp_path, 0, {}, clock)
    for step in (1, 2):
        traffic.record_ran("send", 100 * step, "data")
        recorder.end_step(_info(step), torch.tensor(float("nan")))
    recorder.event("save", step=2)  # brings what is written to the file
    assert [line.get("step") for line in _lines(tmp_path)[1:]] == [1, 2]
    assert [line["kind"] for line in _lines(tmp_path)[1:]] == ["step", "event"]
    recorder.close()
    steps = [line for line in _lines(tmp_path) if line["kind"] == "step"]
    assert [line["bytes"]["data"] for line in steps] == [100, 200]
    assert "loss" not in steps[0], "JSON has no nan"


def test_a_killed_rank_leaves_lines_that_can_be_read(tmp_path):
    file = RankFile(tmp_path, 0)
    file.write("start", rank=0)
    file.flush()
    with file.path.open("a") as torn:
        torn.write('{"kind": "step", "st')
    assert not has_end(file.path)
    RankFile(tmp_path, 0).write("start", rank=0)
    run = read_run(tmp_path)
    assert run.torn_lines == 1 and run.ranks[0].has_ended is False


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeepSpeedConfigError, match=r"run_report\.path='.*file'.*rank 3 can write to"):
        RankFile(tmp_path / "file", 3)


def _train(folder):
    config = {"run_report": {"path": folder}, "csv_monitor": {"enabled": False}, "comet": {"api_key": "secret"}}
    engine = engine_of(tower(), 3, **config)
    for step in range(4):
        engine.backward(engine(inputs(step, 0, engine.global_rank)))
        engine.step()
        if step == 2:
            engine.save_checkpoint(f"{folder}/saved")
    engine.destroy()


def test_an_engine_writes_all_of_it(tmp_path):
    run_ranks(_train, 2, str(tmp_path))
    run = read_run(tmp_path)
    assert sorted(run.ranks) == [0, 1] and (tmp_path / "report.html").exists()
    for rank, found in run.ranks.items():
        assert found.has_ended and sorted(found.steps) == [1, 2, 3, 4]
        for line in found.steps.values():
            assert sum(line["phases"].values()) == pytest.approx(line["seconds"], rel=1e-3, abs=1e-4)
            assert {"forward", "backward", "step"} <= set(line["phases"])
            assert line["bytes"]["data"] > 0 and ("loss" in line) == (rank == 0)
            for phase, waits in line["waits"].items():
                assert sum(waits.values()) <= line["phases"][phase] + 1e-4
        assert [event["name"] for event in found.events if event["name"] != "memory"] == ["save"]
        assert found.steps[4]["phases"]["save"] > 0
    rows = next(event["rows"] for event in run.first.events if event["name"] == "memory")
    assert any(kind == "optimizer state" and counted > 0 for kind, counted, *_ in rows)
    assert "secret" not in (tmp_path / "rank-00000.jsonl").read_text()


def test_an_evaluation_of_any_length_keeps_few_marks(tmp_path):
    clock = Ticks()
    recorder = StepRecorder(tmp_path, 0, {}, clock)
    for _ in range(10_000):
        _spend(clock, recorder, "forward", 0.5, "data", 0.25)
    assert len(recorder._step.intervals) < 5_000 and len(recorder._step.waits) < 5_000
    recorder.end_step(_info(1), None)
    recorder.close()
    step = _lines(tmp_path)[1]
    assert step["phases"]["forward"] == 5_000 and step["waits"] == {"forward": {"data": 2_500}}


@on_ranks(1)
def test_a_plan_that_is_missing_or_has_no_page_is_refused_before_the_model_is_changed(tmp_path) -> None:
    folder = str(tmp_path)
    config = {"run_report": {"path": f"{folder}/report", "plan": f"{folder}/nowhere.json"}}
    model = tower()
    before = [id(parameter) for parameter in model.parameters()]
    with pytest.raises(DeepSpeedConfigError, match=r"run_report\.plan='.*nowhere\.json': expected the file of ds_plan"):
        engine_of(model, 3, **config)
    with pytest.raises(DeepSpeedConfigError, match=r"run_report\.plan='plan\.json': expected run_report\.path too"):
        engine_of(model, 3, run_report={"plan": "plan.json"})
    Path(folder, "nowhere.json").write_text("[]")
    with pytest.raises(DeepSpeedConfigError, match=r"run_report\.plan='.*for one job, found list"):
        engine_of(model, 3, **config)
    assert [id(parameter) for parameter in model.parameters()] == before
    plan = Path(folder, "report", "plan.json")  # where it is copied to
    plan.write_text("{}")
    engine_of(model, 3, run_report={"path": str(plan.parent), "plan": str(plan)}).destroy()


def _on_some_ranks(folder):
    report = {"run_report": {"path": folder}} if comm.get_rank() == 0 else {}
    engine_of(tower(), 1, **report).destroy()


def test_a_rank_alone_may_have_the_section(tmp_path):
    run_ranks(_on_some_ranks, 2, str(tmp_path))
    assert list(tmp_path.iterdir())
