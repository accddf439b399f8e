"""Saving and resuming on the same ranks: as if nothing had happened, bit for bit."""

import random
from pathlib import Path

import numpy
import pytest
import torch

from deepspeed import comm
from tests.checkpoint.training import PRECISIONS, engine, fragments, joined, other_state, train
from tests.harness import assert_states_equal, on_ranks, run_ranks


def straight_and_resumed(folder: str, stages: tuple[int, ...], precision: str):
    """Five steps at once, and three, a checkpoint, a new engine with other values everywhere, and two."""
    report = {}
    for stage in stages:
        first = engine(stage, precision, dropout=0.1)
        torch.manual_seed(comm.get_rank())  # dropout differs by rank, so each rank needs its own random state back
        losses = train(first, range(3))
        first.save_checkpoint(folder, tag=f"stage{stage}", client_state={"note": [1, "two"]})
        losses += train(first, range(3, 5))
        expected = fragments(first), other_state(first)
        again = engine(stage, precision, seed=8, dropout=0.1)
        train(again, range(7, 8))
        path, client_state = again.load_checkpoint(Path(folder), tag=f"stage{stage}")
        counters = again.global_steps, again.skipped_steps
        resumed = train(again, range(3, 5))
        report[stage] = (losses[3:], resumed, expected, (fragments(again), other_state(again)))
        assert path == str(Path(folder) / f"stage{stage}")
        assert client_state["note"] == [1, "two"]
        assert counters[0] == 3
    return report


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_run_equals_straight_run(ranks, precision, tmp_path):
    results = run_ranks(straight_and_resumed, ranks, str(tmp_path), (0, 1, 2, 3), precision)
    for stage in range(4):
        for rank, report in enumerate(results):
            straight, resumed, expected, found = report[stage]
            assert resumed == straight, (stage, rank)
            assert_states_equal(found[1], expected[1])
        wanted = joined([report[stage][2][0] for report in results])
        assert_states_equal(joined([report[stage][3][0] for report in results]), wanted)


def generators(folder: str):
    run = engine(2)
    random.seed(comm.get_rank())
    numpy.random.seed(comm.get_rank())
    torch.manual_seed(comm.get_rank())
    run.save_checkpoint(folder)
    expected = random.random(), numpy.random.rand(), torch.rand(3)
    run.load_checkpoint(folder)
    return expected, (random.random(), numpy.random.rand(), torch.rand(3))


def test_each_rank_gets_its_own_random_states_back(tmp_path):
    (first, again), (other, other_again) = run_ranks(generators, 2, str(tmp_path))
    assert_states_equal(again, first)
    assert_states_equal(other_again, other)
    assert first[0] != other[0]


@on_ranks(1)
def test_a_write_before_the_save_is_in_it_and_masters_may_be_left_out(tmp_path) -> None:
    folder = str(tmp_path)
    run = engine(1)
    train(run, range(1))
    with torch.no_grad():
        run.module.blocks[0].rise.weight.fill_(0.3)
    run.save_checkpoint(folder)
    for use_masters in (True, False):
        again = engine(1, seed=8, zero_optimization={"load_from_fp32_weights": use_masters})
        again.load_checkpoint(folder)
        assert_states_equal(dict(again.module.state_dict()), dict(run.module.state_dict()))
        is_rounded = [torch.equal(master.flat, master.out.float()) for master in again._runtime.masters]
        assert all(is_rounded) != use_masters
        if use_masters:
            masters = joined([fragments(again)])
            assert masters["master/blocks.0.rise.weight"].unique().tolist() == [torch.tensor(0.3).bfloat16().item()]


def on_other_ranks(folder: str):
    run = engine(2)
    torch.manual_seed(5)
    if comm.get_world_size() == 2:
        run.save_checkpoint(folder)
    else:
        torch.manual_seed(6)
        run.load_checkpoint(folder)
    return torch.initial_seed()


def test_other_ranks_leave_random_states_alone(tmp_path):
    assert run_ranks(on_other_ranks, 2, str(tmp_path)) == [5, 5]
    assert run_ranks(on_other_ranks, 1, str(tmp_path)) == [6]
