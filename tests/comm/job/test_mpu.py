"""What ``initialize`` takes from a model-parallel unit: who shards, who sees other samples, who decides together."""

import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed.comm.job.mpu import coordinates
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import SHARDED, WIDTH, inputs
from tests.harness import on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


class SequenceUnit:
    """``data`` x 2 ranks of which neighbors share a sequence."""

    def __init__(self) -> None:
        ranks = range(dist.get_world_size())
        neighbors = [dist.new_group(list(ranks[first : first + 2])) for first in ranks[::2]]
        apart = [dist.new_group(list(ranks[first::2])) for first in range(2)]
        self.sequence, self.data = neighbors[dist.get_rank() // 2], apart[dist.get_rank() % 2]
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


@on_ranks(2)
def test_zero_shards_over_data_and_sequence_ranks() -> None:
    """Each rank's loss is its share of a sequence's: gradients are summed over it and averaged over the data ranks."""
    stages = (1, 3)
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
            "sequence_parallel": {"loss": "own_share"},
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


@on_ranks(2)
def test_a_unit_that_leaves_out_what_matters_raises() -> None:
    mpu = SequenceUnit()
    mpu.get_sequence_data_parallel_group = None
    with pytest.raises(DeepSpeedConfigError, match=r"get_sequence_data_parallel_group\(\) is missing"):
        coordinates(mpu)
    mpu = SequenceUnit()
    mpu.get_sequence_data_parallel_group = lambda: mpu.data
    with pytest.raises(DeepSpeedConfigError, match="the group of both has 1 ranks"):
        coordinates(mpu)
    mpu.get_sequence_data_parallel_group = lambda: dist.group.WORLD
    mpu.get_tensor_model_parallel_world_size = lambda: 3
    with pytest.raises(DeepSpeedConfigError, match="3 model-parallel ranks x 2 ranks .* the job has 2"):
        coordinates(mpu)


# -- tensor parallelism of the program's own -------------------------------------------------------------------------


class TensorUnit:
    """2 data x 2 tensor ranks; neighbors share layers."""

    def __init__(self) -> None:
        self.tensor = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
        self.data = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist.get_rank() % 2]

    def get_data_parallel_group(self):
        return self.data

    def get_model_parallel_group(self):
        return self.tensor

    def get_model_parallel_world_size(self):
        return 2

    def get_model_parallel_rank(self):
        return dist.get_rank(self.tensor)


class _Enter(torch.autograd.Function):
    """The same input for all parts of a layer, whose gradients are summed."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """The sum of what the parts of a layer give."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Block(nn.Module):
    """A layer that every tensor rank has whole, and two that are cut in the middle where there is an mpu."""

    def __init__(self, mpu=None) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.whole = nn.Linear(WIDTH, WIDTH)
        self.rise, self.fall = nn.Linear(WIDTH, 20), nn.Linear(20, WIDTH, bias=False)
        self.group = None if mpu is None else mpu.get_model_parallel_group()
        if mpu is not None:
            mine = slice(10 * mpu.get_model_parallel_rank(), 10 * mpu.get_model_parallel_rank() + 10)
            self.rise.weight = nn.Parameter(self.rise.weight.detach()[mine].clone())
            self.rise.bias = nn.Parameter(self.rise.bias.detach()[mine].clone())
            self.fall.weight = nn.Parameter(self.fall.weight.detach()[:, mine].clone())
            for parameter in (*self.rise.parameters(), *self.fall.parameters()):
                parameter.tensor_model_parallel = True

    def forward(self, x, boost=0.0):
        x = torch.tanh(self.whole(x.to(self.whole.bias.dtype)))
        inner = x if self.group is None else _Enter.apply(x, self.group)
        inner = self.fall(torch.tanh(self.rise(inner)))
        x = x + (inner if self.group is None else _Leave.apply(inner, self.group))
        return x.float().square().mean() + boost * self.rise.weight.float().sum()


def _adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-5, weight_decay=0.1)


def _tensor_config(stage, clip, **sections):
    zero = {"stage": stage, **(SHARDED if stage == 3 else {})}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": clip, "zero_optimization": zero, **sections}


