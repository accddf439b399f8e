"""Stateful loaders over a DistributedSampler continue at any number of ranks with the samples that come next."""

from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import deepspeed
from deepspeed.data import RepeatingLoader
from tests.harness import run_ranks


class Stateful(DataLoader):
    """Saves what torchdata's ``StatefulDataLoader`` saves in one process: how many batches were given out."""

    _given, _skip, _of_sampler = 0, 0, None

    def __iter__(self):
        iter(self.batch_sampler.sampler)  # torchdata makes iterators that it does not read
        self._given, self._skip = self._skip, 0
        sampler = self.batch_sampler.sampler
        if self._given and hasattr(sampler, "load_state_dict"):
            sampler.load_state_dict(self._of_sampler)
            return self._batches(super().__iter__(), 0)
        return self._batches(super().__iter__(), self._given)

    def _batches(self, batches, skip):
        for _ in range(skip):
            next(batches)
        for batch in batches:
            self._given += 1
            yield batch
        self._given = 0

    def state_dict(self):
        sampler = self.batch_sampler.sampler
        own = {"sampler_state": sampler.state_dict()} if hasattr(sampler, "state_dict") else {}
        return {"_num_yielded": self._given, **own}

    def load_state_dict(self, state):
        self._skip, self._of_sampler = state.get("_num_yielded", 0), state.get("sampler_state")


class StatefulSampler(DistributedSampler):
    """Saves what torchdata's ``StatefulDistributedSampler`` saves: how many indices were given out."""

    yielded, next_yielded = 0, None

    def __iter__(self):
        self.yielded, self.next_yielded = self.next_yielded or 0, None
        for index in list(super().__iter__())[self.yielded :]:
            self.yielded += 1
            yield index

    def state_dict(self):
        return {"yielded": self.yielded}

    def load_state_dict(self, state):
        self.next_yielded = state["yielded"]


class ByLength(DistributedSampler):
    """Orders the samples by something else than a permutation of torch's, and keeps a generator between passes."""

    def __init__(self, dataset, ranks, rank, seed):
        super().__init__(dataset, ranks, rank, seed=seed)
        self.lengths = [(7 * at) % 3 for at in range(len(dataset))]

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator).tolist()
        order.sort(key=lambda at: self.lengths[at])
        return iter(order[self.rank :: self.num_replicas])


class InBlocks(DistributedSampler):
    """Gives each rank a block of the samples."""

    def __iter__(self):
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class PerRank(DistributedSampler):
    """Orders the samples otherwise on each rank."""

    def __init__(self, dataset, ranks, rank, seed):
        super().__init__(dataset, ranks, rank, seed=seed + rank)


class Anew(DistributedSampler):
    """Draws its order from the generator of the process."""

    def __iter__(self):
        return iter(torch.randperm(len(self.dataset)).tolist()[self.rank :: self.num_replicas])


class NotToBeCopied(StatefulSampler):
    def __deepcopy__(self, memo):
        raise TypeError("this sampler has a file open")


SAMPLERS = {
    cls.__name__: cls for cls in (DistributedSampler, StatefulSampler, ByLength, InBlocks, PerRank, Anew, NotToBeCopied)
}


def _loader_and_sampler(library, kind):
    if library == "stand-in":
        return Stateful, SAMPLERS[kind]
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    return StatefulDataLoader, StatefulDistributedSampler if kind == "StatefulSampler" else SAMPLERS[kind]


STEPS, EACH = 12, 8  # updates, and samples in each


def part_of_a_run(library, kind, wrap, start, stop, folder, micro_batches=1):
    """The samples of each update of all ranks, and the warnings of this one; a pass has five updates."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    data = torch.arange(40.0).reshape(40, 1).expand(40, 2)
    loader_class, sampler_class = _loader_and_sampler(library, kind)
    sampler, size = sampler_class(data, ranks, rank, seed=3), EACH // ranks // micro_batches
    config = {"train_micro_batch_size_per_gpu": size, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    if library == "engine":
        loader = engine.deepspeed_io(data, data_sampler=sampler)
    else:
        loader = loader_class(data, batch_size=size, sampler=sampler)
    engine.training_dataloader = RepeatingLoader(loader) if wrap == "before" else loader
    lines = BufferingHandler(10_000)
    deepspeed.logger.addHandler(lines)
    try:
        if start:
            engine.load_checkpoint(folder)
    finally:
        deepspeed.logger.removeHandler(lines)
    batches = engine.training_dataloader if wrap == "before" else RepeatingLoader(loader)
    found = [sum((next(batches)[:, 0].int().tolist() for _ in range(micro_batches)), []) for _ in range(start, stop)]
    engine.save_checkpoint(folder)
    every = [None] * ranks
    dist.all_gather_object(every, found)
    warnings = [one.getMessage() for one in lines.buffer if "position in the data is not" in one.getMessage()]
    return [sorted(sum(parts, [])) for parts in zip(*every, strict=True)], warnings


def in_parts(library, kind, wrap, parts, folder):
    found, warnings = [], []
    for ranks, stop, micro_batches in parts:
        more, logged = run_ranks(part_of_a_run, ranks, library, kind, wrap, len(found), stop, folder, micro_batches)[0]
        found, warnings = found + more, warnings + logged
    return found, warnings


@pytest.mark.parametrize("library", ["stand-in", "torchdata", "engine"])
@pytest.mark.parametrize("kind", ["DistributedSampler", "StatefulSampler", "ByLength"])
@pytest.mark.parametrize("wrap", ["before", "after"])
def test_any_number_of_ranks_continues_with_the_samples_that_come_next(library, kind, wrap, tmp_path):
    """Also for the second and third time, with another micro-batch, on the same ranks, and at the end of a pass."""
    if library == "torchdata":
        pytest.importorskip("torchdata")
    whole, _ = in_parts(library, kind, wrap, [(2, STEPS, 1)], str(tmp_path / "whole"))
    assert sorted(sum(whole[:5], [])) == list(range(40)) and whole[:5] != whole[5:10]
    plan = [(2, 3, 1), (1, 4, 1), (1, 5, 2), (2, 7, 1), (2, 8, 2), (1, 9, 1), (1, 10, 1), (1, STEPS, 1)]
    assert in_parts(library, kind, wrap, plan, str(tmp_path / "parts")) == (whole, [])


@pytest.mark.parametrize("library", ["stand-in", "engine"])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("InBlocks", "does not give the samples of its order to the ranks in turn"),
        ("PerRank", "orders the samples differently"),
        ("Anew", "orders the samples differently"),
        ("NotToBeCopied", "cannot be read for another number of ranks (TypeError: this sampler has a file open)"),
    ],
)
def test_a_sampler_whose_ranks_share_no_order_starts_over_with_one_warning(library, kind, reason, tmp_path):
    found, warnings = in_parts(library, kind, "after", [(2, 3, 1), (1, 5, 1), (2, 7, 1)], str(tmp_path))
    assert len(warnings) == 2 and all(f"{kind} {reason}" in one for one in warnings), warnings
    if kind != "Anew":
        assert found[5:] == found[:2]
