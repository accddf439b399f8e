"""Where events go, and which ones a training has."""

import csv
import logging
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed import comm
from deepspeed.accelerator.devices import DEVICES
from deepspeed.comm.base.counters import counted, waiting
from deepspeed.comm.base.recorder import log
from deepspeed.config.sections.root import Root
from deepspeed.engine import flops, initialize, progress
from deepspeed.engine_feature import StepInfo
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.monitor import monitor
from deepspeed.monitor.monitor import MonitorMaster, csvMonitor, get_monitor_config
from deepspeed.runtime.config import DeepSpeedConfig
from tests.engine.support import engine_of, inputs, rank
from tests.harness import on_ranks, run_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower
from tests.monitor.fakes import FakeRun, fake_comet, fake_wandb, install

# Each monitor alone: what it writes where, what it logs when it cannot.


EVENTS = [
    ("Train/Samples/train_loss", 0.5, 8),
    ("Train/Samples/lr", 0.001, 8),
    ("Train/Samples/train_loss", float("nan"), 16),
]


@pytest.fixture
def warnings():
    with logged(logging.WARNING) as lines:
        yield lines


def test_csv(tmp_path):
    config = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    master = MonitorMaster(config)
    assert master.enabled and not list(tmp_path.iterdir())  # nothing before the first event
    master.write_events(EVENTS)
    folder = tmp_path / "job"
    # Without closing: a reader sees the rows at once.
    assert (folder / "Train_Samples_train_loss.csv").read_text() == "step,train_loss\n8,0.5\n16,nan\n"
    assert (folder / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.001\n"
    master.close()
    again = MonitorMaster(config)  # a resumed run continues in the same files
    again.write_events([("Train/Samples/lr", 0.002, 24)])
    assert (folder / "Train_Samples_lr.csv").read_text() == "step,lr\n8,0.001\n24,0.002\n"


def test_csv_names_that_differ_only_in_what_a_file_name_lacks(tmp_path):
    monitor = csvMonitor(SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job"))
    for value in (1.0, 2.0):
        monitor.write_events([("a/b", value, 8), ("a_b", value + 10, 8)])
        monitor.close()
    texts = sorted(file.read_text() for file in (tmp_path / "job").iterdir())
    assert texts == ["step,a_b\n8,11.0\n8,12.0\n", "step,b\n8,1.0\n8,2.0\n"]
    assert (tmp_path / "job" / "a_b.csv").read_text() == texts[1]


@pytest.mark.parametrize("names", [("a/b", "a_b"), ("a_b", "a/b"), ("a/b/c", "a_b/c")])
def test_csv_names_keep_their_files_in_a_resumed_run_that_writes_them_in_another_order(tmp_path, names):
    section = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")
    for run, order in enumerate((names, names[::-1], names)):
        monitor = csvMonitor(section)
        monitor.write_events([(name, names.index(name), run) for name in order])
        monitor.close()
    texts = [file.read_text().split("\n", 1) for file in (tmp_path / "job").iterdir()]
    assert sorted(rows for _, rows in texts) == ["0,0\n1,0\n2,0\n", "0,1\n1,1\n2,1\n"]
    first = names[0].rpartition("/")[2]
    assert (tmp_path / "job" / f"{names[0].replace('/', '_')}.csv").read_text() == f"step,{first}\n0,0\n1,0\n2,0\n"


def test_a_csv_name_that_only_a_resumed_run_writes_does_not_take_the_file_of_another(tmp_path):
    section = SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")
    for names in (["a/b"], ["a_b", "a/b"]):
        monitor = csvMonitor(section)
        monitor.write_events([(name, 1.0, 8) for name in names])
        monitor.close()
    assert (tmp_path / "job" / "a_b.csv").read_text() == "step,b\n8,1.0\n8,1.0\n"


def test_csv_rows_are_appended_to_files_of_other_columns(tmp_path):
    path = tmp_path / "job" / "a_b.csv"
    path.parent.mkdir()
    path.write_text("samples,loss\n")
    csvMonitor(SimpleNamespace(enabled=True, output_path=str(tmp_path), job_name="job")).write_events([("a/b", 1.0, 8)])
    assert path.read_text() == "samples,loss\n8,1.0\n"


def test_tensorboard_reads_it_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    master = MonitorMaster({"tensorboard": section})
    assert master.tb_monitor is not None
    master.tb_monitor.summary_writer.add_scalar("mine", 2.5, 8)  # before any event
    master.write_events(EVENTS)
    master.flush()
    events = accumulator.EventAccumulator(str(tmp_path / "job"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["Train/Samples/lr", "Train/Samples/train_loss", "mine"]
    loss = events.Scalars("Train/Samples/train_loss")
    assert [(e.step, e.value) for e in loss][0] == (8, 0.5) and loss[1].step == 16
    master.close()
    master.tb_monitor.enabled = False  # as on other ranks
    assert master.tb_monitor.summary_writer is None


def test_wandb_opens_a_run_and_logs_one_dict_per_step(monkeypatch):
    module = install(monkeypatch, "wandb", fake_wandb())
    master = MonitorMaster({"wandb": {"enabled": True, "group": "g", "team": "t", "project": "p"}})
    assert not module.made
    master.write_events(EVENTS[:2])
    master.write_events([("Train/Samples/lr", 0.002, 16)])
    (run,) = module.made
    assert run.settings == {"project": "p", "group": "g", "entity": "t"}
    assert run.logged == [
        (8, {"Train/Samples/train_loss": 0.5, "Train/Samples/lr": 0.001}),
        (16, {"Train/Samples/lr": 0.002}),
    ]
    master.wandb_monitor.log({"mine": 1.0}, step=24)
    assert run.logged[-1] == (24, {"mine": 1.0})
    master.close()
    assert run.is_finished


def test_wandb_uses_the_run_that_is_open_and_leaves_it_open(monkeypatch):
    run = FakeRun()
    module = install(monkeypatch, "wandb", fake_wandb(open_run=run))
    master = MonitorMaster({"wandb": {"enabled": True}})
    master.write_events(EVENTS[:1])
    master.close()
    assert not module.made and len(run.logged) == 1 and not run.is_finished


def test_comet(monkeypatch):
    module = install(monkeypatch, "comet_ml", fake_comet())
    section = {"enabled": True, "project": "p", "experiment_name": "n", "samples_log_interval": 20, "online": False}
    master = MonitorMaster({"comet": section})
    for step in (8, 16, 24, 32, 40, 48):
        master.write_events([("a", float(step), step), ("b", 0.0, step)])
    (experiment,) = module.made
    assert experiment.settings == {"project": "p", "online": False} and experiment.name == "n"
    # Every 20 samples: 8, then the first at or after 28, then at or after 52.
    assert experiment.logged == [(8, {"a": 8.0, "b": 0.0}), (32, {"a": 32.0, "b": 0.0})]
    master.close()
    assert experiment.is_ended
    master.write_events([("a", 1.0, 56)])  # after a close it continues with the same experiment
    assert module.made[1].settings == {"project": "p", "online": False, "experiment_key": "key-1"}


@pytest.mark.parametrize(
    ("section", "package"), [("wandb", "wandb"), ("comet", "comet_ml"), ("tensorboard", "tensorboard")]
)
def test_a_missing_package_is_named(section, package, monkeypatch):
    monkeypatch.setattr(monitor, "find_spec", lambda name: None)
    monkeypatch.delitem(__import__("sys").modules, package, raising=False)
    with pytest.raises(
        DeepSpeedConfigError, match=rf"{section}.enabled: expected the package {package}.*pip install {package}"
    ):
        MonitorMaster({section: {"enabled": True}})
    assert not MonitorMaster({section: {"enabled": False}}).enabled


def test_a_failure_is_logged_once_and_ends_the_monitor_not_the_training(tmp_path, warnings):
    (tmp_path / "job").write_text("a file where a folder is needed")
    other = tmp_path / "other"
    config = {
        "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"},
        "tensorboard": {"enabled": True, "output_path": str(other), "job_name": "job"},
    }
    master = MonitorMaster(config)
    master.write_events(EVENTS)
    master.write_events(EVENTS)
    assert len(warnings) == 1 and warnings[0].startswith("csv_monitor: writing failed with FileExistsError")
    assert not master.csv_monitor.enabled and master.tb_monitor.enabled
    assert list((other / "job").iterdir())
    master.close()


def test_the_configurations_that_it_takes(tmp_path):
    document = {"train_batch_size": 1, "csv_monitor": {"enabled": True, "output_path": str(tmp_path)}}
    for config in (document, get_monitor_config(document), DeepSpeedConfig(document).monitor_config):
        master = MonitorMaster(config)
        assert master.enabled and isinstance(master.csv_monitor, csvMonitor) and master.tb_monitor is None
    assert get_monitor_config(document).enabled and not get_monitor_config({}).enabled
    with pytest.raises(DeepSpeedConfigError, match="csv_monitor.path"):
        MonitorMaster({"csv_monitor": {"enabled": True, "path": "x"}})


# What a training writes: the names and units that dashboards expect, from rank 0 only.


SCHEDULE = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.1, "warmup_num_steps": 4}}


def _train(engine, updates, backward="engine"):
    """Losses of this rank, by update and micro-batch."""
    losses = []
    for step in range(updates):
        losses.append([])
        for micro in range(accumulation := engine.gradient_accumulation_steps()):
            loss = engine(inputs(step, micro, rank()))
            losses[-1].append(float(loss))
            if backward == "scale":
                engine.scale(loss / accumulation).backward()
            elif backward == "own":
                (loss / accumulation).backward()
            elif backward == "divided":
                engine.backward(loss / accumulation, scale_wrt_gas=False)
            else:
                engine.backward(loss)
            engine.step()
    return losses


def _curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    curves = {}
    for path in folder.glob("*.csv"):
        with path.open(newline="") as file:
            header, *rows = csv.reader(file)
        name = path.stem.removeprefix("Train_Samples_")
        assert header == ["step", name] and name != path.stem
        curves[name] = [(int(step), float(value)) for step, value in rows]
    return curves


def _write_curves(stage, folder, precision):
    section = {"enabled": True, "output_path": folder, "job_name": f"rank{rank()}"}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "scheduler": SCHEDULE,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "csv_monitor": section,
        "tensorboard": section,
        "wall_clock_breakdown": True,
        **precision,
    }
    engine = initialize(model=tower(), config=config)[0]
    assert engine.monitor.enabled and engine.monitor.writes is (rank() == 0)
    losses = _train(engine, 3)
    curves = _curves(Path(folder) / f"rank{rank()}")
    norm, lr, scale = engine.get_global_grad_norm(), engine.get_lr(), engine.optimizer.loss_scaler
    engine.destroy()
    return losses, curves, norm, lr, float(scale.loss_scale) if scale is not None else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_event_names_units_and_values(ranks, tmp_path):
    outcome = run_ranks(_write_curves, ranks, 3, str(tmp_path), {"bf16": {"enabled": True}})
    losses, curves, norm, lr, _ = outcome[0]
    per_update = 2 * 2 * ranks  # samples
    steps = [per_update, 2 * per_update, 3 * per_update]
    assert {name: [step for step, _ in rows] for name, rows in curves.items()} == {
        "train_loss": steps,
        "lr": steps,
        "grad_norm": steps,
        "samples_per_sec": steps[1:],
        "elapsed_time_ms_forward": steps,
        "elapsed_time_ms_backward": steps,
        "elapsed_time_ms_backward_inner": steps,
        "elapsed_time_ms_backward_allreduce": steps,
        "elapsed_time_ms_step": steps,
    }
    for (_, value), of_update in zip(curves["train_loss"], losses, strict=True):
        assert value == pytest.approx(sum(of_update) / 2, rel=1e-6)  # of rank 0, the mean of its micro-batches
    assert curves["lr"][-1][1] == lr[0] and curves["grad_norm"][-1][1] == norm
    values = {name: rows[-1][1] for name, rows in curves.items()}
    assert 0 < values["elapsed_time_ms_forward"] < 60_000
    assert values["elapsed_time_ms_backward"] == pytest.approx(
        values["elapsed_time_ms_backward_inner"] + values["elapsed_time_ms_backward_allreduce"]
    )
    assert (values["elapsed_time_ms_backward_allreduce"] > 0) is (ranks > 1)
    # Nothing of any other rank; TensorBoard's files lie in the same folder.
    assert [path.name for path in tmp_path.iterdir()] == ["rank0"]
    assert len(list((tmp_path / "rank0").glob("events.out.tfevents*"))) == 1


