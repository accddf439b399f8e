"""A training script that runs unmodified in every place, may be stopped at any time, and goes on when run again.

Run it as `deepspeed train.py --save_dir checkpoints --steps 100`.
"""

import argparse

import torch
from torch import nn

import deepspeed
from deepspeed.runtime.dataloader import RepeatingLoader


class Pairs(torch.utils.data.Dataset):
    """Points of a curve that the model learns."""

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        x = torch.rand(16, generator=torch.Generator().manual_seed(index))
        return x, torch.sin(3 * x).sum(dim=0, keepdim=True)


def settings(save_dir):
    return {
        "train_batch_size": 48,
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "preemption": {"enabled": True, "save_dir": save_dir},
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--save_dir", default="checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save_every", type=int, default=50)
    parser.add_argument("--local_rank", type=int, default=-1)  # some launchers pass it
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    engine, _, loader, _ = deepspeed.initialize(model=model, training_data=Pairs(), config=settings(args.save_dir))
    batches = iter(RepeatingLoader(loader))
    loss = None  # stays so in a run that was at its end already
    while engine.global_steps < args.steps:
        x, y = (part.to(engine.device) for part in next(batches))
        loss = (engine(x) - y).pow(2).mean()
        engine.backward(loss)
        engine.step()
        if engine.was_step_applied() and engine.global_steps % args.save_every == 0:
            engine.save_checkpoint(args.save_dir)
    if engine.global_rank == 0:
        print(f"done after step {engine.global_steps}" + (f", loss {loss.item():.4f}" if loss is not None else ""))
    engine.destroy()
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
