"""Each monitor alone: what it writes where, what it logs when it cannot."""

import logging
from types import SimpleNamespace

import pytest

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
from deepspeed.monitor import monitor
from deepspeed.monitor.monitor import MonitorMaster, csvMonitor, get_monitor_config
from deepspeed.runtime.config import DeepSpeedConfig
from tests.monitor.fakes import FakeRun, fake_comet, fake_wandb, install

EVENTS = [
    ("Train/Samples/train_loss", 0.5, 8),
    ("Train/Samples/lr", 0.001, 8),
    ("Train/Samples/train_loss", float("nan"), 16),
]


@pytest.fixture
def warnings():
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


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