def test_loss_scale_is_an_event_under_fp16(tmp_path):
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "wall_clock_breakdown": False}
    ((_, curves, _, _, scale),) = run_ranks(_write_curves, 1, 1, str(tmp_path), fp16)
    assert curves["loss_scale"] == [(4, 256.0), (8, 256.0), (12, 256.0)] and scale == 256.0
    assert "elapsed_time_ms_forward" not in curves


def _say(backward, fp16):
    readers = waiting._readers
    with logged() as lines:
        engine = engine_of(
            tower(),
            2,
            accumulation=2,
            steps_per_print=2,
            wall_clock_breakdown=True,
            memory_breakdown=True,
            dump_state=True,
            **({"fp16": {"enabled": True, "initial_scale_power": 8}} if fp16 else {}),
        )
        started = list(lines)
        lines.clear()
        losses = _train(engine, 4, backward)
    assert waiting._readers == readers + (rank() == 0)
    engine.destroy()
    engine.destroy()
    assert waiting._readers == readers, "the clock continues without a reader"
    return started, lines, losses


@pytest.mark.parametrize("backward", ["engine", "divided", "scale", "own"])
def test_lines_of_rank_0(backward):
    fp16 = backward != "own"
    (started, lines, losses), (*other, _) = run_ranks(_say, 2, backward, fp16)
    assert other == [[], []]
    (state,) = [line for line in started if line.startswith("state of the engine")]
    for expected in (
        '"steps_per_print": 2',
        f"torch {torch.__version__}",
        f"param group 0: compute torch.float{16 if fp16 else 32}",
        "4 x Psi / N",
    ):
        assert expected in state
    steps = [line for line in lines if "samples/s" in line]
    assert [line.split(" |")[0] for line in steps] == ["step      2", "step      4"]
    for column in ("samples/s", "gradient norm", "skipped"):
        assert len({line.index(column) for line in steps}) == 1, "lines are aligned"
    for line, of_update in zip(steps, losses[1::2], strict=True):
        assert "lr [0.01]" in line and "gradient norm" in line and "0 skipped" in line
        assert ("loss scale 256" in line) is fp16
        assert re.search(r"\| MFU     - \| data +\d+% \| +\d+\.\d\d GiB \|", line)
        shown = re.search(r"\| loss (\S+) ", line)
        if backward == "own":
            assert shown is None
        else:
            assert float(shown[1]) == pytest.approx(sum(of_update) / 2, rel=1e-3)
    assert len([line for line in lines if line.startswith("the loss is missing")]) == (backward == "own")
    of_memory = [line for line in lines if line.startswith("memory after ")]
    assert len(of_memory) == 8 + 8 + 4 and "MiB in use" in of_memory[0]  # forwards, backwards, steps
    times = [line for line in lines if "time (ms per update)" in line]
    assert len(times) == 2 and all(line.endswith("over 2 update(s)") for line in times)
    for phase in ("forward", "backward", "step", "outside"):
        assert f"{phase} " in times[1]
    assert "waiting)" in times[1]
    shares = [int(part.split("%")[0].split("(")[1]) for part in times[1].split("|")[1:5]]
    assert 97 <= sum(shares) <= 103


