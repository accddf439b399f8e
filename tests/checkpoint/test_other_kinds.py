"""Loading a checkpoint of one kind of model into another kind that has the same weights, and training on."""

from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import CheckpointError
from deepspeed.parallel.pipe.transformers_models import next_token_loss
from deepspeed.pipe import PipelineModule
from tests.harness import run_ranks
from tests.harness.toy_models import NO_DROPOUT, causal_model

pytest.importorskip("transformers")

COUNT = 2


def causal(kind: str, seed: int) -> Any:
    shared = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    if kind == "gpt2":  # the head is tied to the embedding
        sizes = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 32}
        return causal_model("GPT2", seed=seed, **shared, **sizes, **NO_DROPOUT)
    return causal_model(
        seed=seed, **shared, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip


def start(kind: str, stages: int, seed: int) -> Any:
    """The model itself for 0 stages, else a pipeline of it."""
    model = causal(kind, seed)
    module = PipelineModule.from_transformers(model, num_stages=stages) if stages else model
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": COUNT,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1 if stages else 2},
    }
    return deepspeed.initialize(model=module, config=config)[0]


def train(engine: Any, stages: int, steps: range) -> list[float]:
    losses = []
    for step in steps:
        made = torch.Generator().manual_seed(step)
        batches = [torch.randint(37, (2, 6), generator=made) for _ in range(COUNT)]
        if stages:
            losses.append(engine.train_batch(iter([(tokens, tokens) for tokens in batches])).item())
            continue
        each = []
        for tokens in batches:
            loss = next_token_loss(engine(input_ids=tokens).logits, tokens)
            engine.backward(loss)
            engine.step()
            each.append(loss.item())
        losses.append(sum(each) / COUNT)
    return losses


def save(folder: str, kind: str, stages: int) -> list[float]:
    engine = start(kind, stages, seed=1)
    train(engine, stages, range(2))
    engine.save_checkpoint(folder, tag="here")
    return train(engine, stages, range(2, 4))


def resume(folder: str, kind: str, stages: int) -> list[float]:
    engine = start(kind, stages, seed=2)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    return train(engine, stages, range(2, 4))


@pytest.mark.parametrize(
    ("kind", "saved", "loaded"), [("gpt2", 2, 0), ("gpt2", 0, 2), ("llama", 0, 1), ("llama", 1, 0)]
)
def test_a_pipeline_and_its_transformers_model_continue_each_other(kind, saved, loaded, tmp_path):
    expected = run_ranks(save, max(saved, 1), str(tmp_path), kind, saved)[0]
    found = run_ranks(resume, max(loaded, 1), str(tmp_path), kind, loaded)[0]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def of_no_kin(folder: str) -> str:
    engine = deepspeed.initialize(model=nn.Sequential(nn.Linear(3, 3)), config={"train_batch_size": 1})[0]
    with pytest.raises(CheckpointError) as error:
        engine.load_checkpoint(folder, tag="here")
    return str(error.value)


def test_other_kinds_raise_with_their_name_and_how_to_convert_them(tmp_path):
    run_ranks(save, 1, str(tmp_path), "llama", 0)
    text = run_ranks(of_no_kin, 1, str(tmp_path))[0]
    assert (
        len(text.splitlines()) == 1
        and "expected the weights of a pipeline or a sequence of layers ('0.weight', " in text
    )
    assert "found those of one module ('model." in text
    assert f"python {tmp_path}/zero_to_fp32.py {tmp_path} OUTPUT -t here`" in text


def inferred(folder: str, kind: str, on_meta: bool) -> torch.Tensor:
    with torch.device("meta" if on_meta else "cpu"):
        model = causal(kind, seed=2)
    engine = deepspeed.init_inference(model, dtype=torch.float32, checkpoint=folder)
    return engine(input_ids=torch.arange(12).view(2, 6)).logits


def logits(folder: str, kind: str, stages: int) -> torch.Tensor:
    """Saves, and returns the outputs of the model that continues."""
    save(folder, kind, stages)
    engine = start(kind, 0, seed=2)
    engine.load_checkpoint(folder)
    return engine.eval()(input_ids=torch.arange(12).view(2, 6)).logits


@pytest.mark.parametrize(
    ("kind", "stages", "on_meta", "below"), [("gpt2", 0, False, ""), ("llama", 0, True, "here"), ("gpt2", 1, True, "")]
)
def test_inference_reads_a_checkpoint_of_training(kind, stages, on_meta, below, tmp_path):
    expected = run_ranks(logits, 1, str(tmp_path), kind, stages)[0]
    found = run_ranks(inferred, 1, str(tmp_path / below), kind, on_meta)[0]
    torch.testing.assert_close(found, expected)
