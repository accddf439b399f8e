"""AlexNet on images of CIFAR's shape as a pipeline. The images are made up: bright spots, which the classes place.

deepspeed --num_gpus 2 alexnet.py --stages 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import nn

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule

CLASSES, MICRO_BATCH, MICRO_BATCHES = 10, 16, 4


def layers() -> list[LayerSpec]:
    """The convolutions of Krizhevsky et al. 2012, narrower and without the first stride, as images are small."""
    widths = [(3, 24, True), (24, 48, True), (48, 96, False), (96, 64, False), (64, 64, True)]
    found = []
    for before, after, pools in widths:
        found += [LayerSpec(nn.Conv2d, before, after, kernel_size=3, padding=1), LayerSpec(nn.ReLU)]
        found += [LayerSpec(nn.MaxPool2d, kernel_size=2)] if pools else []
    found += [LayerSpec(nn.Flatten), LayerSpec(nn.Dropout), LayerSpec(nn.Linear, 64 * 4 * 4, 256), LayerSpec(nn.ReLU)]
    return [*found, LayerSpec(nn.Linear, 256, CLASSES)]


def images(seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches ``(images, labels)`` without end."""
    random = torch.Generator().manual_seed(seed)
    while True:
        labels = torch.randint(CLASSES, (MICRO_BATCH,), generator=random)
        pictures = 0.3 * torch.randn(MICRO_BATCH, 3, 32, 32, generator=random)
        for picture, label in zip(pictures, labels.tolist(), strict=True):
            row, column = divmod(label, 5)
            picture[:, 16 * row : 16 * row + 6, 6 * column : 6 * column + 6] += 1
        yield pictures, labels


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, and beside it how many are right."""
    right = (outputs.argmax(-1) == labels).float().mean()
    return nn.functional.cross_entropy(outputs.float(), labels), {"right": right}


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--local_rank", type=int, default=0)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(1)
    model = PipelineModule(layers(), num_stages=args.stages, loss_fn=loss_fn, schedule=args.schedule)
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(args=args, model=model, config=config)
    data = images(seed=engine.grid.data_parallel_id)
    for step in range(1, args.steps + 1):
        loss = engine.train_batch(data)
        if step % 20 == 0 and engine.global_rank == 0:
            print(f"step {step}: loss {loss.item():.3f}, {engine.metrics['right']:.0%} right")
    loss = engine.eval_batch(images(seed=1000 + engine.grid.data_parallel_id))
    if engine.global_rank == 0:
        print(f"evaluation: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