@on_ranks(4)
def test_all_tensor_ranks_clip_by_the_norm_of_the_whole_model() -> None:
    """The norm is that of the whole model, so every tensor rank clips by the same factor."""
    stages = (0, 2, 3)
    mpu = TensorUnit()
    expected = Block()
    optimizer, norms, states = _adamw(expected.parameters()), [], []
    for step in range(3):
        optimizer.zero_grad()
        for data in range(2):
            (expected(inputs(step, data)) / 2).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.05).item())
        optimizer.step()
        states.append({name: value.detach().clone() for name, value in expected.named_parameters()})
    mine = slice(10 * (dist.get_rank() % 2), 10 * (dist.get_rank() % 2) + 10)
    for stage in stages:
        model = Block(mpu)
        engine = deepspeed.initialize(
            model=model, optimizer=_adamw(model.parameters()), config=_tensor_config(stage, 0.05), mpu=mpu
        )[0]
        assert (engine.mp_world_size, engine.dp_world_size, engine.train_batch_size()) == (2, 2, 4)
        for step, (norm, state) in enumerate(zip(norms, states, strict=True)):
            engine.backward(engine(inputs(step, dist.get_rank() // 2)))
            engine.step()
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
            cut = {**state, "fall.weight": state["fall.weight"][:, mine]}
            cut.update({name: state[name][mine] for name in ("rise.weight", "rise.bias")})
            for name, value in engine.iter_full("fp32"):
                torch.testing.assert_close(value, cut[name], msg=lambda text: f"{stage} {name}: {text}")  # noqa: B023
        engine.destroy()


@on_ranks(4)
def test_an_overflow_on_one_tensor_rank_skips_the_step_of_all() -> None:
    """An overflow in what one tensor rank has alone."""
    stage = 1
    mpu = TensorUnit()
    model = Block(mpu)
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine = deepspeed.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=_tensor_config(stage, 1.0, fp16=fp16), mpu=mpu
    )[0]
    for boost in (float("inf"), 0.0):
        engine.backward(engine(inputs(0, dist.get_rank() // 2), boost if dist.get_rank() == 3 else 0.0))
        engine.step()
        assert engine.optimizer.overflow == bool(boost)
    assert engine.optimizer.loss_scale == 128
    assert re.search(r"first in 'rise.weight' \(slice of rank [13]\)", engine.inspect().updater._first_skip)


class StageUnit:
    """Two ranks with different parts of the model, as the stages of a pipeline have them."""

    def __init__(self) -> None:
        self.alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]

    def get_data_parallel_group(self):
        return self.alone

    def get_pipe_parallel_world_size(self):
        return 2


@on_ranks(2)
def test_ranks_with_different_parts_of_the_model_decide_together() -> None:
    """Ranks that know nothing of each other's parameters decide together."""
    stages = (0, 2)
    mpu, parts = StageUnit(), [tower(2), Block()]
    both = nn.ModuleList(parts)
    optimizer = _adamw(both.parameters())
    sum(part(inputs(0)) for part in parts).backward()
    norm = torch.nn.utils.clip_grad_norm_(both.parameters(), 0.05).item()
    optimizer.step()
    for stage in stages:
        model = [tower(2), Block()][dist.get_rank()]
        engine = deepspeed.initialize(
            model=model, optimizer=_adamw(model.parameters()), config=_tensor_config(stage, 0.05), mpu=mpu
        )[0]
        engine.backward(engine(inputs(0)))
        engine.step()
        assert engine.get_global_grad_norm() == pytest.approx(norm, rel=1e-5)
        for name, value in parts[dist.get_rank()].named_parameters():
            torch.testing.assert_close(dict(engine.iter_full("fp32"))[name], value.detach())
        engine.destroy()
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    model = [tower(2), Block()][dist.get_rank()]
    engine = deepspeed.initialize(
        model=model, optimizer=_adamw(model.parameters()), config=_tensor_config(1, 1.0, fp16=fp16), mpu=mpu
    )[0]
    engine.backward(engine(inputs(0)) if dist.get_rank() == 0 else engine(inputs(0), float("inf")))
    engine.step()
    assert engine.optimizer.overflow
    assert "first in 'rise.weight' (slice of rank 1)" in engine.inspect().updater._first_skip
