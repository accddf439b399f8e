"""Autocast without values: what torch itself makes of the same operations, and what it documents for CUDA."""

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import deepspeed
from deepspeed.plan import DecoderShape
from deepspeed.plan.autocasting import SimulatedAutocast


def results(device):
    """Dtypes of results, with fp32 (and one fp64, one 16-bit) arguments."""
    x, w = torch.zeros(4, 8, device=device), torch.nn.Parameter(torch.zeros(8, 8, device=device))
    half, image = x.to(torch.bfloat16), torch.zeros(1, 3, 8, 8, device=device)
    kernel, target = torch.zeros(2, 3, 3, 3, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    heads = torch.zeros(1, 2, 4, 8, device=device)
    made = {
        "linear": functional.linear(x, w),
        "linear of 16 bits": functional.linear(half, w),
        "matmul": x @ w,
        "matmul, fp64": x.double() @ w.double(),
        "convolution": functional.conv2d(image, kernel),
        "attention": functional.scaled_dot_product_attention(heads, heads, heads),
        "layer norm": functional.layer_norm(half, (8,)),
        "softmax": half.softmax(-1),
        "power": half.pow(2),
        "sum": half.sum(),
        "mean": half.mean(),
        "add": half + x,
        "concatenation": torch.cat([half, x]),
        "stack": torch.stack([half, half]),
        "loss": functional.cross_entropy(half, target),
        "squares": functional.mse_loss(half, x),
        "recomputed": checkpoint(functional.linear, x, w, use_reentrant=False),
    }
    return {name: result.dtype for name, result in made.items()}


def test_casts_are_those_of_torch_on_the_cpu():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = results("cpu")
    casting = SimulatedAutocast("cpu")
    with casting.active():
        without = results("meta")
        with casting.region(torch.bfloat16):
            assert results("meta") == expected
    assert results("meta") == without != expected, "without autocast nothing is cast, and afterwards neither"


def test_casts_are_those_that_torch_documents_for_cuda():
    casting = SimulatedAutocast("cuda")
    with casting.active(), casting.region(torch.float16):
        made = results("meta")
    lower = {name for name, dtype in made.items() if dtype == torch.float16}
    full = {name for name, dtype in made.items() if dtype == torch.float32}
    assert {"linear", "linear of 16 bits", "matmul", "convolution", "attention", "recomputed"} <= lower
    assert {"layer norm", "softmax", "power", "sum", "add", "concatenation", "loss", "squares"} <= full
    assert made["matmul, fp64"] == torch.float64


def test_a_plan_under_autocast():
    shape = DecoderShape(layers=2, hidden=64, heads=4, vocab=128)

    def kept(**section):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3},
            **section,
        }
        made = deepspeed.plan(shape, config, devices_per_node=4, sequence_length=64, compare_checkpointing=False)
        return made.simulated.activations

    under_autocast = kept(torch_autocast={"enabled": True, "dtype": "bfloat16"})
    assert kept(bf16={"enabled": True}) < under_autocast < kept()
    assert kept(torch_autocast={"enabled": True}) == pytest.approx(under_autocast, rel=0.01), "fp16 by default"
