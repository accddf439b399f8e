"""A model that is cut trains like the whole one: losses, norms and weights, at every stage."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from tests.harness import on_ranks, run_ranks
from tests.harness.training import train_like
from tests.parallel.tensor.support import adamw, assert_weights_equal, config, llama, loss_of, plain_run

STEPS = 3


def _train(model, size: int, stage: int, expected, accumulation: int = 1, **sections):
    """Trains and compares step by step; returns the engine."""
    rank, data = dist.get_rank(), dist.get_world_size() // size
    if rank % size:  # the first rank's values win
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
    engine = deepspeed.initialize(
        model=model,
        optimizer=adamw(parameter for parameter in model.parameters() if parameter.requires_grad),
        config=config(size, stage, gradient_accumulation_steps=accumulation, **sections),
    )[0]
    assert (engine.dp_world_size, engine.mp_world_size) == (data, size)
    assert engine.train_batch_size() == 2 * data * accumulation
    train_like(engine, expected, loss_of, rank // size, accumulation)
    return engine


def _check_weights(engine, expected) -> None:
    full = engine._consolidated_16bit_state_dict()
    if full is not None:
        assert_weights_equal(full, expected.state)


def _whole_are_equal(engine, size: int) -> None:
    """What is whole on tensor ranks has the same bits there."""
    mine = {name: value for name, value in engine.iter_full("fp32") if "norm" in name or name.endswith("o_proj.bias")}
    assert mine
    for name, value in mine.items():
        others = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(others, value.contiguous())
        assert all(torch.equal(value, other) for other in others), name


@pytest.mark.parametrize(
    ("ranks", "size", "stages"),
    [
        pytest.param(4, 2, (0, 1, 2, 3), id="two ranks share each layer"),
        pytest.param(8, 4, (0, 3), id="four share it and two the batch", marks=pytest.mark.slow),
        pytest.param(4, 4, (1, 3), id="two of four share a key/value head"),
    ],
)
@on_ranks(timeout=300)
def test_it_trains_like_plain_torch(size: int, stages: tuple[int, ...]) -> None:
    expected = plain_run(llama(), STEPS, dist.get_world_size() // size)
    for stage in stages:
        engine = _train(llama(), size, stage, expected)
        _check_weights(engine, expected)
        _whole_are_equal(engine, size)
        engine.destroy()


@on_ranks(4)
def test_a_model_that_was_built_sharded_is_cut() -> None:
    """Under ``zero.Init`` modules are cut one after the other; never is more than one of them whole."""
    expected = plain_run(llama(), STEPS, 2)
    settings = config(2, 3)
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = llama()
    rank = dist.get_rank()
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)[0]
    held = sum(bucket.shard.numel() for bucket in engine._runtime.buckets)
    assert held < 0.45 * sum(value.numel() for value in expected.state.values())
    train_like(engine, expected, loss_of, rank // 2)
    _check_weights(engine, expected)
    engine.destroy()


@on_ranks(2)
def test_tied_and_frozen_weights_accumulation_and_a_parallel_loss() -> None:
    """Accumulation, tied weights, a parallel loss, frozen parameters, checkpointing."""
    model = llama(tie_word_embeddings=True)
    expected = plain_run(model, STEPS, 1, accumulation=2)
    model.gradient_checkpointing_enable()
    engine = _train(model, 2, 3, expected, accumulation=2)
    _check_weights(engine, expected)
    engine.destroy()
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0" not in name or "bias" in name)
    expected = plain_run(model, STEPS, 1)
    section = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    engine = _train(model, 2, 2, expected, tensor_parallel=section)
    batch = torch.arange(6).view(1, 6)
    assert engine(input_ids=batch).logits.shape == (1, 6, [34, 33][dist.get_rank()])
    _check_weights(engine, expected)
    engine.destroy()


class GroupsOfAProgram:
    """The groups that a program made before: pairs of ranks share layers."""

    def __init__(self):
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = [dist.new_group([first, first + 1]) for first in range(0, size, 2)]
        data = [dist.new_group(list(range(place, size, 2))) for place in (0, 1)]
        self._group = {"tensor": tensor[rank // 2], "data": data[rank % 2]}
        self._place = {"tensor": rank % 2, "data": rank // 2}
        self._size = {"tensor": 2, "data": size // 2}
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: self._group["tensor"]
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = lambda: self._place["tensor"]
        self.get_model_parallel_world_size = lambda: self._size["tensor"]
        self.get_data_parallel_group = lambda: self._group["data"]
        self.get_data_parallel_rank = lambda: self._place["data"]
        self.get_data_parallel_world_size = lambda: self._size["data"]


def _losses_with_groups_of_a_program(stage: int, own_groups: bool) -> list[float]:
    torch.manual_seed(0)
    model = llama()
    unit = GroupsOfAProgram() if own_groups else None
    engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=config(2, stage), mpu=unit)[
        0
    ]
    losses = []
    for step in range(3):
        loss = loss_of(engine, step, engine.get_data_parallel_rank())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("size", "stage"), [(2, 1), (4, 3)])
def test_layers_cut_over_groups_of_a_program(size, stage):
    expected = run_ranks(_losses_with_groups_of_a_program, size, stage, False)
    assert run_ranks(_losses_with_groups_of_a_program, size, stage, True) == expected
