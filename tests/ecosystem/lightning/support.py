"""Runs of Lightning; imported by the ranks only, since it loads Lightning."""

import os
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import nn

import deepspeed
from tests.ecosystem.lightning.devices import admit_ranks

warnings.filterwarnings("ignore", module="lightning")  # loaders without workers, metrics without names


class Linear(nn.Linear):
    """Starts with the same values wherever it is made: torch draws other numbers on a GPU than on the CPU."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        dice, bound = np.random.default_rng(self.weight.numel()), self.in_features**-0.5
        for parameter in (self.weight, self.bias):
            parameter.copy_(torch.from_numpy(dice.uniform(-bound, bound, tuple(parameter.shape))))


def layers(width: int = 331) -> nn.Sequential:
    """Sizes that no number of ranks divides; the second layer is large enough for stage 3 to shard it."""
    return nn.Sequential(Linear(5, width), nn.Tanh(), Linear(width, width), nn.Tanh())


class Lit(L.LightningModule):
    """A few layers; remembers its losses."""

    def __init__(self, lr: float = 0.0003, optimizer: Any = torch.optim.AdamW, schedule: bool = False):
        super().__init__()
        self.save_hyperparameters(ignore=["optimizer"])
        self.optimizer_class = optimizer
        self.layers = layers()
        self.head = Linear(331, 1)
        self.losses: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))

    def loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = batch
        return (self(x).float() - y.float()).square().mean()

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.log("train_loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer_class(self.parameters(), lr=self.hparams.lr)
        if not self.hparams.schedule:
            return optimizer
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5), "interval": "step"}]


def loader(rows: int = 24, batch_size: int = 2) -> torch.utils.data.DataLoader:
    """The same rows on every rank, of which Lightning hands each its share: the same batch again on up to two ranks."""
    dice = torch.Generator().manual_seed(5)
    x = torch.randn(2, 5, generator=dice).repeat(rows // 2, 1)
    data = torch.utils.data.TensorDataset(x, x.sum(dim=1, keepdim=True).sin())
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def all_devices() -> dict[str, Any]:
    """One device per rank. On CPU ranks it is what "gpu" stands for that is replaced."""
    return {"accelerator": "gpu", "devices": dist.get_world_size()}


def trainer(strategy: Any, folder: str | Path | None = None, **more: Any) -> L.Trainer:
    """A trainer on all ranks, silent unless told otherwise."""
    settings = {
        **all_devices(),
        "strategy": strategy,
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": folder,
    }
    return L.Trainer(**{**settings, **more})


def plain(**more: Any) -> L.Trainer:
    """The same on the CPU without deepspeed; also on one rank by DDP, which takes the rows in the same order."""
    return trainer("ddp", accelerator="cpu", **more)


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters as fp32 copies, at any stage."""
    values = {}
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters(parameter):
            values[name] = parameter.detach().float().cpu().clone()
    return values


def strategy(stage: int = 2, **more: Any) -> DeepSpeedStrategy:
    return DeepSpeedStrategy(stage=stage, **more)


@contextmanager
def run(folder: Path | str) -> Any:
    """A rank's part of a test: works in its folder, and puts back what Lightning changes for the process."""
    from deepspeed.logging import logger

    level, environ = logger.level, dict(os.environ)
    os.chdir(folder)
    admit_ranks(dist.get_world_size())
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.clear()
        os.environ.update(environ)
