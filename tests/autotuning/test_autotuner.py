"""Real scripts under ``deepspeed --autotuning``."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed.autotuning import autotuner
from deepspeed.autotuning.autotuner import find_config, with_config, with_mapped
from deepspeed.autotuning.choice import CandidatePlan, TrialQueue
from deepspeed.autotuning.experiment import Experiment
from deepspeed.autotuning.feature import PhaseTimer, TuningConfig, TuningHooks
from deepspeed.autotuning.results import as_text, reason_of, results_table
from deepspeed.errors import DeepSpeedConfigError

SCRIPT = """
import argparse
import torch
import deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=0)
parser = deepspeed.add_config_arguments(parser)
args, _ = parser.parse_known_args()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
config = None if args.deepspeed_config else CONFIG
engine, *_ = deepspeed.initialize(args=args, model=model, config=config)
size = args.batch or engine.train_micro_batch_size_per_gpu()
for step in range(20 * engine.gradient_accumulation_steps()):
    x = torch.randn(size, 8, device=engine.device)
    engine.backward(engine(x).square().mean())
    engine.step()
print("trained to the end with", size)
"""


def tune(folder: Path, *options: str, config=None, arguments=(), script=SCRIPT, how="tune"):
    """Runs the command; returns its exit code and what it wrote."""
    (folder / "train.py").write_text(textwrap.dedent(script).replace("CONFIG", repr(config)))
    command = [sys.executable, "-m", "deepspeed.launcher.runner", f"--autotuning={how}", *options, "train.py"]
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "train_batch_size": 8}


def test_run_tunes_a_dict_of_the_script_and_then_trains_with_the_best(tmp_path):
    config = {**ADAM, "zero_optimization": {"stage": [0, 1]}, "autotuning": {"tuner_num_trials": 1}}
    code, text = tune(tmp_path, "--num_gpus=1", config=config, how="run")
    assert code == 0, text
    results = tmp_path / "autotuning_results"
    best = json.loads((results / "ds_config_optimal.json").read_text())
    size = best["train_micro_batch_size_per_gpu"]
    assert best["train_batch_size"] == 8 == size * best["gradient_accumulation_steps"]
    assert "autotuning" not in best and best["zero_optimization"]["stage"] in (0, 1)
    assert f"trained to the end with {size}" in text  # after the search, with that configuration
    assert "chosen" in text and "measured / predicted" in text
    name = f"z{best['zero_optimization']['stage']}_gas{8 // size}_tmbspg{size}"
    metrics = json.loads((results / name / "metrics.json").read_text())
    assert {"fwd", "bwd", "step", "latency", "throughput", "FLOPS_per_gpu"} <= metrics.keys()
    assert metrics["steps"] == 10 and metrics["throughput"] > 0
    assert 0 < metrics["fwd"] + metrics["bwd"] + metrics["step"] <= metrics["latency"]
    assert "trained to the end" not in (results / name / "stdout.log").read_text()  # a trial ends itself
    assert (results / name / "cmd.txt").exists() and (results / name / "ds_config.json").exists()
    assert json.loads((tmp_path / "autotuning_exps" / f"{name}.json").read_text())["num_gpus"] == 1
    info = json.loads((results / "profile_model_info" / "model_info.json").read_text())
    assert info["num_params"] == 8 * 32 + 32 + 32 * 8 + 8
    assert "global" in (results / "summary.txt").read_text()
    assert "cmd_optimal.txt" in text and "train.py" in (results / "cmd_optimal.txt").read_text()


@pytest.mark.slow
def test_a_script_with_a_batch_of_its_own_keeps_its_micro_batch_and_logs_it(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({**ADAM, "zero_optimization": {"stage": 1}}))
    arguments = ["--batch", "4", "--deepspeed_config", "ds.json"]
    code, text = tune(tmp_path, "--num_gpus=1", arguments=arguments)
    assert code == 0, text
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["train_micro_batch_size_per_gpu"] == 4
    failed = [line for line in text.splitlines() if " failed: " in line]
    assert len(failed) == 1 and "gave its model 4 samples where train_micro_batch_size_per_gpu is 8" in failed[0]


def test_a_script_that_fails_is_quoted(tmp_path):
    broken = SCRIPT.replace("model = ", "raise ValueError('no such data')\nmodel = ")
    code, text = tune(tmp_path, "--num_gpus=1", config=ADAM, script=broken)
    assert code != 0
    assert "the script could not be profiled: ValueError: no such data" in text
    assert not (tmp_path / "autotuning_results" / "ds_config_optimal.json").exists()


@pytest.mark.slow
def test_a_script_that_ends_early_gets_advice(tmp_path):
    short = SCRIPT.replace("range(20 * engine.gradient_accumulation_steps())", "range(1)")
    code, text = tune(tmp_path, "--num_gpus=1", config=ADAM, script=short)
    assert code != 0
    assert "the script ended after" in text and "let it train longer" in text


@pytest.mark.parametrize("error", [None, ValueError("bad")])
def test_an_exception_is_not_called_an_early_end(error, tmp_path, monkeypatch):
    trial = TuningConfig(Experiment("a", "trial", str(tmp_path)), {}, {}, {})
    hooks = TuningHooks(trial, None, None)
    monkeypatch.setattr(sys, "last_value", error, raising=False)  # as Python does for an exception that nobody caught
    hooks._end_early()
    failure = tmp_path / "failure.json"
    assert failure.exists() == (error is None)
    if error is None:
        reason = json.loads(failure.read_text())["reason"]
        assert reason.startswith("the script ended after 0 updates") and "let it train longer" in reason
    (tmp_path / "stderr.log").write_text("[rank 0] Traceback (most recent call last):\n[rank 0] ValueError: bad\n")
    assert reason_of(tmp_path, 1) == "ValueError: bad"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_alone_whose_batch_has_another_size_writes_why(rank, tmp_path, monkeypatch):
    hooks = TuningHooks(TuningConfig(Experiment("a", "trial", str(tmp_path)), {}, {}, {}), None, None)
    hooks._engine = SimpleNamespace(train_micro_batch_size_per_gpu=lambda: 8)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda: rank)
    with pytest.raises(SystemExit):
        hooks._take_inputs(torch.nn.Linear(3, 3), (torch.ones(4, 3),), {})
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["is_micro_batch"] and "gave its model 4 samples" in failure["reason"]


def test_a_script_without_an_engine_gets_advice(tmp_path):
    assert "the script ended without an engine of deepspeed.initialize" in reason_of(tmp_path, 0)
    assert reason_of(tmp_path, 3).startswith("exit code 3; see ")


@pytest.mark.parametrize("label", ["", "[rank 0] "])
def test_an_error_of_several_lines_is_quoted_in_full(label, tmp_path):
    lines = ["Traceback (most recent call last):", "ValueError: mismatch:", "- a=1 vs b=2", "Use 'auto'."]
    text = "".join(f"{label}{line}\n" for line in lines)
    (tmp_path / "stderr.log").write_text(f"{text}[rank 1] the same error\ndeepspeed: rank 0 failed first\n")
    assert reason_of(tmp_path, 1) == "ValueError: mismatch: - a=1 vs b=2 Use 'auto'"


def test_the_launchers_sentence_is_the_reason_where_no_rank_has_started(tmp_path):
    sentence = "none.py: no such script in /tmp; options must precede the script"
    (tmp_path / "stderr.log").write_text(f"deepspeed: {sentence}\ndeepspeed: exit code 1\n")
    assert reason_of(tmp_path, 1) == sentence


def test_a_program_that_is_killed_has_failed_and_the_search_continues(tmp_path):
    program = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    assert autotuner._run_to_end(program, {}, tmp_path) == -9


def test_a_signal_to_the_search_goes_to_the_program_and_ends_both(tmp_path):
    text = "import os, signal, sys\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()"
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as caught:
        autotuner._run_to_end([sys.executable, "-c", text], {}, tmp_path)
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_while_the_program_is_started_ends_both(tmp_path, monkeypatch):
    start = subprocess.Popen

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return start(*arguments, **options)

    monkeypatch.setattr(autotuner.subprocess, "Popen", interrupted)
    with pytest.raises(SystemExit) as caught:
        autotuner._run_to_end([sys.executable, "-c", "import signal; signal.pause()"], {}, tmp_path)
    assert caught.value.code == 128 + signal.SIGTERM


def row(name, seconds, **more):
    changes = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}
    return {"name": name, "changes": changes, "fits": True, "seconds": seconds, "plan_seconds": 0.1, **more}


def fake_search(folder, monkeypatch, rows, outcome):
    """Returns a tuner whose starts are ``outcome(name, folder)``: milliseconds, or an exit code below 0."""
    monkeypatch.chdir(folder)
    started = []

    def start(_command, environment, _folder, _fork):
        experiment = Experiment.read(environment["DS_AUTOTUNING"])
        started.append(experiment.name)
        path = Path(experiment.folder)
        if experiment.kind == "profile":
            profile = {"seconds": 0.1, "changes": {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8}}
            facts = {"rows": rows, "config": {"train_batch_size": 8}, "section": {}, "profile": profile}
            (path / "planned-0.json").write_text(json.dumps(facts))
            return 0
        found = outcome(experiment.name, path)
        if found > 0:
            metrics = {"latency": found, "latency_quartiles": [found, found]}
            (path / "metrics.json").write_text(json.dumps(metrics))
        return min(found, 0)

    monkeypatch.setattr(autotuner, "_run_to_end", start)
    args = argparse.Namespace(user_args=[], user_script="train.py", hostfile="", start_options=())
    return autotuner.Autotuner(args, {"here": [0]}), started


def test_what_does_not_fit_is_never_started(tmp_path, monkeypatch):
    rows = [row("a", 0.2), row("big", 0.1, fits=False, device_bytes=9, usable_bytes=1)]
    tuner, started = fake_search(tmp_path, monkeypatch, rows, lambda name, path: 200.0)
    tuner.tune()
    assert started == ["profile_model_info", "a"]


def test_plans_of_an_earlier_search_are_not_read_again(tmp_path, monkeypatch):
    tuner, started = fake_search(tmp_path, monkeypatch, [row("a", 0.2)], lambda name, path: 200.0)
    tuner.section = tuner.section.model_copy(update={"overwrite": False})
    earlier = tuner.results_dir / "profile_model_info"
    earlier.mkdir(parents=True)
    facts = {"rows": [row("of another rank", 0.1)], "config": {}, "section": {}, "profile": {}}
    (earlier / "planned-1.json").write_text(json.dumps(facts))
    tuner.tune()
    assert started == ["profile_model_info", "a"]


@pytest.mark.parametrize("reason", ["found a tensor of [batch, tokens]", "no file [/tmp/x]"])
def test_the_table_shows_brackets_in_reasons(reason):
    rows = [CandidatePlan("a", {}, fits=True, seconds=1.0), CandidatePlan("b", {}, refusal=reason)]
    queue = TrialQueue(rows, failed={"a": reason})
    shown = " ".join(as_text(results_table(queue, samples=4)).split())
    assert reason.split()[-1] in shown and shown.count("[") == 2


@pytest.mark.parametrize("walls", [[0.01], [0.01, 0.09], [0.03, 0.01, 0.02, 0.09]])
def test_quartiles_of_few_updates_are_between_them(walls, tmp_path, monkeypatch):
    hooks = TuningHooks.__new__(TuningHooks)
    hooks.tracker = PhaseTimer()
    hooks._experiment = Experiment("a", "trial", str(tmp_path))
    hooks._engine = argparse.Namespace(train_batch_size=lambda: 8)
    monkeypatch.setattr(hooks, "_walls", lambda: walls)
    hooks._write_metrics()
    low, high = json.loads((tmp_path / "metrics.json").read_text())["latency_quartiles"]
    assert 1e3 * min(walls) <= low <= high <= 1e3 * max(walls)


def test_a_search_that_is_stopped_names_the_fastest_so_far(tmp_path, monkeypatch, caplog):
    def outcome(name, path):
        if name == "b":
            raise SystemExit(130)
        return 200.0

    tuner, started = fake_search(tmp_path, monkeypatch, [row("a", 0.2), row("b", 0.201)], outcome)
    with pytest.raises(SystemExit):
        tuner.tune()
    assert started == ["profile_model_info", "a", "b"]
    assert "stopped after 1 trials; the fastest so far is a" in caplog.text


def test_a_killed_trial_reports_what_the_launcher_has_seen(tmp_path, monkeypatch):
    def outcome(name, path):
        if name == "b":
            return 200.0
        line = "deepspeed: rank 0 (local rank 0, pid 7) failed first on host n: ended by signal 9 (SIGKILL)"
        (path / "stderr.log").write_text(f"[INFO] starting\n{line}\n")
        return -9

    tuner, _ = fake_search(tmp_path, monkeypatch, [row("a", 0.2), row("b", 0.201)], outcome)
    tuner.tune()
    assert tuner._queue.failed["a"].startswith("rank 0 (local rank 0, pid 7) failed first on host n: ended by signal 9")
    assert tuner._queue.best == "b"


@pytest.mark.parametrize(
    ("arguments", "made"),
    [
        (["--a", "--deepspeed_config", "x.json", "--b"], ["--a", "--deepspeed_config", "new.json", "--b"]),
        (["--deepspeed", "x.json"], ["--deepspeed", "new.json"]),
        (["--deepspeed_config=x.json"], ["--deepspeed_config=new.json"]),
        (["--deepspeed", "--deepspeed_config", "x.json"], ["--deepspeed", "--deepspeed_config", "new.json"]),
        (["--deepspeed"], ["--deepspeed"]),
        (["x.json"], ["x.json"]),
    ],
)
def test_the_file_of_the_configuration_is_replaced(arguments, made):
    assert with_config(arguments, Path("new.json")) == made


def test_a_script_without_a_file_has_none():
    assert find_config(["--epochs", "3"]) is None


def test_mapped_arguments_carry_values():
    mappings = {
        "train_micro_batch_size_per_gpu": "--batch ",
        "gradient_accumulation_steps ": "--steps",
        "fp16.enabled": "-h",
    }
    changes = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
    assert with_mapped(["--batch", "1", "-x"], mappings, changes) == ["--batch", "4", "-x", "--steps", "2"]
    assert with_mapped(["--batch=1", "--steps", "9"], mappings, changes) == ["--batch=4", "--steps", "2"]
    with pytest.raises(DeepSpeedConfigError, match="arg_mappings.* expected an option of the script"):
        with_mapped([], {"train_batch_size": "batch"}, changes)
