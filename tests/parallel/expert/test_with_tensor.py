"""Experts spread over the ranks that see other samples, everything else cut over the others: two by two."""

from typing import Any

import torch
from torch.distributed import get_rank

import deepspeed
from tests.engine.support import SHARDED
from tests.harness import on_ranks
from tests.harness.training import train_like
from tests.parallel.expert.test_auto import adamw, build, loss_of, plain


@on_ranks(4, timeout=200)
def test_two_by_two() -> None:
    stages = (1, 3)
    expected = plain("mixtral", 2)
    for stage in stages:
        model = build("mixtral")
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.5,
            "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
            "tensor_parallel": {"autotp_size": 2},
        }
        engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=settings)[0]
        assert engine.module.model.layers[0].mlp.experts.down_proj.ds_tile_part.global_shape[0] == 4
        train_like(engine, expected, loss_of, get_rank() // 2, rel=3e-5, norm_rel=1e-3, what=stage)
        state = engine._consolidated_16bit_state_dict()
        if get_rank() == 0:
            assert state is not None
            for name, parameter in expected.state.items():
                assert torch.allclose(state[name], parameter, rtol=1e-3, atol=1e-4), name
        engine.destroy()
