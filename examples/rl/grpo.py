"""Trains a tiny Llama by GRPO. The weights that train also generate (colocated), on every rank.

    torchrun --nproc-per-node 2 examples/rl/grpo.py
    torchrun --nproc-per-node 2 examples/rl/grpo.py --stage 1 --report run

The reward is the share of even tokens in a response. While it generates, the engine's optimizer states are on the host;
with ``--report`` the page in that folder shows these phases of memory.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.rollout import RolloutBatch, RolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from deepspeed.runtime.rollout.opsd import ResponseTokenBatch
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_logprobs

SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=True
)
SAMPLES, CLIP = 8, 0.2


def response_log_probabilities(model: torch.nn.Module, batch: RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the log-probability of each response token, ``[responses, tokens]``, and their mask."""
    tokens = ResponseTokenBatch.from_rollout(batch)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return vocab_parallel_logprobs(tokens.select_causal_logits(logits), tokens.target_ids), tokens.response_mask


def rewards_of(batch: RolloutBatch) -> torch.Tensor:
    """Returns the share of even tokens in each response."""
    tokens = ResponseTokenBatch.from_rollout(batch)
    return ((tokens.target_ids % 2 == 0) * tokens.response_mask).sum(1) / tokens.response_mask.sum(1)


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Returns each reward beside the others of its prompt, ``[responses, 1]``."""
    groups = rewards.view(-1, SAMPLES)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)


def mean_over_ranks(values: torch.Tensor) -> float:
    """Returns the mean of all ranks' values."""
    mean = values.float().mean()
    deepspeed.comm.all_reduce(mean)
    return float(mean) / deepspeed.comm.get_world_size()


def main() -> None:
    """Generates, scores, updates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", default=None, help="folder for the run report")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4 * SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True},
        "run_report": {"path": arguments.report},
    }
    engine, *_ = deepspeed.initialize(model=LlamaForCausalLM(SHAPE), config=config)
    rollout = build_rollout(RolloutConfig(), engine, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    sampling = SamplingConfig(max_new_tokens=8, n_samples_per_prompt=SAMPLES)
    torch.manual_seed(1 + engine.global_rank)
    seen = []
    for step in range(arguments.steps):
        prompts = torch.randint(1, SHAPE.vocab_size, (4, 4), device=engine.device)
        with engine.sleep(keep=("lp_params",)):  # generation needs the parameters alone
            batch = rollout.generate(RolloutRequest(prompts, torch.ones_like(prompts)), sampling)
        rewards = rewards_of(batch)
        seen.append(mean_over_ranks(rewards))
        advantages, before = advantages_of(rewards), None
        for _ in range(2):  # updates on the same responses
            now, mask = response_log_probabilities(engine, batch)
            before = now.detach() if before is None else before
            ratio = (now - before).exp()
            gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
            engine.backward(-(gain * mask).sum(), count=mask.sum())
            engine.step()
        if engine.global_rank == 0:
            print(f"step {step + 1}: reward {seen[-1]:.3f}", flush=True)
    engine.destroy()
    if engine.global_rank == 0:
        print(f"reward {seen[0]:.4f} -> {seen[-1]:.4f}")


if __name__ == "__main__":
    main()
