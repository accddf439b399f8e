"""Engines come and go, save beside training, and load by processes of their own, while ranks hold connections."""

import gc
import os
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import deepspeed
from deepspeed.comm.host.message_queue import MessageQueue
from deepspeed.comm.job.job import Job
from deepspeed.pipe import PipelineModule
from tests.harness import on_ranks


def _config(stage: int, count: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": count,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
    }


def _trained(stage: int) -> None:
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=_config(stage))[0]
    engine.backward(engine(torch.ones(2, 4)).square().mean())
    engine.step()
    engine.destroy()


def _piped() -> None:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    engine = deepspeed.initialize(model=module, config=_config(0, 2))[0]
    engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 2))
    engine.destroy()


@on_ranks(2, fresh=True)
def test_engines_come_and_go() -> None:
    files, threads = [], []
    for number in range(50):
        _piped() if number % 3 == 2 else _trained((0, 3)[number % 3])
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
        threads.append(len(os.listdir("/proc/self/task")))
    counts = files, threads
    for count in counts:
        assert max(count[40:]) <= max(count[10:20]), counts


@on_ranks(2, fresh=True)
def test_saves_beside_training_and_loaders_leave_it_alone(tmp_path) -> None:
    """Which threads use mail while a checkpoint is written beside training, from a loader with processes of its own."""
    folder = str(tmp_path)
    used = set()
    for name in ("post", "take"):
        plain = getattr(MessageQueue, name)

        def noting(self: MessageQueue, *given: Any, _plain: Any = plain) -> None:
            used.add(threading.current_thread().name)
            _plain(self, *given)

        setattr(MessageQueue, name, noting)
    torch.manual_seed(dist.get_rank())
    engine = deepspeed.initialize(model=nn.Linear(4, 4), config=_config(2))[0]
    assert Job.adopt().watched.of(None).queue is not None
    loader = DataLoader(TensorDataset(torch.randn(16, 4)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(3):
        for number, (batch,) in enumerate(loader):
            engine.backward(engine(batch).square().mean())
            engine.step()
            if number in (1, 5):
                engine.save_checkpoint(folder, async_save=True)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(folder)
    assert used == {"MainThread"}