def _log_mfu(folder):
    known, flops.device_of_product = flops.device_of_product, lambda name: replace(DEVICES["h100"], flops=1e5)
    try:
        with logged() as lines:
            engine = engine_of(tower(), 3, accumulation=2, steps_per_print=2, run_report={"path": folder})
            _train(engine, 4)
        engine.destroy()
    finally:
        flops.device_of_product = known
    return [line for line in lines if line.startswith("step ")]


def test_a_device_with_a_known_peak_has_an_mfu(tmp_path):
    lines, other = run_ranks(_log_mfu, 2, str(tmp_path))
    assert len(lines) == 2 and not other
    assert "(MFU)" in (tmp_path / "report.html").read_text()
    for line in lines:
        assert float(re.search(r"\| MFU +(\d+\.\d)% \| data", line)[1]) > 0


def _log_collectives(stage):
    engine = engine_of(tower(), stage, comms_logger={"enabled": True}, steps_per_print=3)
    comm.reset_log()
    try:
        with counted() as traffic, logged() as lines:
            _train(engine, 3)
        requested = {name: (tally.calls, tally.nbytes) for name, tally in traffic.requested.items()}
        numbers = comm.log_summary(return_dict=True)
        engine.destroy()
        return requested, numbers, lines
    finally:
        comm.configure(enabled=False)
        comm.reset_log()


