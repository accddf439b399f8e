"""Trains a small Llama and hands its weights to a served copy after each update, as loops of reinforcement learning do.

    torchrun --nproc-per-node 2 examples/trainer_and_server.py
    torchrun --nproc-per-node 2 examples/trainer_and_server.py --stage 1 --bf16

After each update rank 0 prints how far the log-probabilities of the served copy are from the trainer's, for the same
tokens. The copy stands for an inference server: it computes in fp32, in one process, from the streamed weights.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed


def log_probabilities(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each token given those before it, 2-D."""
    with torch.no_grad():
        logits = model(input_ids=tokens).logits.float().log_softmax(-1)
    return logits[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


def hidden_states(model: torch.nn.Module, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns the output of each layer."""
    with torch.no_grad():
        return model(input_ids=tokens, output_hidden_states=True).hidden_states[1:]


def main() -> None:
    """Trains, streams, compares."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--bf16", action="store_true", help="train in bf16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--per-layer", action="store_true", help="print the greatest difference after each layer")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    served = LlamaForCausalLM(shape).eval()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": arguments.stage},
        "bf16": {"enabled": arguments.bf16},
    }
    engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(shape), config=config)
    served.to(engine.device)
    for step in range(arguments.steps):
        tokens = torch.randint(0, 128, (4, 32), device=engine.device)
        engine.train()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        count = 0
        for name, values in engine.export_weights(dtype=torch.float32):  # on every rank; values arrive on rank 0
            served.load_state_dict({name: values}, strict=False)
            count += 1
        engine.eval()
        trained = log_probabilities(engine, tokens)
        if engine.global_rank == 0:
            gap = (log_probabilities(served, tokens) - trained).abs()
            print(f"step {step + 1}: {count} tensors, log-probability gap mean {gap.mean():.1e} max {gap.max():.1e}")
        if arguments.per_layer:
            states = hidden_states(engine, tokens)
            if engine.global_rank == 0:
                for layer, (own, theirs) in enumerate(zip(states, hidden_states(served, tokens), strict=True)):
                    print(f"layer {layer} {(own.float() - theirs.float()).abs().max():.1e}")


if __name__ == "__main__":
    main()
