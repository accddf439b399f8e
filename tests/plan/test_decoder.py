"""Decoders by their sizes take the keys of published runs: cut logits, cut norms, attention computed again."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from deepspeed.plan import DecoderShape
from deepspeed.plan.decoder import Decoder, layers_of, token_loss
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from tests.harness import on_ranks
from tests.harness.pool import run_ranks

SHAPE = DecoderShape(layers=2, hidden=24, heads=4, vocab=41, intermediate=40, is_gated=False, has_fused_attention=False)
CUT = {"autotp_size": 2, "vocab_parallel_lm_head": True, "sequence_parallel_norms": True}
RECOMPUTED = {"activation_checkpointing": {"recompute_modules": ["core_attn"]}}
COUNT = 2


def _config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }


def _batches(step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    return [torch.randint(SHAPE.vocab, (2, 8), generator=made) for _ in range(COUNT)]


def _fill(model: torch.nn.Module) -> None:
    """Gives every parameter values that depend on its name alone, without the number of its layer."""
    for name, parameter in model.named_parameters():
        seed = sum(map(ord, name.rpartition(".")[0].split(".")[-1]))
        made = torch.Generator().manual_seed(seed)
        torch.nn.init.normal_(parameter, std=0.3, generator=made)


def _plain() -> list[float]:
    model = Decoder(SHAPE)
    _fill(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        found = 0.0
        for ids in _batches(step):
            loss = model(ids, ids)
            (loss / COUNT).backward()
            found += loss.item() / COUNT
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found)
    return losses


@cache
def _expected() -> list[float]:
    return run_ranks(_plain, 1)[0]


def _cut() -> list[float]:
    model = Decoder(SHAPE)
    _fill(model)
    engine, *_ = deepspeed.initialize(model=model, config=_config(tensor_parallel=CUT, **RECOMPUTED))
    assert engine.module.head.weight.shape[0] < SHAPE.vocab
    losses = []
    for step in range(3):
        found = 0.0
        for ids in _batches(step):
            loss = engine(ids, ids)
            engine.backward(loss)
            engine.step()
            found += loss.item() / COUNT
        losses.append(found)
    return losses


def _cut_in_stages() -> list[float]:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    module = PipelineModule(layers_of(SHAPE), topology=topology, loss_fn=token_loss)
    _fill(module)
    engine, *_ = deepspeed.initialize(model=module, config=_config(tensor_parallel=CUT, **RECOMPUTED))
    return [engine.train_batch((ids, ids) for ids in _batches(step)).item() for step in range(3)]


@pytest.mark.parametrize(("train", "ranks"), [(_cut, 2), (_cut_in_stages, 4)])
def test_trained_as_one_process(train, ranks):
    for losses in run_ranks(train, ranks):
        assert losses == pytest.approx(_expected(), rel=2e-6)


@on_ranks(2)
def test_stages_without_attention_are_refused() -> None:
    module = PipelineModule([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)], num_stages=2, loss_fn=token_loss)
    with pytest.raises(DeepSpeedConfigError, match="or modules with a method recompute_core_attention"):
        deepspeed.initialize(model=module, config=_config(**RECOMPUTED))


def test_each_key_takes_memory_off():
    shape = replace(SHAPE, layers=4, hidden=256, heads=8, intermediate=1024, vocab=8192, dropout=0.1)

    def peak(tensor_parallel: dict[str, Any], more: dict[str, Any]) -> int:
        config = _config(tensor_parallel=tensor_parallel, bf16={"enabled": True}, **more)
        options: dict[str, Any] = {"compare_checkpointing": False, "suggest": False, "pipe": 2, "tensor": 2}
        return deepspeed.plan(
            shape, config, devices_per_node=4, device="a100", sequence_length=512, **options
        ).device_bytes

    whole = peak({"autotp_size": 2}, {})
    recomputed = peak({"autotp_size": 2}, RECOMPUTED)
    cut = peak(CUT, RECOMPUTED)
    scores = 2 * 2 * 4 * 512 * 512 * 2  # of two blocks, two samples and four heads, in bf16: probabilities, once
    assert whole - recomputed > scores
    assert recomputed - cut > 2 * 512 * 8192 / 2 * 2  # half of the logits in bf16, at least
