"""What weights of 8 and 4 bits cost a model that has learnt something, in perplexity, and what they save, in bytes."""

import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import deepspeed
from tests.harness.toy_models import causal_model

transformers = pytest.importorskip("transformers")

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}
LENGTH, STEPS = 64, 250
WAYS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}},
}


def text(names):
    """Bytes of modules of the standard library, as tokens."""
    folder = Path(sysconfig.get_path("stdlib"))
    data = b"".join((folder / f"{name}.py").read_bytes() for name in names)
    return torch.tensor(list(data)).clamp_(max=127)


def make():
    return causal_model(**SIZES)


@pytest.fixture(scope="module")
def trained():
    """The state of a small model after a short training on source code."""
    model, data = make(), text(["argparse", "ast", "pathlib", "subprocess", "typing", "tarfile"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, STEPS)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (12,), generator=generator)
        ids = torch.stack([data[start : start + LENGTH] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.state_dict()


def engine_of(state, way):
    model = make()
    model.load_state_dict(state)
    return deepspeed.init_inference(model, WAYS[way])


@torch.no_grad()
def perplexity(engine):
    unseen = text(["dataclasses", "textwrap"])[: 64 * LENGTH].view(-1, LENGTH)
    logits = engine(input_ids=unseen).logits.float()
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 128), unseen[:, 1:].reshape(-1))
    return loss.exp().item()


@pytest.mark.slow
def test_perplexity_of_a_trained_model(trained):
    found = {way: perplexity(engine_of(trained, way)) for way in WAYS}
    assert found["fp32"] < 15, "it has learnt something; 128 by chance"
    assert abs(found["int8"] / found["fp32"] - 1) <= 0.01, found
    assert abs(found["int4"] / found["fp32"] - 1) <= 0.05, found


def test_files_and_memory(tmp_path):
    state, sizes = make().state_dict(), {}
    for way in WAYS:
        engine = engine_of(state, way)
        saved = {name: tensor.contiguous() for name, tensor in engine.module.state_dict().items()}
        save_file(saved, tmp_path / f"{way}.safetensors")
        memory = sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers()))
        sizes[way] = memory, (tmp_path / f"{way}.safetensors").stat().st_size
    for number, what in enumerate(("memory", "file")):
        eight = sizes["int8"][number]
        assert eight <= 0.28 * sizes["fp32"][number], what
        assert eight <= 0.55 * sizes["bf16"][number], what
        assert sizes["int4"][number] <= 0.18 * sizes["fp32"][number], what
