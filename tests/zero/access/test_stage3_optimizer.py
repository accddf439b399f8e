"""The methods of the optimizer of stage 3 that read and write states of single parameters."""

import torch

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero.access import states
from tests.harness import on_ranks
from tests.zero.access.support import batch, build, train


@on_ranks(2)
def test_methods_are_those_of_the_functions(rank):
    engine = build(3)
    optimizer, params = engine.optimizer, dict(engine.module.named_parameters())
    assert type(optimizer) is DeepSpeedZeroOptimizer_Stage3
    train(engine, rank, 1)
    weight, frozen = params["blocks.0.fall.weight"], params["frozen"]
    assert optimizer.get_full_hp_param(frozen) is None and optimizer.get_fp32_grad_for_param(weight) is None
    for key in (None, "exp_avg"):
        value = optimizer.get_full_hp_param(weight, key) + 0.5
        optimizer.set_full_hp_param(value, weight, key)
        assert torch.equal(optimizer.get_full_hp_param(weight, key), value)
        mine = optimizer.get_local_fp32_param(weight, key)
        optimizer.set_local_hp_param(mine * 2, weight, key)
        assert torch.equal(optimizer.get_full_hp_param(weight, key), value * 2)
    assert torch.equal(states.safe_get_full_fp32_param(weight), optimizer.get_full_hp_param(weight))
    engine.backward(engine(batch(rank, 1, torch.float32)))
    gradient = optimizer.get_fp32_grad_for_param(weight)
    optimizer.set_fp32_grad_for_param(gradient + 1, weight)
    optimizer.set_local_grad_for_param(optimizer.get_local_fp32_grad_for_param(weight) * 2, weight)
    assert torch.equal(states.safe_get_full_grad(weight), (gradient + 1) * 2)
