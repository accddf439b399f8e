"""A signal finishes the step, saves and leaves with a code; the same command continues, on any number of ranks."""

from __future__ import annotations

import argparse
import os
import signal
import threading

import psutil
import pytest
import torch

import deepspeed
from deepspeed.config import parse
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.launcher.launch import stop_signal
from deepspeed.ports import free_port
from deepspeed.preemption import feature
from deepspeed.preemption.feature import StopRequest, signals_of
from tests.harness.pool import run_ranks
from tests.launcher.processes import Launcher

COUNT = 48


class Numbered(torch.utils.data.Dataset):
    """Samples that know their number."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return torch.tensor([float(index)] * 3)


def _train(folder, losses=None, micro=2, section=None, stage=1):
    """Trains on 24 samples per step until told to stop, or for ten steps: (exit code, samples per step, weights)."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    settings = {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": micro,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20}},
        "zero_optimization": {"stage": stage},
        "preemption": {"enabled": True, "save_dir": str(folder), **(section or {})},
    }
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=Numbered(), config=settings
    )
    batches = iter(deepspeed.runtime.dataloader.RepeatingLoader(loader))
    used, code = [], None
    try:
        while engine.global_steps < 10:
            step = []
            for _ in range(engine.gradient_accumulation_steps()):
                batch = next(batches)
                step += batch[:, 0].long().tolist()
                engine.backward(engine(batch / COUNT).pow(2).mean())
                if losses == (engine.global_steps, int(os.environ["RANK"])):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    losses = None
                used.append(step) if len(step) == micro else None
                engine.step()
    except SystemExit as stop:
        code = stop.code
    weights = torch.cat([engine.module.weight.flatten(), engine.module.bias]).tolist() if stage < 3 else []
    engine.destroy()
    return code, used, weights, engine.global_steps


def _by_step(results):
    return [sorted(sum((used for used in step), [])) for step in zip(*(found[1] for found in results), strict=True)]


def test_the_same_command_continues_at_another_number_of_ranks(tmp_path):
    whole = run_ranks(_train, 2, tmp_path / "whole", None)
    first = run_ranks(_train, 2, tmp_path / "losses", (3, 1))
    assert [(found[0], found[3]) for found in first] == [(75, 4)] * 2
    (second,) = run_ranks(_train, 1, tmp_path / "losses", None, 4)
    assert second[0] is None and second[3] == 10
    assert _by_step(first) + _by_step([second]) == _by_step(whole)
    assert second[2] == pytest.approx(whole[0][2], abs=1e-6)


def test_without_resume_and_with_another_code(tmp_path):
    section = {"exit_code": 99, "resume": False}
    for _ in range(2):
        ((code, _, _, steps),) = run_ranks(_train, 1, tmp_path, (0, 0), 2, section)
        assert (code, steps) == (99, 1)


def test_the_second_signal_does_what_it_did_before(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(feature, "monotonic", lambda: clock[0])
    seen = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    try:
        request = StopRequest(["SIGUSR2"])
        os.kill(os.getpid(), signal.SIGUSR2)
        # Slurm sends one to the launcher and to the rank, and the launcher hands it on.
        os.kill(os.getpid(), signal.SIGUSR2)
        assert (request.reason, seen) == ("SIGUSR2", [])
        clock[0] += 6
        os.kill(os.getpid(), signal.SIGUSR2)
        assert seen == [signal.SIGUSR2]
        request.release()
        other = StopRequest(["SIGUSR2"])
        other.release()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert len(seen) == 2 and other.reason is None
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_signals_are_the_main_threads():
    caught = []

    def work():
        try:
            StopRequest(["SIGUSR1"])
        except DeepSpeedConfigError as error:
            caught.append(str(error))

    thread = threading.Thread(target=work, name="trainer")
    thread.start()
    thread.join()
    assert caught and "found thread 'trainer'" in caught[0]


def _initialize_fails(folder):
    before = signal.getsignal(signal.SIGTERM)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam"},
        "preemption": {"enabled": True, "save_dir": str(folder)},
    }

    def no_schedule(_optimizer):
        raise LookupError("no schedule")

    with pytest.raises(LookupError, match="no schedule"):
        deepspeed.initialize(model=torch.nn.Linear(3, 1), config=settings, lr_scheduler=no_schedule)
    (folder / "latest").write_text("nothing")
    with pytest.raises(CheckpointError):
        deepspeed.initialize(model=torch.nn.Linear(3, 1), config=settings)
    assert signal.getsignal(signal.SIGTERM) is before


def test_signals_have_their_effect_when_initialize_fails(tmp_path):
    run_ranks(_initialize_fails, 1, tmp_path)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"enabled": True}, "preemption.save_dir: expected a folder"),
        ({"enabled": True, "save_dir": "x", "signals": ["SIGKILL"]}, "preemption.signals: expected names of signals"),
        ({"enabled": True, "save_dir": "x", "exit_code": 0}, "preemption.exit_code"),
        ({"enabled": True, "safe_dir": "x"}, "preemption.safe_dir"),
    ],
)
def test_wrong_sections(section, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        parse({"train_batch_size": 1, "preemption": section})


def test_the_signal_of_the_command_line_is_added():
    section = parse({"train_batch_size": 1, "preemption": {"signals": ["SIGTERM"]}}).root.preemption
    assert section is not None
    assert signals_of(section, "") == signals_of(section, "SIGTERM") == ["SIGTERM"]
    assert signals_of(section, "SIGUSR2") == ["SIGTERM", "SIGUSR2"]
    with pytest.raises(DeepSpeedConfigError, match="DEEPSPEED_PREEMPTION_SIGNAL=SIGKILL: expected the name"):
        signals_of(section, "SIGKILL")
    assert stop_signal("usr1") == stop_signal("SIGUSR1") == "SIGUSR1"
    with pytest.raises(argparse.ArgumentTypeError, match="such as USR1 or SIGUSR1, found 'KILL'"):
        stop_signal("KILL")


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGTERM, ("--grace=30",)), (signal.SIGUSR1, ()), (signal.SIGHUP, ("--signal=hup",))]
)
def test_the_launcher_hands_the_signal_on_and_leaves_with_the_code_of_the_ranks(tmp_path, number, options):
    """The ranks take longer than the usual grace of a stop only where it was given."""
    script = """
        import pathlib, signal
        received = []
        named = signal.Signals[os.environ.get("DEEPSPEED_PREEMPTION_SIGNAL", "SIGUSR1")]
        for each in (signal.SIGTERM, named):
            signal.signal(each, lambda number, frame: received.append(number))
        pathlib.Path(f"up{rank}").touch()
        while not received: time.sleep(0.01)
        sys.exit(75 if received[0] == named or named == signal.SIGUSR1 else 1)
    """
    launcher = Launcher(tmp_path, script, "--num_gpus=2", f"--master_port={free_port()}", *options)
    launcher.wait_for_files("up0", "up1")
    launcher.process.send_signal(number)
    if number != signal.SIGTERM:  # a scheduler may send it to all processes; the supervisor of the ranks is one
        for child in psutil.Process(launcher.process.pid).children():
            child.send_signal(number)
    code, _, err = launcher.finish()
    assert code == 75, err
    assert "have saved and exited; start the same command again to resume" in err
