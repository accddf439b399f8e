"""``fused_loss``: causal Transformers models train as with whole logits, which no longer exist."""

from __future__ import annotations

import pytest
import torch

import deepspeed
from deepspeed.comm.base.counters import traffic
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import run_ranks
from tests.harness.toy_models import causal_model

VOCABULARY = 131
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "Llama": {"tie_word_embeddings": True},
    "Gemma2": {"head_dim": 8, "final_logit_softcapping": 2.0},
    "Granite": {"logits_scaling": 3.0},
    "Cohere": {"logit_scale": 0.3, "eos_token_id": 1, "bos_token_id": 1},
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
}


def _train(model, *, stage=0, accumulation=1, **config):
    """Returns losses, the engine, and the last training output."""
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **config,
    }
    engine = deepspeed.initialize(model=model, config=settings)[0]
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + engine.get_data_parallel_rank())
        ids = torch.randint(1, VOCABULARY, (2, 12), generator=generator)
        labels = ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.3, -100)
        given = {"labels": labels}
        if step == 1:
            shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()
            given.update(shift_labels=shifted, num_items_in_batch=17)
        output = engine(input_ids=ids, **given)
        losses.append(output.loss.item())
        engine.backward(output.loss)
        engine.step()
    return losses, engine, output


def _families(stage):
    for kind, more in FAMILIES.items():
        plain, engine, _ = _train(causal_model(kind, **{**SIZES, **more}), stage=stage, accumulation=2)
        engine.destroy()
        fused, engine, output = _train(
            causal_model(kind, **{**SIZES, **more}), stage=stage, accumulation=2, fused_loss=True
        )
        assert fused == pytest.approx(plain, rel=2e-6), kind
        assert output.get("logits") is None
        ids = torch.arange(1, 7)[None]
        assert engine(input_ids=ids).logits.shape == (1, 6, VOCABULARY)  # without labels
        engine.eval()
        assert engine(input_ids=ids, labels=ids).logits is not None
        engine.destroy()


@pytest.mark.parametrize("stage", [0, 3])
def test_families(stage):
    run_ranks(_families, 2, stage)


def _gathered_bytes():
    """A step with whole logits gathers each weight at most twice; one without gathers no more."""
    gathered = []
    for fused in (False, True):
        _, engine, _ = _train(causal_model("Llama", **SIZES), stage=3, fused_loss=fused)
        traffic.reset()
        ids = torch.arange(1, 13).view(2, 6)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        gathered.append(traffic.requested["all_gather"].nbytes)
        engine.destroy()
    assert 0 < gathered[1] <= gathered[0]


def test_the_head_is_not_gathered_again():
    run_ranks(_gathered_bytes, 2)


def _over_tensor_ranks():
    for more, config in (
        ({"tie_word_embeddings": True}, {}),
        ({}, {"vocab_parallel_lm_head": True}),
        ({}, {"vocab_parallel_lm_head": True, "vocab_parallel_ce_backend": "liger"}),
    ):
        section = {"tensor_parallel": {"autotp_size": 2, **config}}
        plain, engine, _ = _train(causal_model("Llama", **{**SIZES, **more}), tensor_parallel={"autotp_size": 2})
        engine.destroy()
        is_set_by_backend = "vocab_parallel_ce_backend" in config
        fused, engine, output = _train(
            causal_model("Llama", **{**SIZES, **more}), fused_loss=not is_set_by_backend, **section
        )
        assert fused == pytest.approx(plain, rel=5e-6)
        assert output.get("logits") is None
        engine.destroy()


def test_over_tensor_ranks():
    run_ranks(_over_tensor_ranks, 2)


def _refusals():
    with pytest.raises(DeepSpeedConfigError, match="whose head is a torch.nn.Linear, found Linear"):
        deepspeed.initialize(
            model=torch.nn.Linear(2, 2), config={"train_micro_batch_size_per_gpu": 1, "fused_loss": True}
        )
    with pytest.raises(DeepSpeedConfigError, match="Leave tiled_loss out"):
        deepspeed.initialize(
            model=causal_model("Llama", **SIZES),
            config={
                "train_micro_batch_size_per_gpu": 1,
                "fused_loss": True,
                "sequence_parallel": {"tiled_loss": True},
            },
        )


def _changed_logits():
    model = causal_model("Granite", **SIZES, logits_scaling=3.0)
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "fused_loss": True,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        },
    )[0]
    model.config.logits_scale = 2.0  # a field that other families multiply by, and this one does not know
    ids = torch.arange(1, 7)[None]
    with pytest.raises(DeepSpeedConfigError, match="1 becomes 0.33"):
        engine(input_ids=ids, labels=ids)
    engine.destroy()


@pytest.mark.parametrize("body", [_refusals, _changed_logits])
def test_refusals(body):
    run_ranks(body, 1)
