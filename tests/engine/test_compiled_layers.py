"""Layers that the program has compiled (``nn.Module.compile``) on ranks that share sequences, layers or experts."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.parallel.sequence.llama import llama

pytestmark = needs_transformers

EXPERTS = {"kind": "Mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
AXES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"sequence_parallel_size": 2}),
    ({}, {"sequence_parallel_size": 2, "sequence_parallel": {"mode": "ring"}}),
    ({}, {"tensor_parallel": {"autotp_size": 2}}),
    (EXPERTS, {"expert_parallel": {"enabled": True, "autoep_size": 2}}),
]


@pytest.mark.parametrize("axes", [AXES[::3], pytest.param(AXES[1:3], marks=pytest.mark.slow)])
@on_ranks(2, timeout=180)
def test_compiled_layers_on_every_axis(axes: list[Any]) -> None:
    tokens = torch.randint(1, 23, (2, 16), generator=torch.Generator().manual_seed(0))
    for kind, axis in axes:
        model, plain = llama(**kind), llama(**kind)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager")
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": 1},
            **axis,
        }
        engine = deepspeed.initialize(model=model, config=config)[0]
        start, stop = (8 * dist.get_rank(), 8 * dist.get_rank() + 8) if "sequence_parallel_size" in axis else (0, 16)
        positions = torch.arange(start, stop).expand(2, -1).contiguous()
        found = engine(tokens[:, start:stop].contiguous(), position_ids=positions, use_cache=False).logits
        expected = plain(tokens, use_cache=False).logits
        torch.testing.assert_close(found, expected[:, start:stop])
        engine.backward(found.square().mean())
        engine.step()
        expected.square().mean().backward()
        norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm().item()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5), axis
        engine.destroy()
        deepspeed.utils.groups.set_mesh(None)
