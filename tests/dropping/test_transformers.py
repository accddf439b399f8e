"""Dropped layers in models of Transformers: at stage 3, with activation checkpointing, and gone in evaluation."""

from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.dropping.layers import droppable_blocks
from tests.engine.support import engine_of
from tests.harness import run_ranks
from tests.harness.toy_models import NO_DROPOUT, causal_model, masked_model

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 32}


def _model(family: str) -> tuple[Any, str]:
    if family == "llama":
        return causal_model(**SIZES), "model.layers"
    if family == "bert":
        return masked_model(**SIZES), "bert.encoder.layer"
    return causal_model("GPT2", n_embd=16, n_layer=4, n_head=2, vocab_size=32, **NO_DROPOUT), "transformer.h"


def _losses(family: str, checkpointed: bool) -> tuple[list[float], list[int], list[float]]:
    model, blocks = _model(family)
    deepspeed.progressive_layer_drop(model, blocks)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"enabled": True, "theta": 0.2, "gamma": 5.0}
    engine = engine_of(model, 3, progressive_layer_drop=section)
    losses, dropped, gathered = [], [], []
    for step in range(10):
        tokens = torch.randint(32, (2, 8), generator=torch.Generator().manual_seed(step))
        with counted() as traffic:
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
        gathered.append(traffic.requested["all_gather"].nbytes)
        engine.step()
        losses.append(loss.item())
        dropped.append(len(droppable_blocks(model)[0][0].dropped))
    engine.eval()
    with torch.no_grad():
        losses.append(engine(input_ids=tokens, labels=tokens).loss.item())
    engine.destroy()
    return losses, dropped, gathered


def _both(family: str) -> list[Any]:
    return [_losses(family, False), _losses(family, True)]


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
def test_layers_of_transformers(family):
    (plain, dropped, gathered), (recomputed, also_dropped, _) = run_ranks(_both, 2, family)[0]
    assert recomputed == pytest.approx(plain, rel=1e-5) and dropped == also_dropped
    assert sum(dropped) >= 3
    by_number = dict(zip(dropped, gathered, strict=True))
    numbers = sorted(by_number)
    assert [by_number[number] for number in numbers] == sorted(by_number.values(), reverse=True)
