"""What a user does first, in fresh processes: the commands, a training script, the quickstart."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepspeed
from tests.project.graph import ROOT

SCRIPT = ROOT / "tests" / "project" / "smoke_train.py"
QUICKSTART = ROOT / "examples" / "quickstart"
DEEPSPEED = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PLAIN = [sys.executable]
BUILD_TOOLS = ("gcc", "g++", "cc", "c++", "clang", "ninja", "nvcc", "hipcc", "cmake", "make")


@pytest.fixture
def environment(tmp_path):
    """A machine without build tools and without a place for compiled extensions; CPU only."""
    tools = tmp_path / "empty-path"
    tools.mkdir()
    blocker = tmp_path / "a-file"
    blocker.write_text("")
    environ = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX", "CUDA_HOME", "CUDA_PATH")}
    environ.update(
        PATH=str(tools),
        TORCH_EXTENSIONS_DIR=str(blocker / "extensions"),  # cannot be created, even by root
        PYTHONPATH=str(ROOT),
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    assert not [tool for tool in BUILD_TOOLS if shutil.which(tool, path=environ["PATH"])]
    return environ


def run(command: list[str], environ: dict[str, str], folder: Path, timeout: float = 240) -> str:
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        pytest.param(DEEPSPEED, 2, id="deepspeed", marks=pytest.mark.slow),  # the README's example starts so
        pytest.param(TORCHRUN, 2, id="torchrun", marks=pytest.mark.slow),  # accelerate launch starts so
        pytest.param(PLAIN, 1, id="python"),
    ],
)
def test_all_stages_train_without_build_tools(launcher, ranks, environment, tmp_path):
    run([*launcher, str(SCRIPT), str(tmp_path)], environment, tmp_path)
    written = sorted(tmp_path.glob("rank*.json"))
    assert len(written) == ranks
    for path in written:
        losses = json.loads(path.read_text())
        assert losses["0"] == losses["1"] == losses["2"] == losses["3"]
        assert losses["0"][-1] < losses["0"][0]


def test_report_command_without_build_tools(environment, tmp_path):
    shown = run([sys.executable, "-m", "deepspeed.cli.report"], environment, tmp_path)
    parts = ("/dev/shm", "accelerator", "ZeRO stages", "Not in this release")
    assert all(words in shown for words in (torch.__version__, deepspeed.__version__, *parts))


def test_the_example_of_the_readme_runs(environment, tmp_path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (tmp_path / "train.py").write_text(example)
    shown = run([*DEEPSPEED, "train.py"], environment, tmp_path)
    steps = [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", shown)]
    assert [step for step, _ in steps] == list(range(10, 101, 10)), "a line per ten steps, of one rank"
    assert steps[-1][1] < steps[0][1] / 2, steps


def short_config(folder: Path, steps: int) -> Path:
    config = json.loads((QUICKSTART / "ds_config.json").read_text())
    config["scheduler"]["params"].update(total_num_steps=steps, warmup_num_steps=2)
    config["train_micro_batch_size_per_gpu"] = 2
    path = folder / "ds_config.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(DEEPSPEED, id="deepspeed"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
        pytest.param(PLAIN, id="python", marks=pytest.mark.slow),
    ],
)
def test_quickstart_in_short(launcher, environment, tmp_path):
    config = short_config(tmp_path, steps=4)
    script = [str(QUICKSTART / "train.py"), "--deepspeed_config", str(config), "--output", str(tmp_path / "out")]
    script += ["--sample", "20"]
    shown = run([*launcher, *script], environment, tmp_path)
    start, end = _losses(shown)
    assert 5 < start < 6.5
    assert end < start
    _check_report(shown, tmp_path / "out")
    weights = ["--weights", str(tmp_path / "out" / "model.safetensors"), "--sample", "10"]
    written = run([sys.executable, str(QUICKSTART / "generate.py"), *weights], environment, tmp_path)
    rows = dict(re.findall(r"^ *(fp32|bf16|int8|int4) +([\d.]+) +\d+ +[\d.]+ x +[\d.]+ *$", written, re.MULTILINE))
    sizes = [float(rows[name]) for name in ("fp32", "bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True) and sizes[2] < 0.28 * sizes[0]


OLD_PROCESSOR = """
import runpy, sys
from deepspeed.accelerator import cpu_features
cpu_features.cpu_has_bf16 = lambda: False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_quickstart_on_a_processor_without_bf16(environment, tmp_path):
    config = short_config(tmp_path, steps=3)
    script = [str(QUICKSTART / "train.py"), "--deepspeed_config", str(config), "--output", str(tmp_path / "out")]
    script += ["--sample", "20"]
    shown = run([sys.executable, "-c", OLD_PROCESSOR, *script], environment, tmp_path)
    assert "no bf16 instructions: training in fp32" in shown
    _check_report(shown, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_quickstart_learns(environment, tmp_path):
    script = [str(QUICKSTART / "train.py"), "--output", str(tmp_path / "out")]
    shown = run([*DEEPSPEED, *script], environment, tmp_path, timeout=500)
    start, end = _losses(shown)
    assert 5 < start < 6.5
    assert end < 2.6
    _check_report(shown, tmp_path / "out")


def _losses(shown: str) -> tuple[float, float]:
    found = re.search(r"Loss: ([\d.]+) -> ([\d.]+) nats per byte", shown)
    assert found, shown
    return float(found[1]), float(found[2])


def _check_report(shown: str, output: Path) -> None:
    """The sample, the table whose counted bytes are those of the formula, the picture."""
    assert "def main(" in shown
    rows = re.findall(r"^.*?(\w[\w ]+?)\s{2,}([\d,]+)\s{2,}([\d,]+)\s{3}\S", shown, flags=re.MULTILINE)
    counted = {kind: (int(a.replace(",", "")), int(b.replace(",", ""))) for kind, a, b in rows}
    assert len(counted) >= 4, shown
    for kind, (found, expected) in counted.items():
        assert found == expected, f"{kind}: {found} bytes counted, {expected} by the formula"
    assert (output / "loss.png").stat().st_size > 5000
