"""What must hold over many steps, under torch.compile, and on a mesh that the program lays out."""

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.comm.job import groups
from tests.harness import on_ranks
from tests.harness.training import train_like
from tests.parallel.tensor.support import adamw, config, llama, plain_run, short_loss_of
from tests.parallel.tensor.test_training import _check_weights, _whole_are_equal


@on_ranks(4)
def test_whole_parameters_have_equal_bits_after_many_steps() -> None:
    """The bits of what is whole stay equal on tensor ranks, as each of them computes and updates it by itself."""
    for stage, more in ((1, {}), (3, {"sequence_parallel_norms": True})):
        model = llama()
        section = {"autotp_size": 2, **more}
        settings = config(2, stage, tensor_parallel=section)
        engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)[0]
        for step in range(8):
            engine.backward(short_loss_of(engine, step, engine.get_data_parallel_rank()))
            engine.step()
        assert engine.global_steps == 8
        _whole_are_equal(engine, 2)
        mine = {name: value for name, value in engine.module.named_parameters() if "norm" in name and stage < 3}
        for name, value in mine.items():
            first = value.detach().clone()
            dist.broadcast(first, 0)
            assert torch.equal(first, value), name
        engine.destroy()


def _train(engine, expected, data_rank: int) -> None:
    train_like(engine, expected, short_loss_of, data_rank)
    _check_weights(engine, expected)


@pytest.mark.parametrize(
    "cells",
    [[(3, {"sequence_parallel_norms": True})], pytest.param([(0, {}), (3, {}), (1, {})], marks=pytest.mark.slow)],
)
@on_ranks(2, timeout=180)
def test_compiled_blocks(cells) -> None:
    """Every block by itself; collectives stay outside of the graphs."""
    expected = plain_run(llama(num_hidden_layers=1), 3, 1, loss=short_loss_of)
    for stage, more in cells:
        model = llama(num_hidden_layers=1)
        settings = config(2, stage, tensor_parallel={"autotp_size": 2, **more})
        engine = deepspeed.initialize(model=model, optimizer=adamw(model.parameters()), config=settings)[0]
        for block in model.model.layers:
            block.compile(backend="aot_eager")
        _train(engine, expected, 0)
        engine.destroy()
        torch._dynamo.reset()


@on_ranks(4)
def test_a_mesh_of_the_program() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    expected = plain_run(llama(), 3, 2, loss=short_loss_of)
    rank = dist.get_rank()
    for names, data_rank, others in ((("dp", "tp"), rank // 2, [rank // 2 * 2, rank // 2 * 2 + 1]),
                                     (("tp", "dp"), rank % 2, [rank % 2, rank % 2 + 2])):  # fmt: skip
        model = llama()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        engine = deepspeed.initialize(
            model=model, optimizer=adamw(model.parameters()), config=config(2, 2), mesh_param=mesh
        )[0]
        assert (engine.dp_world_size, engine.mp_world_size) == (2, 2)
        assert engine.get_data_parallel_rank() == data_rank
        assert dist.get_process_group_ranks(groups.group_along("tensor")) == others
        _train(engine, expected, data_rank)
        engine.destroy()
