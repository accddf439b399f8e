"""What ``initialize`` takes from a model-parallel unit: who shards, who sees other samples, who decides together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.mpu import standing
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, WIDTH, inputs, tower
from tests.harness import run_ranks
from tests.zero.reading import full_masters


class SequenceUnit:
    """``data`` x 2 ranks of which neighbours share a sequence."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        neighbours = [dist.new_group(list(ranks[first : first + 2])) for first in ranks[::2]]
        apart = [dist.new_group(list(ranks[first::2])) for first in range(2)]
        self.sequence, self.data = neighbours[dist.get_rank() // 2], apart[dist.get_rank() % 2]
        self.joint = dist.group.WORLD

    def get_data_parallel_group(self):
        return self.data

    def get_sequence_parallel_group(self):
        return self.sequence

    def get_sequence_parallel_world_size(self):
        return 2

    def get_sequence_data_parallel_group(self):
        return self.joint


def _sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def _sequence(stages):
    """Each rank's loss is its share of a sequence's: gradients are summed over it and averaged over the data ranks."""
    mpu, data = SequenceUnit(), dist.get_world_size() // 2
    expected = tower()
    for step in range(2):
        losses = [expected(inputs(step, rank)) for rank in range(2 * data)]
        grads = torch.autograd.grad(torch.stack(losses).sum() / data, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), grads, strict=True):
                parameter -= 0.1 * gradient
    for stage in stages:
        model = tower()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
        }
        engine = deepspeed.initialize(model=model, optimizer=_sgd(model.parameters()), config=config, mpu=mpu)[0]
        assert (engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size) == (data, 2 * data, 2)
        assert engine.train_batch_size() == 2 * data
        for step in range(2):
            engine.backward(engine(inputs(step, dist.get_rank())))
            engine.step()
        found = full_masters(engine)
        for name, value in expected.named_parameters():
            torch.testing.assert_close(found[name], value.detach())
    with deepspeed.zero.Init(mpu=mpu):
        assert nn.Linear(WIDTH, WIDTH).weight.ds_zero_partition_world_size == 2 * data


def test_zero_shards_over_data_and_sequence_ranks():
    run_ranks(_sequence, 2, (1, 3))


def _left_out():
    mpu = SequenceUnit()
    mpu.get_sequence_data_parallel_group = None
    with pytest.raises(DeepSpeedConfigError, match=r"get_sequence_data_parallel_group\(\) is missing"):
        standing(mpu)
    mpu = SequenceUnit()
    mpu.get_sequence_data_parallel_group = lambda: mpu.data
    with pytest.raises(DeepSpeedConfigError, match="the group of both has 1 ranks"):
        standing(mpu)
    mpu.get_sequence_data_parallel_group = lambda: dist.group.WORLD
    mpu.get_tensor_model_parallel_world_size = lambda: 3
    with pytest.raises(DeepSpeedConfigError, match="3 model-parallel ranks x 2 ranks .* the job has 2"):
        standing(mpu)


def test_a_unit_that_leaves_out_what_matters_is_told_so():
    run_ranks(_left_out, 2)
