"""The order of samples, and where a pass was left."""

import random

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data.orders import indices_after, order_of, why_not_shared, with_ranks
from deepspeed.data.positions import has_shared_order, shared_position
from tests.checkpoint.test_shared_positions import Anew, ByLength, InBlocks, PerRank, Stateful, StatefulSampler

# The order that the ranks of a DistributedSampler share, and its rest for any number of ranks.


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_a_copy_for_other_ranks_gives_what_a_new_sampler_gives(ranks, drop_last):
    sampler = DistributedSampler(range(23), 4, 1, seed=5, drop_last=drop_last)
    sampler.set_epoch(2)
    for rank in range(ranks):
        expected = DistributedSampler(range(23), ranks, rank, seed=5, drop_last=drop_last)
        expected.set_epoch(2)
        made = with_ranks(sampler, ranks, rank)
        assert list(made) == list(expected) and len(made) == len(expected) and made.dataset is sampler.dataset
        assert indices_after(made, 0) == list(expected)


@pytest.mark.parametrize("kind", [DistributedSampler, StatefulSampler, ByLength])
def test_the_ranks_share_the_rest_of_a_pass(kind):
    order = list(kind(range(24), 1, 0, seed=3))
    parts = [indices_after(kind(range(24), 3, rank, seed=3), 9) for rank in range(3)]
    assert [at for turn in zip(*parts, strict=True) for at in turn] == order[9:]


def _reasons(kind, before, after, seed=3):
    order = order_of(kind(range(24), before, 0, seed=3))
    torch.rand(1)  # as the run that loads has drawn other random numbers
    return [why_not_shared(kind(range(24), after, rank, seed=seed), order) for rank in range(after)]


def test_which_samplers_share_an_order():
    for kind in (DistributedSampler, StatefulSampler, ByLength):
        assert _reasons(kind, 2, 3) == [None] * 3 and _reasons(kind, 4, 1) == [None]
    in_turn, otherwise = "does not give the samples of its order to the ranks in turn", "orders the samples differently"
    assert all(f"InBlocks {in_turn}" in reason for reason in _reasons(InBlocks, 2, 3))
    assert in_turn in _reasons(InBlocks, 3, 1)[0]  # as it was divided before
    assert _reasons(PerRank, 2, 1) == [None]  # of rank 0
    assert _reasons(PerRank, 2, 2)[0] is None and otherwise in _reasons(PerRank, 2, 2)[1]
    assert all(f"Anew {otherwise}" in reason for reason in _reasons(Anew, 2, 2))
    assert otherwise in _reasons(ByLength, 2, 1, seed=4)[0]
    assert (
        why_not_shared(ByLength(range(24), 2, 0, seed=3), {})
        == "ByLength is not the class of the sampler that was saved"
    )


def test_reading_an_order_leaves_the_sampler_and_all_generators_as_they_are():
    for kind in (StatefulSampler, Anew):
        sampler = kind(range(24), 2, 1)
        sampler.set_epoch(4)
        passing = iter(sampler)
        before = [next(passing) for _ in range(3)]
        states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        order = order_of(sampler)
        assert order["order"]["epoch"] == 4 and order["order"]["ranks"] == 2
        why_not_shared(sampler, {"order": {**order["order"], "epoch": 1}})
        assert states == (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
        assert sampler.epoch == 4 and len({*before, *passing}) == 12


def test_the_order_is_read_once_per_epoch():
    class Counted(DistributedSampler):
        passes: list[int] = []

        def __iter__(self):
            self.passes.append(self.epoch)
            return super().__iter__()

    sampler = Counted(range(24), 2, 0)
    first = order_of(sampler)
    assert order_of(sampler) == first and Counted.passes == [0]
    sampler.set_epoch(1)
    assert order_of(sampler) != first and Counted.passes == [0, 1]


def test_a_loaded_state_of_torchdatas_sampler_does_not_shorten_the_order():
    sampler = StatefulSampler(range(24), 2, 0)
    sampler.load_state_dict({"yielded": 5})
    assert len(list(with_ranks(sampler, 1, 0))) == 24
    assert len(list(sampler)) == 7


# Where all ranks stand is read from a loader's state.


def test_the_position_in_the_state_of_worker_processes_is_found_too():
    data = torch.arange(40.0)
    loader = Stateful(data, batch_size=3, sampler=DistributedSampler(data, 2, 0))
    state = {"_snapshot": {"_snapshot_step": 4}, "_steps_since_snapshot": 1}
    assert shared_position(loader, state) == {"epoch": 1, "samples": 30, "batch_size": 3}
    assert shared_position(loader, {"_num_yielded": 7})["samples"] == 40  # the last batch is smaller
    assert shared_position(loader, {"_num_yielded": 7, "_iterator_finished": True}) == {"epoch": 1, "samples": None}
    assert shared_position(loader, {"given": 7}) is None


def test_which_loaders_may_share_an_order():
    data = torch.arange(40.0)
    share = DistributedSampler(data, 2, 0)
    assert has_shared_order(Stateful(data, batch_size=3, sampler=share))
    assert has_shared_order(Stateful(data, batch_size=3, sampler=ByLength(data, 2, 0, 1)))
    assert has_shared_order(Stateful(data, batch_sampler=BatchSampler(share, 3, False)))

    class Buckets(BatchSampler):
        """Batches of the program, of any sizes."""

    assert not has_shared_order(Stateful(data, batch_sampler=Buckets(share, 3, False)))
    assert not has_shared_order(Stateful(data, batch_size=3, shuffle=True))
    assert not has_shared_order(DataLoader(data, batch_size=3, sampler=share))
