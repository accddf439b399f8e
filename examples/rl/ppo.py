"""Trains a tiny Llama by PPO: actor, critic, reference and reward model, of which the last two share their weights.

    torchrun --nproc-per-node 2 examples/rl/ppo.py

The actor (stage 3) generates its responses itself. The critic (stage 2) sleeps meanwhile; with ``--report`` the page in
that folder shows these phases of memory. The reward model scores tokens by their embeddings in the reference, so both
are one engine.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import deepspeed
from deepspeed.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from deepspeed.runtime.rollout.opsd import ResponseTokenBatch
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_logprobs

SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=True
)
CLIP, KL_WEIGHT, LAMBDA, RESPONSES, TOKENS = 0.2, 0.01, 0.95, 32, 8


class Critic(nn.Module):
    """Foretells before each response token the rewards from it on, ``[responses, tokens]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = LlamaModel(SHAPE), nn.Linear(SHAPE.hidden_size, 1)

    def forward(self, batch: ResponseTokenBatch) -> torch.Tensor:
        hidden = self.body(input_ids=batch.input_ids, attention_mask=batch.attention_mask).last_hidden_state
        return batch.select_causal_logits(self.head(hidden)).squeeze(-1)


class Judge(nn.Module):
    """The reference, and a reward model that scores tokens from 0 to 1 by the reference's embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = LlamaForCausalLM(SHAPE)
        self.direction = nn.Parameter(torch.randn(SHAPE.hidden_size))

    def forward(self, batch: ResponseTokenBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns log-probabilities and scores of the response tokens, ``[responses, tokens]``."""
        embedded = self.reference.get_input_embeddings()(batch.target_ids)
        return log_probabilities(self.reference, batch), torch.sigmoid(30 * embedded @ self.direction)


def log_probabilities(model: nn.Module, batch: ResponseTokenBatch) -> torch.Tensor:
    """Returns those of the response tokens, ``[responses, tokens]``."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return vocab_parallel_logprobs(batch.select_causal_logits(logits), batch.target_ids)


def advantages_of(rewards: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns generalized advantage estimates (arXiv 1506.02438, without discount), ``[responses, tokens]``."""
    following = nn.functional.pad(values[:, 1:], (0, 1))
    found, later = [], torch.zeros_like(values[:, 0])
    for token in reversed(range(values.shape[1])):
        later = rewards[:, token] + following[:, token] - values[:, token] + LAMBDA * later
        found.append(later)
    return torch.stack(found[::-1], 1)


def main() -> None:
    """Generates, scores, updates actor and critic."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--report", default=None, help="folder for the critic's run report")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = {"train_micro_batch_size_per_gpu": RESPONSES}
    trained = {**rows, "optimizer": {"type": "AdamW", "params": {"lr": 5e-3}}, "gradient_clipping": 1.0}
    actor_config = {**trained, "zero_optimization": {"stage": 3}, "hybrid_engine": {"enabled": True}}
    critic_config = {**trained, "zero_optimization": {"stage": 2}, "run_report": {"path": arguments.report}}
    frozen_judge, policy = Judge().requires_grad_(False), LlamaForCausalLM(SHAPE)
    policy.load_state_dict(frozen_judge.reference.state_dict())
    judge, *_ = deepspeed.initialize(model=frozen_judge, config=rows)
    actor, *_ = deepspeed.initialize(model=policy, config=actor_config)
    critic, *_ = deepspeed.initialize(model=Critic(), config=critic_config)
    rollout = build_rollout(RolloutConfig(), actor, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    torch.manual_seed(1 + actor.global_rank)
    seen = []
    for _ in range(arguments.steps):
        prompts = torch.randint(1, SHAPE.vocab_size, (RESPONSES, 4), device=actor.device)
        with critic.sleep():
            found = rollout.generate(RolloutRequest(prompts, torch.ones_like(prompts)), SamplingConfig(TOKENS))
        batch = ResponseTokenBatch.from_rollout(found)
        with torch.no_grad():
            before = log_probabilities(actor, batch)
            reference, scores = judge(batch)
            rewards = scores / TOKENS - KL_WEIGHT * (before - reference)
            values = critic(batch)
        advantages = advantages_of(rewards, values)
        goals, normed = values + advantages, (advantages - advantages.mean()) / (advantages.std() + 1e-4)
        for _ in range(2):  # updates on the same responses
            ratio = (log_probabilities(actor, batch) - before).exp()
            actor.backward(-torch.minimum(ratio * normed, ratio.clamp(1 - CLIP, 1 + CLIP) * normed).mean())
            actor.step()
            critic.backward((critic(batch) - goals).square().mean())
            critic.step()
        deepspeed.comm.all_reduce(scores)
        seen.append(float(scores.mean()) / deepspeed.comm.get_world_size())
    for engine in (actor, critic, judge):
        engine.destroy()
    if actor.global_rank == 0:
        print(f"reward {seen[0]:.4f} -> {seen[-1]:.4f}")


if __name__ == "__main__":
    main()
