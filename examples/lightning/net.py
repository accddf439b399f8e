"""The CIFAR-10 network as a LightningModule, its data and its arguments; shared by the three scripts of this folder."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

sys.path.append(str(Path(__file__).resolve().parents[1] / "cifar10"))
import cifar10_data


class ConvPart(nn.Module):
    """Pictures to 400 features."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        return x.view(-1, 16 * 5 * 5)


class MLPPart(nn.Module):
    """400 features to the logits of ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc3(self.relu(self.fc2(self.relu(self.fc1(x)))))


class Net(pl.LightningModule):
    """Both parts, put together in ``configure_sharded_model``, which Lightning calls inside ``deepspeed.zero.Init``.

    Args:
        optimizer: Class of the optimizer, one of deepspeed's.
    """

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same network in every run
        self.optimizer_class = optimizer
        self.conv_part = ConvPart()
        self.mlp_part = MLPPart()
        self.losses: list[float] = []

    def configure_sharded_model(self) -> None:
        self.block = nn.Sequential(self.conv_part, self.mlp_part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        mean = sum(self.losses) / len(self.losses)
        self.print(
            f"epoch {self.current_epoch}: mean loss {mean:.3f} in {len(self.losses)} steps of rank 0", flush=True
        )
        self.losses.clear()

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self(x).argmax(dim=1) == y).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer_class(self.parameters())


def parse_arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--max_epochs", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=768, help="of one rank")
    parser.add_argument("--num_workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--devices", type=int, default=2, help="ranks on this node, one per GPU")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds cifar-10-batches-py")
    parser.add_argument("--make_data", action="store_true", help="write a small made data set there if there is none")
    return parser.parse_args()


def loader(args: argparse.Namespace, train: bool = True) -> DataLoader:
    if args.make_data:
        cifar10_data.make(args.data)
    return DataLoader(cifar10_data.Cifar10(args.data, train), batch_size=args.batch_size, num_workers=args.num_workers)


def run(net: Net, trainer: pl.Trainer, args: argparse.Namespace) -> None:
    """Trains, then counts what the network gets right."""
    trainer.fit(net, loader(args))
    (found,) = trainer.test(net, loader(args, train=False), verbose=False)
    net.print(f"right on {100 * found['accuracy']:.1f} % of the test pictures (guessing: 10 %)", flush=True)


def node_count() -> int:
    """Nodes of the SLURM job; one without SLURM."""
    return int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
