"""Compares features of the engine on a GPU with the same features on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.accelerator import get_accelerator
from tests.device.support import batch, engine_at
from tests.gpu.places import on_both, run_at
from tests.harness import run_ranks
from tests.harness.toy_models import TOWER_WIDTH as WIDTH

ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}


def _losses(engine: Any, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        loss = engine(batch(engine, step))
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def _save(folder: str, stage: int, tier: str) -> list[float]:
    engine = engine_at(stage, tier, Path(folder), precision="fp32")
    _losses(engine, 0, 2)
    engine.save_checkpoint(folder)
    return _losses(engine, 2, 4)


def _load(folder: str, stage: int) -> list[float]:
    engine = engine_at(stage, precision="fp32")
    engine.load_checkpoint(folder)
    return _losses(engine, 2, 4)


@pytest.mark.gpu
@pytest.mark.parametrize(("stage", "tier"), [(1, "device"), (3, "both on the host"), (3, "both in files")])
def test_a_checkpoint_of_the_gpu_continues_on_the_cpu(stage, tier, tmp_path):
    losses = run_at("gpu", _save, str(tmp_path), stage, tier)
    assert run_ranks(_load, 1, str(tmp_path), 3, env=ON_CPU)[0] == pytest.approx(losses, rel=1e-4)


def _overflow() -> tuple[list[float], int]:
    engine = engine_at(2, precision="fp32", fp16={"enabled": True, "initial_scale_power": 20, "hysteresis": 1})
    scales = []
    for step in range(8):
        _losses(engine, step, step + 1)
        scales.append(float(engine.optimizer.cur_scale))
    return scales, engine.skipped_steps


@on_both
def test_steps_that_overflow_are_skipped(place):
    scales, skipped = run_at(place, _overflow)
    assert skipped > 0
    assert scales[skipped - 1 :] == [2.0 ** (20 - skipped)] * (9 - skipped)


def _compiled(stage: int) -> tuple[list[float], list[float]]:
    torch.backends.cuda.matmul.allow_tf32 = False
    plain = _losses(engine_at(stage, precision="fp32"), 0, 4)
    engine = engine_at(stage, precision="fp32")
    engine.compile()
    return plain, _losses(engine, 0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_engine_has_the_losses_of_the_other(stage):
    plain, compiled = run_at("gpu", _compiled, stage)
    assert compiled == pytest.approx(plain, rel=1e-4)


class _Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.3), nn.GELU()) for _ in range(3))

    def forward(self, x: torch.Tensor, *, repeats: bool) -> torch.Tensor:
        for layer in self.layers:
            x = deepspeed.checkpointing.checkpoint(layer, x) if repeats else layer(x)
        return x.square().mean()


def _gradients(in_cpu: bool) -> list[list[torch.Tensor]]:
    """Gradients without and with recomputation, of the same random numbers."""
    found = []
    deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=in_cpu)
    device = get_accelerator().current_device_name()
    torch.manual_seed(0)
    model = _Dropped().to(device)
    x = torch.randn(6, 24).to(device)
    for repeats in (False, True):
        model.zero_grad()
        get_accelerator().manual_seed(5)
        model(x, repeats=repeats).backward()
        found.append([parameter.grad.cpu().clone() for parameter in model.parameters()])
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("in_cpu", [False, True])
def test_recomputation_repeats_the_random_numbers(in_cpu):
    plain, repeated = run_at("gpu", _gradients, in_cpu)
    for one, other in zip(plain, repeated, strict=True):
        torch.testing.assert_close(other, one)


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
}


def _served(ways: dict[str, dict[str, Any]]) -> dict[str, torch.Tensor]:
    from tests.harness.toy_models import causal_model

    tokens = torch.arange(32).view(2, 16)
    found = {}
    for name, config in ways.items():
        engine = deepspeed.init_inference(causal_model("Llama", **SIZES), config)
        device = next(engine.module.parameters()).device
        with torch.no_grad():
            found[name] = engine(tokens.to(device)).logits.float().cpu()
        generated = engine.generate(tokens.to(device), max_new_tokens=4, do_sample=False)
        assert generated.shape == (2, 20)
        assert device.type == get_accelerator().device_name()
    return found


WAYS: dict[str, dict[str, Any]] = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}},
    "graphs": {"dtype": "fp32", "enable_cuda_graph": True},
    "streamed": {"dtype": "fp32", "zero": {"stage": 3, "offload_param": {"device": "cpu"}}},
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", WAYS)
def test_inference(name):
    pytest.importorskip("transformers")
    ours = run_at("gpu", _served, {name: WAYS[name]})[name]
    config = {key: value for key, value in WAYS[name].items() if key != "enable_cuda_graph"}
    theirs = run_ranks(_served, 1, {name: config}, env=ON_CPU)[0][name]
    assert (ours - theirs).abs().max() <= (1e-4 if config["dtype"] == "fp32" else 0.05) * theirs.abs().max()


def _sparse(dtype: torch.dtype) -> list[torch.Tensor]:
    """Difference of sparse attention and its gradients from dense attention under the same mask, in fp32."""
    from deepspeed.ops.sparse_attention import FixedSparsityConfig, SparseSelfAttention
    from tests.ops.sparse_attention.definitions import masked_dense

    device = get_accelerator().current_device_name()
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(2, 4, 128, 32, generator=generator).to(device).requires_grad_() for _ in range(3)]
    config = FixedSparsityConfig(4, block=16)
    sparse = SparseSelfAttention(config, max_seq_length=128)(*(leaf.to(dtype) for leaf in leaves)).float()
    cpu = [leaf.detach().cpu().requires_grad_() for leaf in leaves]
    dense = masked_dense(*cpu, config.make_layout(128), 16)
    sparse.square().sum().backward()
    dense.square().sum().backward()
    pairs = [(sparse, dense), *((one.grad, two.grad) for one, two in zip(leaves, cpu, strict=True))]
    return [(one.detach().cpu() - two.detach()).norm() / two.detach().norm() for one, two in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_sparse_attention(dtype, tolerance):
    assert max(run_at("gpu", _sparse, dtype)) <= tolerance


class _Routed(nn.Module):
    """Four experts of a width that ``grouped_mm`` takes, and the same values wherever it is made."""

    def __init__(self) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(2)
        self.moe = MoE(WIDTH, nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)), num_experts=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance, _ = self.moe(x.to(next(self.parameters()).dtype))
        return out.float().square().mean() + 0.01 * balance


def _experts(precision: str) -> list[float]:
    torch.backends.cuda.matmul.allow_tf32 = False
    return _losses(engine_at(1, model=_Routed(), precision=precision), 0, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_experts(precision):
    theirs = run_ranks(_experts, 1, "fp32", env=ON_CPU)[0]
    assert run_at("gpu", _experts, precision) == pytest.approx(theirs, rel=0.05 if precision == "bf16" else 1e-4)
