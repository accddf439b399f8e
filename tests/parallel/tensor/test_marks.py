"""A program that cuts its layers itself, as Megatron-LM does: its mpu and its marks are enough."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness import assert_states_equal, on_ranks, run_ranks
from tests.harness.training import plain_run, train_like
from tests.parallel.tensor.support import adamw

WIDTH, INNER, VOCABULARY, STEPS = 8, 12, 20, 3


class Unit:
    """The mpu of such a program: neighbors share layers."""

    def __init__(self, size: int) -> None:
        world, self._size = dist.get_world_size(), size
        rows = [list(range(first, first + size)) for first in range(0, world, size)]
        columns = [list(range(place, world, size)) for place in range(size)]
        self._tensor = [dist.new_group(ranks) for ranks in rows][dist.get_rank() // size]
        self._data = [dist.new_group(ranks) for ranks in columns][dist.get_rank() % size]

    def get_tensor_model_parallel_group(self):
        return self._tensor

    def get_tensor_model_parallel_world_size(self):
        return self._size

    def get_tensor_model_parallel_rank(self):
        return dist.get_rank() % self._size

    def get_model_parallel_group(self):
        return self._tensor

    get_model_parallel_world_size = get_tensor_model_parallel_world_size
    get_model_parallel_rank = get_tensor_model_parallel_rank

    def get_data_parallel_group(self):
        return self._data

    def get_data_parallel_world_size(self):
        return dist.get_world_size() // self._size

    def get_data_parallel_rank(self):
        return dist.get_rank() // self._size


class Alone:
    """The same for one rank."""

    def get_tensor_model_parallel_group(self):
        return None

    def get_tensor_model_parallel_world_size(self):
        return 1

    def get_tensor_model_parallel_rank(self):
        return 0


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        if ctx.group is not None:
            dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def _cut(mpu, whole: torch.Tensor, dim: int, stride: int = 1, mark: str = "tensor_model_parallel") -> nn.Parameter:
    """This rank's part of an initial weight that every rank draws whole."""
    size, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    chunks = whole.chunk(size * stride, dim)
    parameter = nn.Parameter(torch.cat(chunks[rank::size], dim).detach().clone())
    if size > 1:
        setattr(parameter, mark, True)
        parameter.partition_dim, parameter.partition_stride = dim, stride
    return parameter


class ColumnParallelLinear(nn.Module):
    def __init__(self, mpu, inside: int, out: int, stride: int = 1) -> None:
        super().__init__()
        whole = nn.Linear(inside, out)
        self.group = mpu.get_tensor_model_parallel_group()
        self.weight = _cut(mpu, whole.weight, 0, stride)
        self.bias = _cut(mpu, whole.bias, 0, stride, "model_parallel")

    def forward(self, x):
        return F.linear(_Copy.apply(x, self.group), self.weight, self.bias)


class RowParallelLinear(nn.Module):
    def __init__(self, mpu, inside: int, out: int) -> None:
        super().__init__()
        whole = nn.Linear(inside, out)
        self.group = mpu.get_tensor_model_parallel_group()
        self.weight = _cut(mpu, whole.weight, 1)
        self.bias = nn.Parameter(whole.bias.detach().clone())  # whole on all of them

    def forward(self, x):
        return _Reduce.apply(F.linear(x, self.weight), self.group) + self.bias


class VocabParallelEmbedding(nn.Module):
    def __init__(self, mpu) -> None:
        super().__init__()
        self.group = mpu.get_tensor_model_parallel_group()
        self.weight = _cut(mpu, nn.Embedding(VOCABULARY, WIDTH).weight, 0)
        self.first = mpu.get_tensor_model_parallel_rank() * self.weight.shape[0]

    def forward(self, ids):
        mine = (ids >= self.first) & (ids < self.first + self.weight.shape[0])
        found = F.embedding((ids - self.first) * mine, self.weight) * mine.unsqueeze(-1)
        return _Reduce.apply(found, self.group)


