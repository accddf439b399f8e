"""Trains a small Llama whose layers are cut over ranks, by configuration alone.

    torchrun --nproc-per-node 2 examples/tensor_parallel.py
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 2 --stage 3
    torchrun --nproc-per-node 4 examples/tensor_parallel.py --tensor 4

The table of what was cut is printed by ``deepspeed.initialize``. The losses do not depend on how the ranks are laid out
beyond the number of samples per step: one data-parallel rank more is two samples more.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed


def main() -> None:
    """Trains on a made-up text in which every third token repeats."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share a layer")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
    text = torch.randint(0, 256, (512, 32), generator=torch.Generator().manual_seed(1))
    text[:, 2::3] = text[:, 1:-1:3]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": arguments.stage},
        "tensor_parallel": {"autotp_size": arguments.tensor},
    }
    engine, _, loader, _ = deepspeed.initialize(model=model, config=config, training_data=list(text))
    for step, batch in zip(range(arguments.steps), loader, strict=False):
        batch = batch.to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
