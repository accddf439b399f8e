"""Trains a tiny Llama by DPO on pairs of responses. The reference is the policy before training, frozen.

    torchrun --nproc-per-node 2 examples/rl/dpo.py
    torchrun --nproc-per-node 2 examples/rl/dpo.py --stage 1 --report run

The chosen response of a pair counts upwards, the rejected one is random. The reward is the share of unseen pairs in
order: those whose chosen response is the likelier one. The log-probabilities of the reference are computed once; then
its states sleep on the host, as the page of ``--report`` shows.
"""

from __future__ import annotations

import argparse
import os

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed
from deepspeed.sequence.vocab_parallel_ops import vocab_parallel_logprobs

SHAPE = LlamaConfig(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
PROMPT, RESPONSE, PAIRS, BETA = 4, 6, 16, 0.5


def pairs_of(count: int) -> torch.Tensor:
    """Returns tokens ``[2 x count, length]``: the chosen responses with their prompts, then the rejected ones."""
    first = torch.randint(SHAPE.vocab_size, (count, 1))
    counting = (first + torch.arange(PROMPT + RESPONSE)) % SHAPE.vocab_size
    rejected = counting.clone()
    rejected[:, PROMPT:] = torch.randint(SHAPE.vocab_size, (count, RESPONSE))
    return torch.cat([counting, rejected])


def log_probability(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probability of each response, 1-D."""
    logits = model(input_ids=tokens).logits[:, PROMPT - 1 : -1]
    return vocab_parallel_logprobs(logits, tokens[:, PROMPT:]).sum(1)


def main() -> None:
    """Trains, and counts the unseen pairs in order before and after."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--report", default=None, help="folder for the run report of the reference")
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", "0")))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    zero = {"stage": arguments.stage, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 2 * PAIRS, "zero_optimization": zero, "gradient_clipping": 1.0}
    policy, frozen = LlamaForCausalLM(SHAPE), LlamaForCausalLM(SHAPE).requires_grad_(False)
    frozen.load_state_dict(policy.state_dict())
    reference, *_ = deepspeed.initialize(model=frozen, config={**config, "run_report": {"path": arguments.report}})
    engine, *_ = deepspeed.initialize(
        model=policy, config={**config, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}
    )
    torch.manual_seed(1 + engine.global_rank)
    batches = [pairs_of(PAIRS).to(engine.device) for _ in range(arguments.steps)]
    unseen = pairs_of(64).to(engine.device)
    with torch.no_grad():
        references = [log_probability(reference, batch) for batch in batches]
    reference.sleep()

    def share_in_order() -> float:
        engine.eval()
        with torch.no_grad():
            chosen, rejected = log_probability(engine, unseen).chunk(2)
        engine.train()
        share = (chosen > rejected).float().mean()
        deepspeed.comm.all_reduce(share)
        return float(share) / deepspeed.comm.get_world_size()

    first = share_in_order()
    for batch, before in zip(batches, references, strict=True):
        chosen, rejected = (log_probability(engine, batch) - before).chunk(2)
        engine.backward(-torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean())
        engine.step()
    last = share_in_order()
    for each in (engine, reference):
        each.destroy()
    if engine.global_rank == 0:
        print(f"reward {first:.4f} -> {last:.4f}")


if __name__ == "__main__":
    main()