def test_comms_logger_sees_what_zero_sends():
    for stage in (0, 3):
        outcome = run_ranks(_log_collectives, 2, stage)
        for requested, numbers, _ in outcome:

            def of(prefix, numbers=numbers):
                rows = [
                    (size, row)
                    for name, sizes in numbers.items()
                    if name.startswith(prefix)
                    for size, row in sizes.items()
                ]
                return sum(row["count"] for _, row in rows), sum(size * row["count"] for size, row in rows)

            if stage == 0:
                calls, nbytes = requested["all_reduce"]
                assert of("all_reduce") == (calls, nbytes // 2)  # an all-reduce of n is asked for as 2 n
            else:
                assert (
                    of("all_gather") == requested["all_gather"] and of("reduce_scatter") == requested["reduce_scatter"]
                )
            for sizes in numbers.values():
                for row in sizes.values():
                    assert 0 <= row["waited_ms"] <= row["total_ms"] * 1.01
        table, others = [[line for line in lines if "communication log" in line] for _, _, lines in outcome]
        assert len(table) == 1 and not others  # at steps_per_print, on rank 0


def _off_by_default():
    engine = engine_of(tower(), 1)
    with logged() as lines:
        _train(engine, 1)
    assert not engine.monitor.enabled and not log.enabled and engine.flops_profiler is None
    engine.destroy()
    return lines


def test_silent_by_default():
    assert run_ranks(_off_by_default, 2) == [[], []]
    assert not dist.is_initialized()


def test_a_save_is_no_data_loading(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    lines = progress.ProgressLog(Root(), MonitorMaster({}), is_rank_0=True)
    with lines.during("save", tag="t"):
        clock[0] += 3.0
    clock[0] += 1.0  # between calls of the engine
    assert lines._report.outside_share(clock[0]) == 0.25


@pytest.mark.parametrize("every", [1, 2])
def test_only_what_is_outside_of_a_pipelines_schedule_is_data_loading(monkeypatch, every):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: clock[0])
    lines = progress.ProgressLog(Root(steps_per_print=every), MonitorMaster({}), is_rank_0=True)
    info = StepInfo(1, samples=8, batch=8, own_batch=8, skipped=0, lr=[0.1], norm=1.0, loss_scale=None)
    for _ in range(2):
        clock[0] += 1.0
        with lines.schedule():
            lines.before("forward")
            clock[0] += 1.0
            lines.after("forward")
            clock[0] += 2.0
            lines.step(info)
            clock[0] += 1.0  # after the update, in the same call
    clock[0] += 1.0
    assert lines._report.outside_share(clock[0]) == (1 / 2 if every == 1 else 3 / 11)


@on_ranks(1)
def test_a_missing_package_is_named_before_an_earlier_engine_loses_the_model() -> None:
    model = tower()
    engine = engine_of(model, 1)
    monitor.find_spec = lambda _package: None
    with pytest.raises(DeepSpeedConfigError, match="expected the package wandb"):
        engine_of(model, 1, wandb={"enabled": True})
    assert not engine._runtime.is_retired, "nothing was changed"
