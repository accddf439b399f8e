"""``accelerate launch`` with flags and with its yaml file, two processes on one machine."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ecosystem.accelerate import loops
from tests.ecosystem.support import needs_transformers

pytestmark = needs_transformers
ROOT = Path(__file__).resolve().parents[3]

FLAGS = [
    "--use_deepspeed", "--num_processes", "2", "--num_machines", "1", "--machine_rank", "0", "--dynamo_backend", "no",
    "--mixed_precision", "no", "--zero_stage", "3", "--gradient_accumulation_steps", "2", "--gradient_clipping", "0.25",
    "--offload_optimizer_device", "cpu", "--offload_param_device", "none", "--zero3_init_flag", "true",
    "--zero3_save_16bit_model", "true", "--main_process_port", "0",
]  # fmt: skip

YAML = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: DEEPSPEED
downcast_bf16: 'no'
machine_rank: 0
main_training_function: main
main_process_port: 0
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
deepspeed_config:
"""
IN_YAML = """
  gradient_accumulation_steps: 2
  gradient_clipping: 0.25
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 2
mixed_precision: bf16
"""
BY_FILE = """
  deepspeed_config_file: {file}
  zero3_init_flag: true
"""
FILE = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.25, "bf16": {"enabled": False},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.01}},
    "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
}  # fmt: skip


def _launch(folder: Path, *options: str) -> list[dict]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environ["HF_HOME"] = str(folder)  # no configuration of the user's own
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *options,
         str(Path(__file__).with_name("launched.py")), str(folder)],
        cwd=folder, env=environ, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def _expected_losses(rank: int, rate: Callable[[int], float] | None = None) -> list[float]:
    make = lambda parameters: torch.optim.AdamW(parameters, lr=loops.LR, weight_decay=0.01)  # noqa: E731
    return loops.plain(loops.Net(), make, rank, 2, rate)[1].losses


def test_flags(tmp_path):
    for rank, found in enumerate(_launch(tmp_path, *FLAGS)):
        assert found.pop("losses") == pytest.approx(_expected_losses(rank), rel=1e-4)
        assert found == {
            "ranks": 2, "stage": 3, "clipping": 0.25, "accumulation": 2, "offload": True, "bf16": False, "gather": True
        }  # fmt: skip


@pytest.mark.slow
def test_yaml(tmp_path):
    (tmp_path / "accelerate.yaml").write_text(YAML + IN_YAML)
    for rank, found in enumerate(_launch(tmp_path, "--config_file", str(tmp_path / "accelerate.yaml"))):
        assert found.pop("losses") == pytest.approx(_expected_losses(rank), rel=0.05)
        assert found == {
            "ranks": 2, "stage": 2, "clipping": 0.25, "accumulation": 2, "offload": False, "bf16": True, "gather": False
        }  # fmt: skip


@pytest.mark.slow
def test_yaml_that_names_a_configuration_file(tmp_path):
    (tmp_path / "deepspeed.json").write_text(json.dumps(FILE))
    (tmp_path / "accelerate.yaml").write_text(YAML + BY_FILE.format(file=tmp_path / "deepspeed.json"))
    # The schedule is that of the file: two updates at its least rate, then the greatest.
    expected = [_expected_losses(rank, lambda step: loops.LR * (step >= 2)) for rank in range(2)]
    for rank, found in enumerate(_launch(tmp_path, "--config_file", str(tmp_path / "accelerate.yaml"))):
        assert found.pop("losses") == pytest.approx(expected[rank], rel=1e-4)
        assert found == {
            "ranks": 2, "stage": 3, "clipping": 0.25, "accumulation": 2, "offload": False, "bf16": False, "gather": True
        }  # fmt: skip
