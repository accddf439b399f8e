"""Ray Train on this machine: Ray starts the process group and the workers, and merges the workers' folders.

The calls are those of Ray's own example for DeepSpeed: ``optimizer.step()`` and ``lr_scheduler.step()`` of the caller,
``gradient_clipping`` as true, a checkpoint folder per worker. Needs ray[train]: ``make test-ray``.
"""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch

import deepspeed

ray = pytest.importorskip("ray")
ray_train = pytest.importorskip("ray.train")

from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]
ROOT = str(Path(__file__).parents[3])


def settings(workers):
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "bf16": {"enabled": False},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"},
            "stage3_param_persistence_threshold": 0,
        },
        "gradient_accumulation_steps": 1,
        "gradient_clipping": True,
        "train_micro_batch_size_per_gpu": 12 // workers,
        "train_batch_size": 12,
    }  # fmt: skip


def batch_of(step):
    x = torch.rand(12, 6, generator=torch.Generator().manual_seed(step))
    return x, x.sum(dim=1, keepdim=True)


def train(config):
    """One worker."""
    context = ray_train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    assert torch.distributed.is_initialized(), "Ray starts the group"
    group = torch.distributed.group.WORLD
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    model, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(workers)
    )
    device = deepspeed.get_accelerator().device_name(model.local_rank)
    checkpoint = ray_train.get_checkpoint() or config.get("resume")  # after a failure, or given by the caller
    first = 0  # the engine counts its own step() only
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            path, client_state = model.load_checkpoint(folder)
            assert path is not None
            first = client_state["step"]
    for step in range(first, config["steps"]):
        model.train()
        x, y = (part.chunk(workers)[rank].to(device) for part in batch_of(step))
        loss = (model(x) - y).pow(2).mean()
        model.backward(loss)
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        model.eval()
        kill = config.get("kill")
        if kill is not None and step == 2 and rank == 1 and not os.path.exists(kill):
            open(kill, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            model.save_checkpoint(folder, client_state={"step": step + 1})
            torch.distributed.barrier()
            own = Checkpoint.from_directory(folder)
            x, y = batch_of(99)
            with torch.no_grad():
                value = float((model(x) - y).pow(2).mean())
            metrics = {"loss": value, "first": first, "rank": model.global_rank, "lr": lr_scheduler.get_last_lr()[0]}
            ray_train.report(metrics, checkpoint=own)
    assert torch.distributed.group.WORLD is group, "the group is Ray's until the end"
    model.destroy()
    assert torch.distributed.is_initialized()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    variables = {"PYTHONPATH": ROOT, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
    yield
    ray.shutdown()


def fit(folder, workers, *, failures=0, **config):
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": 4, **config},
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(folder), name="run", failure_config=FailureConfig(max_failures=failures)),
    )
    return trainer.fit()


def test_train_report_save_and_resume_at_other_numbers_of_workers(tmp_path):
    whole = fit(tmp_path / "whole", 2, steps=6)
    assert whole.error is None and whole.metrics["first"] == 0
    part = fit(tmp_path / "part", 2, steps=3)
    with part.checkpoint.as_directory() as merged:
        names = {path.name for path in Path(merged).rglob("*") if path.is_file()}
        assert "latest" in names
    for workers in (3, 1):
        rest = fit(tmp_path / f"rest{workers}", workers, steps=6, resume=part.checkpoint)
        assert rest.error is None and rest.metrics["first"] == 3
        assert rest.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)
        assert rest.metrics["lr"] == whole.metrics["lr"]


def test_a_killed_worker_is_retried_from_the_checkpoint(tmp_path):
    whole = fit(tmp_path / "whole", 2)
    mark = tmp_path / "killed"
    found = fit(tmp_path / "killed_run", 2, failures=1, kill=str(mark))
    assert mark.exists() and found.error is None
    assert found.metrics["first"] > 0
    assert found.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-4)
