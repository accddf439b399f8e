"""Distills a teacher into a smaller student on the student's own responses, over the teacher's most likely tokens.

    torchrun --nproc-per-node 2 examples/rl/distillation.py
    torchrun --nproc-per-node 2 examples/rl/distillation.py --top-k 0 --beta 1 --report run

The reward is minus the divergence from the teacher. The teacher sleeps while the student generates, and the student's
optimizer states too; with ``--report`` the page in that folder shows these phases of memory.
"""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.rollout import RolloutConfig, RolloutRequest, SamplingConfig, build_rollout
from deepspeed.runtime.rollout.opsd import ResponseTokenBatch, generalized_jsd_loss

RESPONSES, TOKENS = 16, 8


def shape(width: int) -> LlamaConfig:
    """Returns the configuration of a Llama of two layers."""
    return LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2, num_attention_heads=2
    )


def main() -> None:
    """Generates by the student, compares with the teacher, updates."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage of the student")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--top-k", type=int, default=8, help="the teacher's most likely tokens to compare; 0: all")
    parser.add_argument("--beta", type=float, default=0.5, help="0: KL(teacher, student), 1: KL(student, teacher)")
    parser.add_argument("--report", default=None, help="folder for the run report")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": RESPONSES,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": arguments.stage, "stage3_param_persistence_threshold": 0},
        "hybrid_engine": {"enabled": True},
        "run_report": {"path": arguments.report},
    }
    model = LlamaForCausalLM(shape(64)).requires_grad_(False)
    model.lm_head.weight.mul_(20)  # a teacher that is sure
    teacher, *_ = deepspeed.initialize(model=model, config={"train_micro_batch_size_per_gpu": RESPONSES})
    student, *_ = deepspeed.initialize(model=LlamaForCausalLM(shape(32)), config=config)
    rollout = build_rollout(RolloutConfig(), student, SimpleNamespace(eos_token_id=None, pad_token_id=0))
    torch.manual_seed(1 + student.global_rank)
    seen = []
    for step in range(arguments.steps):
        prompts = torch.randint(1, 32, (RESPONSES, 4), device=student.device)
        with teacher.sleep(), student.sleep(keep=("lp_params",)):
            found = rollout.generate(RolloutRequest(prompts, torch.ones_like(prompts)), SamplingConfig(TOKENS))
        batch = ResponseTokenBatch.from_rollout(found)
        with torch.no_grad():
            theirs = teacher(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        own = student(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        divergence = generalized_jsd_loss(
            batch.select_causal_logits(own),
            batch.select_causal_logits(theirs),
            batch.response_mask,
            beta=arguments.beta,
            teacher_top_k=arguments.top_k or None,
        )
        student.backward(divergence.loss_sum, count=divergence.valid_token_count)
        student.step()
        mean = divergence.loss.detach().clone()
        deepspeed.comm.all_reduce(mean)
        seen.append(-float(mean) / deepspeed.comm.get_world_size())
        if student.global_rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: reward {seen[-1]:.3f}", flush=True)
    for engine in (teacher, student):
        engine.destroy()
    if student.global_rank == 0:
        print(f"reward {seen[0]:.4f} -> {seen[-1]:.4f}")


if __name__ == "__main__":
    main()
