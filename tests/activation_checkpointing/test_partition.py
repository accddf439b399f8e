"""Partitioned activations: each of two model-parallel ranks keeps half of what a block saves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.activation_checkpointing import settings as settings_module
from deepspeed.activation_checkpointing.partition import ActivationShard, Partition
from tests.engine.support import SHARDED, adamw
from tests.harness import run_ranks

checkpointing = deepspeed.checkpointing
WIDTH = 9


class Mpu:
    """Neighbouring pairs of ranks hold the same layers; ranks of equal place in their pair share data."""

    def __init__(self) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        model = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        data = [dist.new_group(list(range(place, size, 2))) for place in (0, 1)]
        self._model, self._data = model[rank // 2], data[rank % 2]

    def get_model_parallel_group(self):
        return self._model

    def get_model_parallel_world_size(self):
        return dist.get_world_size(self._model)

    def get_model_parallel_rank(self):
        return dist.get_rank(self._model)

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_world_size(self):
        return dist.get_world_size(self._data)

    def get_data_parallel_rank(self):
        return dist.get_rank(self._data)


class Net(nn.Module):
    """Blocks with dropout under a checkpoint, called with tensors, a mask of integers and a nested gradient."""

    def __init__(self, function=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.function = function

    def block(self, index, x, mask, scale=None):
        x = x + torch.dropout(torch.tanh(self.layers[index](x)), 0.3, train=True) * mask
        return x if scale is None else x * scale["s"]

    def forward(self, x):
        mask = torch.ones(WIDTH, dtype=torch.int64)
        scale = {"s": 1 + 0.1 * x.mean()}
        for index in range(len(self.layers)):
            more = (scale,) if index == 2 else ()
            if self.function is None:
                x = self.block(index, x, mask, *more)
            else:
                x = getattr(checkpointing, self.function)(self.block, index, x, mask, *more)
        return x.square().mean()


def _batch(step, group):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + group)).requires_grad_()


def _trained(mpu, stage, function, settings):
    checkpointing.configure(mpu, **settings)
    torch.manual_seed(3)
    model = Net(function)
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
    }
    engine = deepspeed.initialize(model=model, optimizer=adamw(model), config=config, mpu=mpu)[0]
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = engine(_batch(step, dist.get_rank() // 2))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {name: value.clone() for name, value in engine.iter_full("fp32")}
    engine.destroy()
    return losses, found


def _same_numbers(stages):
    mpu = Mpu()
    for stage in stages:
        losses, plain = _trained(mpu, stage, None, {})
        for function in ("checkpoint", "non_reentrant_checkpoint"):
            for in_cpu in (False, True):
                settings = {"partition_activations": True, "checkpoint_in_cpu": in_cpu}
                mine, found = _trained(mpu, stage, function, settings)
                assert mine == losses
                for name, value in plain.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    settings_module.settings = settings_module.Settings()


def test_two_model_parallel_ranks():
    run_ranks(_same_numbers, 2, [0])


@pytest.mark.slow
def test_two_by_two_ranks_at_every_stage():
    run_ranks(_same_numbers, 4, [0, 2, 3])


def _kept():
    """What is alive between forward and backward: the parts, and no whole input but the first."""
    mpu = Mpu()
    checkpointing.configure(mpu, partition_activations=True)
    rows, inputs = 64, []

    def block(x):
        inputs.append(weakref.ref(x))
        return torch.tanh(x) * 2

    for shape in ((rows, 8), (5, 5, 5), (1,)):
        inputs.clear()
        x = first = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(4):
            x = checkpointing.checkpoint(block, x)
        loss = x.sum()
        del x
        gc.collect()
        alive = [ref() is not None for ref in inputs]
        assert alive[1:] == ([False] * 3 if first.numel() > 1 else alive[1:])
        loss.backward()
        found, first.grad = first.grad, None
        y = first
        for _ in range(4):
            y = torch.tanh(y) * 2
        y.sum().backward()
        torch.testing.assert_close(found, first.grad, rtol=0, atol=0)
    hooks = Partition(mpu.get_model_parallel_group(), on_host=True)
    whole = torch.arange(7.0)
    part = hooks.pack(whole)
    assert isinstance(part, ActivationShard) and part.values.numel() == 4
    assert part.values.tolist() == [[0, 1, 2, 3], [4, 5, 6, 0]][dist.get_rank()]
    assert torch.equal(hooks.unpack(part), whole)
    parameter, numbers = nn.Parameter(torch.ones(8)), torch.arange(8)
    assert hooks.pack(parameter) is parameter and hooks.pack(numbers) is numbers
    settings_module.settings = settings_module.Settings()


def test_only_parts_are_kept():
    run_ranks(_kept, 2)
