"""A small convolutional network on CIFAR-10; batch size, optimizer, schedule and precision come from ds_config.json.

    deepspeed --num_gpus 2 cifar10.py --deepspeed --deepspeed_config ds_config.json
    torchrun --nproc-per-node 2 cifar10.py --deepspeed_config=./ds_config.json

README.md in this folder describes what one sees.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import cifar10_data
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import deepspeed
import deepspeed.comm as dist


class Net(nn.Module):
    """Two convolutions, three linear layers, 62,006 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of the ten classes, shape (batch, 10)."""
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    if args.make_data:
        cifar10_data.make(args.data)
    torch.manual_seed(0)
    net = Net()
    engine, _optimizer, loader, _scheduler = deepspeed.initialize(
        args=args,
        model=net,
        model_parameters=filter(lambda parameter: parameter.requires_grad, net.parameters()),
        training_data=cifar10_data.Cifar10(args.data),
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        losses = []
        for inputs, targets in loader:
            outputs = engine(to_engine(engine, inputs))
            loss = criterion(outputs, targets.to(engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps % args.log_every == 0:
                mean = sum(losses[-args.log_every :]) / len(losses[-args.log_every :])
                say(f"epoch {epoch}  step {engine.global_steps:5d}  loss {mean:.3f}  lr {engine.get_lr()[0]:.2e}")
    say(f"skipped {engine.skipped_steps} of {engine.global_steps} steps while the loss scale settled")
    say(f"right on {100 * accuracy(engine, args.data):.1f} % of the test pictures (guessing: 10 %)")


def to_engine(engine: deepspeed.DeepSpeedEngine, inputs: torch.Tensor) -> torch.Tensor:
    """Inputs on the engine's device, in the precision of its parameters."""
    inputs = inputs.to(engine.device)
    return inputs.half() if engine.fp16_enabled() else inputs


@torch.no_grad()
def accuracy(engine: deepspeed.DeepSpeedEngine, data: Path) -> float:
    engine.eval()
    right = total = 0
    for inputs, targets in DataLoader(cifar10_data.Cifar10(data, train=False), batch_size=100):
        found = engine(to_engine(engine, inputs)).argmax(dim=1).cpu()
        right, total = right + int((found == targets).sum()), total + len(targets)
    return right / total


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="CIFAR-10 with DeepSpeed")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed command")
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder that holds cifar-10-batches-py")
    parser.add_argument("--make_data", action="store_true", help="write a small made data set there if there is none")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--log_every", type=int, default=50, help="steps")
    return deepspeed.add_config_arguments(parser).parse_args()


if __name__ == "__main__":
    main()
