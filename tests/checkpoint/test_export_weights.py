"""engine.export_weights: full tensors by name out of any cut, and what a copy computes from them."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from tests.ecosystem.support import needs_transformers
from tests.engine.support import engine_of
from tests.harness import run_ranks
from tests.harness.toy_models import causal_model

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "num_local_experts": 4,
}  # fmt: skip
AXES = [
    {"zero_optimization": {"stage": 0}},
    {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
    {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
    {"zero_optimization": {"stage": 3}, "expert_parallel": {"enabled": True, "autoep_size": 2}},
]


def _export():
    for more in AXES:
        torch.manual_seed(0)
        model = causal_model("Mixtral", seed=1, **SIZES, tie_word_embeddings=more is AXES[0])
        served = copy.deepcopy(model)
        config = {
            "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, **more,
        }  # fmt: skip
        engine = deepspeed.initialize(model=model, config=config)[0]
        tokens = torch.arange(18).view(2, 9)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        engine.eval()
        with torch.no_grad():
            trained = engine(input_ids=tokens).logits.float().log_softmax(-1)
        known = {name: value.shape for name, value in served.state_dict().items()}
        names = []
        for name, value in engine.export_weights(dtype=torch.float32):
            assert value.shape == known[name] and value.dtype == torch.float32
            served.load_state_dict({name: value}, strict=False)
            names.append(name)
        if dist.get_rank() == 0:
            tied = {"lm_head.weight"} if more is AXES[0] else set()
            assert len(names) == len(set(names)) and set(names) == known.keys() - tied
            with torch.no_grad():
                found = served.eval()(input_ids=tokens).logits.log_softmax(-1)
            tolerance = 0.05 if "bf16" in more else 1e-5
            torch.testing.assert_close(found, trained, rtol=tolerance, atol=tolerance)
        else:
            assert not names
        engine.destroy()


def _kept():
    """All tensors are kept, and then written into."""
    for stage in (0, 3):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        known = {name: value.clone() for name, value in model.state_dict().items()}
        engine = engine_of(model, stage, zero={"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 40})
        kept = dict(engine.export_weights())
        for name, value in kept.items():
            assert torch.equal(value, known[name]), name
            value.zero_()
        for name, value in engine.export_weights():
            assert torch.equal(value, known[name]), name
        assert len(kept) == (0 if dist.get_rank() else len(known))
        engine.destroy()


def test_exported_tensors_are_copies():
    run_ranks(_kept, 2)


@needs_transformers
def test_full_weights_come_out_of_every_cut():
    run_ranks(_export, 2)