class Program(nn.Module):
    """An embedding, two gated MLPs (gate and up packed in one weight), tied logits of a part each."""

    def __init__(self, mpu, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.group = mpu.get_tensor_model_parallel_group()
        self.embedding = VocabParallelEmbedding(mpu)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.rise = nn.ModuleList(ColumnParallelLinear(mpu, WIDTH, 2 * INNER, stride=2) for _ in range(2))
        self.fall = nn.ModuleList(RowParallelLinear(mpu, INNER, WIDTH) for _ in range(2))

    def forward(self, ids):
        x = self.embedding(ids)
        for norm, rise, fall in zip(self.norms, self.rise, self.fall, strict=True):
            gate, up = rise(norm(x)).chunk(2, dim=-1)
            x = x + fall(F.silu(gate) * up)
        logits = F.linear(_Copy.apply(x, self.group), self.embedding.weight)
        # The cross entropy of parts, by its two sums.
        low = self.embedding.first
        mine = (ids >= low) & (ids < low + logits.shape[-1])
        chosen = logits.gather(-1, ((ids - low) * mine).unsqueeze(-1)).squeeze(-1) * mine
        total = _Reduce.apply(logits.exp().sum(-1), self.group)
        return (total.log() - _Reduce.apply(chosen, self.group)).mean()


def _ids(step: int, data: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(1000 * step + data))


def _settings(stage: int) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def _loss(model, step: int, data: int) -> torch.Tensor:
    return model(_ids(step, data))


def _check_whole(engine, state) -> None:
    for name, parameter in engine.module.named_parameters():
        torch.testing.assert_close(
            safe_get_full_fp32_param(parameter), state[name], rtol=1e-5, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
        )
    full = engine._consolidated_16bit_state_dict()
    if full is not None:
        assert {name: value.shape for name, value in full.items()} == {n: v.shape for n, v in state.items()}


def _every_stage(size: int, stages: tuple[int, ...], folder: str):
    mpu = Unit(size)
    expected = plain_run(Program(Alone()), STEPS, dist.get_world_size() // size, loss=_loss, optimizer=adamw)
    for stage in stages:
        model = Program(mpu)
        engine = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=_settings(stage), mpu=mpu
        )[0]
        assert (engine.mp_world_size, engine.dp_world_size) == (size, dist.get_world_size() // size)
        train_like(engine, expected, _loss, dist.get_rank() // size)
        _check_whole(engine, expected.state)
        engine.save_checkpoint(folder, tag=f"stage{stage}")
        kept = {name: value.clone() for name, value in engine.iter_full("fp32")}
        engine.backward(_loss(engine, 0, 0))
        assert safe_get_full_grad(engine.module.rise[0].weight).shape == (2 * INNER, WIDTH)
        engine.destroy()
        other = Program(mpu, seed=5)
        engine = deepspeed.initialize(
            model=other, optimizer=adamw(other.parameters()), config=_settings(3 - stage), mpu=mpu
        )[0]
        engine.load_checkpoint(folder, tag=f"stage{stage}")
        assert_states_equal(dict(engine.iter_full("fp32")), kept)
        engine.destroy()
    return kept


def _load_whole(folder: str, tag: str):
    """The program itself, on one rank that has everything."""
    model = Program(Alone(), seed=6)
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=_settings(1))[0]
    engine.load_checkpoint(folder, tag=tag)
    assert engine.global_steps == STEPS
    return {name: value.clone() for name, value in engine.iter_full("fp32")}


def test_every_stage_and_any_number_of_ranks(tmp_path):
    folder = str(tmp_path)
    saved = run_ranks(_every_stage, 4, 2, (0, 1, 2, 3), folder, timeout=180)[0]
    for found in run_ranks(_load_whole, 1, folder, "stage3"):
        assert_states_equal(found, saved)


@pytest.mark.slow
def test_four_ranks_share_layers(tmp_path):
    run_ranks(_every_stage, 4, 4, (1, 3), str(tmp_path), timeout=180)


@on_ranks(2)
def test_marks_that_do_not_fit_are_refused() -> None:
    mpu = Unit(2)
    for change, words in (
        ({"partition_dim": 2}, r"'rise.0.weight' of shape \(12, 8\) is marked with partition_dim 2"),
        ({"partition_stride": 5}, "partition_stride 5; expected one of its dimensions, and a number of equal blocks"),
        (
            {"partition_stride": 1 + dist.get_rank()},
            "tensor rank 0 has 'rise.0.weight' .*partition_stride 1, tensor rank 1",
        ),
    ):
        model = Program(mpu)
        for name, value in change.items():
            setattr(model.rise[0].weight, name, value)
        with pytest.raises(DeepSpeedConfigError, match=words):
            deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=_settings(1), mpu=mpu)
