"""Ray Train on this machine: Ray starts the process group and the workers, and merges the workers' folders.

The calls are those of Ray's own example for DeepSpeed: ``optimizer.step()`` and ``lr_scheduler.step()`` of the caller,
``gradient_clipping`` as true, a checkpoint folder per worker. Needs ray[train]: ``make test-ray``.
"""

import os
import runpy
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
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


# Ray lowers the priority of its workers by 15, with which they may get nothing for minutes beside other programs, and
# starts those again that are not there within a minute.
ON_A_BUSY_MACHINE = {
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "600",
}


def start_ray(**options):
    """Starts Ray; again where its processes were not there within its own 30 seconds, which no setting changes."""
    for is_last in (False, False, False, True):
        try:
            ray.init(**options)
            return
        except Exception as error:
            if is_last or "timed out during startup" not in str(error):
                raise
            ray.shutdown()


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ.update(ON_A_BUSY_MACHINE)
    variables = {"PYTHONPATH": ROOT, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    start_ray(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables}, log_to_driver=False)
    priority = ray.get(ray.remote(lambda: os.nice(0)).remote())
    assert priority == os.nice(0), "Ray's workers have another priority than this process"
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


# --- Ray's integrations of Lightning and Transformers ----------------------------------------------------------------

EXAMPLES = 24


def examples():
    x = torch.rand(EXAMPLES, 6, generator=torch.Generator().manual_seed(5))
    return x, x.sum(dim=1, keepdim=True)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))


def plain_losses(epochs, clip=float("inf")):
    """The loss of each step of plain torch on batches of 12 examples; the norm of its gradients is at most ``clip``."""
    model, losses = network(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    x, y = examples()
    for _ in range(epochs):
        for part in range(0, EXAMPLES, 12):
            loss = (model(x[part : part + 12]) - y[part : part + 12]).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            losses.append(loss.item())
    return losses


def train_with_lightning(config):
    """One worker of Lightning under Ray, as Ray's guide has it."""
    runpy.run_path(f"{ROOT}/examples/on_cpu.py")["REPLACEMENTS"]["lightning"]()
    import lightning.pytorch as pl
    from ray.train.lightning import (
        RayDeepSpeedStrategy,
        RayLightningEnvironment,
        RayTrainReportCallback,
        prepare_trainer,
    )

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def training_step(self, batch, index):
            x, y = batch
            loss = (self.layers(x) - y).pow(2).mean()
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0)

    group = torch.distributed.group.WORLD
    workers = ray_train.get_context().get_world_size()
    trainer = prepare_trainer(
        pl.Trainer(
            max_epochs=config["epochs"], strategy=RayDeepSpeedStrategy(stage=3), plugins=[RayLightningEnvironment()],
            callbacks=[RayTrainReportCallback()], accelerator="auto", devices="auto", logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            use_distributed_sampler=False,
        )
    )  # fmt: skip
    data = torch.utils.data.TensorDataset(*examples())
    sampler = torch.utils.data.DistributedSampler(data, workers, trainer.global_rank, shuffle=False)
    loader = torch.utils.data.DataLoader(data, batch_size=12 // workers, sampler=sampler)
    checkpoint = config.get("resume")
    if checkpoint is None:
        trainer.fit(Module(), train_dataloaders=loader)
    else:
        with checkpoint.as_directory() as folder:
            trainer.fit(Module(), train_dataloaders=loader, ckpt_path=os.path.join(folder, "checkpoint.ckpt"))
    assert trainer.world_size == workers and trainer.global_step == 2 * config["epochs"]
    assert torch.distributed.group.WORLD is group


def train_with_transformers(config):
    """One worker of the Trainer under Ray, as Ray's guide has it."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = network()

        def forward(self, x, labels):
            found = self.layers(x)
            return {"loss": (found - labels).pow(2).mean(), "logits": found}

    class Unshuffled(Trainer):
        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(self.train_dataset)

    workers = ray_train.get_context().get_world_size()
    x, y = examples()
    settings = {
        "train_micro_batch_size_per_gpu": "auto", "train_batch_size": "auto", "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}, "gradient_clipping": "auto",
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=config["output"], deepspeed=settings, per_device_train_batch_size=12 // workers, use_cpu=True,
        num_train_epochs=config["epochs"], lr_scheduler_type="constant", learning_rate=1e-2, max_grad_norm=1.0,
        logging_steps=1, save_strategy="epoch", report_to="none", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    data = [{"x": x[number], "labels": y[number]} for number in range(EXAMPLES)]
    trainer = Unshuffled(model=Model(), args=arguments, train_dataset=data)
    trainer.add_callback(RayTrainReportCallback())
    prepare_trainer(trainer).train(resume_from_checkpoint=config.get("checkpoint"))
    assert trainer.is_deepspeed_enabled and torch.distributed.is_initialized()


def fit_integration(body, folder, workers, **config):
    trainer = TorchTrainer(
        body, train_loop_config=config, scaling_config=ScalingConfig(num_workers=workers, use_gpu=False),
        run_config=RunConfig(storage_path=str(folder), name="run"),
    )  # fmt: skip
    found = trainer.fit()
    assert found.error is None
    return found


def test_lightning_under_ray_trains_like_plain_torch_and_resumes(tmp_path):
    pytest.importorskip("lightning")
    losses = plain_losses(4)
    part = fit_integration(train_with_lightning, tmp_path / "part", 2, epochs=2)
    assert part.metrics["loss"] == pytest.approx(losses[3], rel=1e-4)
    rest = fit_integration(train_with_lightning, tmp_path / "rest", 2, epochs=4, resume=part.checkpoint)
    assert rest.metrics["loss"] == pytest.approx(losses[7], rel=1e-4)


def test_transformers_under_ray_trains_like_plain_torch_and_resumes(tmp_path):
    losses = plain_losses(4, clip=1.0)
    folder = str(tmp_path / "trainer")
    part = fit_integration(train_with_transformers, tmp_path / "part", 2, epochs=2, output=folder)
    assert part.metrics["loss"] == pytest.approx(losses[3], abs=2e-4)
    with part.checkpoint.as_directory() as merged:
        checkpoint = os.path.join(merged, "checkpoint")
        rest = fit_integration(
            train_with_transformers, tmp_path / "rest", 2, epochs=4, output=folder, checkpoint=checkpoint
        )
    assert rest.metrics["loss"] == pytest.approx(losses[7], abs=2e-4)
