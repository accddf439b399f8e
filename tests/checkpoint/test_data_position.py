"""A resumed run continues with the batch that would have come next."""

from logging.handlers import BufferingHandler

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

import deepspeed
from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from deepspeed.errors import DeepSpeedConfigError
from tests.harness import on_ranks, run_ranks


class Noisy(Dataset):
    """Samples with random numbers in them, as augmentation makes."""

    loaded = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        Noisy.loaded += 1
        return torch.tensor([float(index), torch.rand(()).item()])


class Stream(IterableDataset):
    def __iter__(self):
        return (torch.tensor([float(number), torch.rand(()).item()]) for number in range(24))


def make_loader(kind: str) -> DeepSpeedDataLoader:
    if kind == "stream":
        return DeepSpeedDataLoader(Stream(), 2)
    if kind == "random":
        return DeepSpeedDataLoader(Noisy(), 2, data_sampler=RandomSampler(Noisy()))
    return DeepSpeedDataLoader(Noisy(), 2, data_parallel_world_size=2, data_parallel_rank=1)


@pytest.mark.parametrize("kind", ["map", "random", "stream"])
@pytest.mark.parametrize("before", [0, 1, 5, 6, 7, 12, 13])
def test_position_of_a_loader(kind, before):
    torch.manual_seed(0)
    loader = make_loader(kind)
    endless = RepeatingLoader(loader)
    for _ in range(before):
        next(endless)
    state, random = loader.state_dict(), torch.get_rng_state()
    expected = [next(endless) for _ in range(20)]
    torch.manual_seed(99)
    again = make_loader(kind)
    endless = RepeatingLoader(again)
    Noisy.loaded = 0
    next(endless)
    again.load_state_dict(state)
    assert Noisy.loaded <= 2  # skipping loads nothing
    torch.set_rng_state(random)
    for batch in expected:
        assert torch.equal(next(endless), batch)


def test_a_loop_over_a_resumed_loader_does_the_rest_of_the_pass():
    loader = make_loader("map")
    batches = [batch[:, 0].tolist() for batch in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    for _ in range(2):
        next(iterator)
    again = make_loader("map")
    again.load_state_dict(loader.state_dict())
    assert [batch[:, 0].tolist() for batch in again] == batches[2:]
    assert len([1 for _ in again]) == len(batches)
    finished = again.state_dict()
    again = make_loader("map")
    again.load_state_dict(finished)
    assert again.epoch == 2 and len([1 for _ in again]) == len(batches)


def resume(folder: str):
    def build():
        torch.manual_seed(0)
        config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
        return deepspeed.initialize(model=nn.Linear(2, 1), training_data=Noisy(), config=config)

    def train(engine, batches, count):
        losses = []
        for _ in range(count):
            loss = engine(next(batches)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    engine, _, loader, _ = build()
    batches = RepeatingLoader(loader)
    train(engine, batches, 8)
    engine.save_checkpoint(folder)
    straight = train(engine, batches, 8)
    engine, _, loader, _ = build()
    batches = RepeatingLoader(loader)
    train(engine, batches, 3)
    engine.load_checkpoint(folder)
    return straight, train(engine, batches, 8)


def test_training_continues_with_the_same_data(tmp_path):
    for straight, resumed in run_ranks(resume, 2, str(tmp_path)):
        assert straight == resumed


class Counting:
    """A loader of another library: it reports its position."""

    def __init__(self) -> None:
        self.given = 0

    def __iter__(self):
        while self.given < 12:
            self.given += 1
            yield torch.full((2, 2), float(self.given))
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


def _engine_with(loader):
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=nn.Linear(2, 1), config=config)[0]
    engine.training_dataloader = loader
    return engine


def save_with_a_loader_of_others(folder):
    first = Counting()
    engine, batches = _engine_with(first), RepeatingLoader(first)
    for _ in range(15):
        next(batches)
    engine.save_checkpoint(folder)
    second = Counting()
    _engine_with(second).load_checkpoint(folder)
    return second.given, [float(next(iter(second))[0, 0]), float(next(batches)[0, 0])]


def load_on_other_ranks(folder):
    loader = Counting()
    lines = BufferingHandler(10_000)
    deepspeed.logger.addHandler(lines)
    try:
        _engine_with(loader).load_checkpoint(folder)
    finally:
        deepspeed.logger.removeHandler(lines)
    return loader.given, [record for record in lines.buffer if "the position in the data is not" in record.getMessage()]


def test_a_loader_of_others_continues_where_it_stood_or_logs_that_it_does_not(tmp_path):
    assert run_ranks(save_with_a_loader_of_others, 2, str(tmp_path)) == [(3, [4.0, 4.0])] * 2
    ((given, lines),) = run_ranks(load_on_other_ranks, 1, str(tmp_path))
    assert given == 0
    assert len(lines) == 1


class Positioned:
    """A loader of another library that saves how many batches were given out, and not the order that they are of."""

    def __init__(self) -> None:
        self.sampler = DistributedSampler(range(14), shuffle=True)
        self.given, self.skip = 0, 0

    def __iter__(self):
        self.given, self.skip = self.skip, 0
        return self._batches(list(self.sampler))

    def _batches(self, order):
        while self.given < len(order):
            self.given += 1
            yield torch.full((1, 2), float(order[self.given - 1]))

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.skip = state["given"]


def in_parts(folder, stops, loads_first):
    """Batches of several runs, of which each continues where the one before has stopped."""
    found, loads = [], False
    for stop in stops:
        loader = Positioned()
        engine = _engine_with(loader if loads_first else RepeatingLoader(loader))
        if loads:
            engine.load_checkpoint(folder)
        batches = RepeatingLoader(loader) if loads_first else engine.training_dataloader
        while len(found) < stop:
            found.append(float(next(batches)[0, 0]))
        engine.save_checkpoint(folder)
        loads = True
    return found


@on_ranks(2)
def test_a_loader_of_others_continues_in_the_order_of_its_pass_for_the_second_time_too(tmp_path) -> None:
    folder = str(tmp_path)
    whole = in_parts(folder, [24], True)
    assert len(set(whole[:7])) == 7 and whole[:7] != whole[7:14] != whole[14:21]
    for loads_first in (True, False):
        for stops in ([3, 5, 24], [8, 15, 24], [7, 14, 24]):
            assert in_parts(folder, stops, loads_first) == whole, (loads_first, stops)


@on_ranks(1)
def test_a_loader_is_no_training_data() -> None:
    with pytest.raises(DeepSpeedConfigError, match=r"training_data.*found DataLoader.*engine\.training_dataloader"):
        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        deepspeed.initialize(model=nn.Linear(2, 1), training_data=DataLoader(Noisy()), config=config)


def _samples(loaders, batches):
    """The samples of so many micro-batches of all ranks, one set for each."""
    return [sorted(sum((next(each)[:, 0].tolist() for each in loaders), [])) for _ in range(batches)]


def _loaders(ranks, size, count=50, shuffle=True, drop_last=False):
    data = torch.arange(float(count)).reshape(count, 1)
    return [
        DeepSpeedDataLoader(
            data, size, data_parallel_world_size=ranks, data_parallel_rank=rank, shuffle=shuffle, drop_last=drop_last
        )
        for rank in range(ranks)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("before", "after"), [((2, 3), (3, 2)), ((4, 2), (1, 4)), ((1, 6), (2, 3)), ((2, 3), (2, 1))])
def test_any_number_of_ranks_continues_with_the_samples_that_come_next(before, after, shuffle, drop_last):
    """Micro-batches of all ranks together have the same size before and after, or a multiple of it."""
    first = _loaders(*before, shuffle=shuffle, drop_last=drop_last)
    endless = [RepeatingLoader(each) for each in first]
    each, now = before[0] * before[1], after[0] * after[1]
    passed = 48 // each + 2  # two micro-batches into the second pass
    _samples(endless, passed + (not drop_last))
    positions = [loader.position() for loader in first]
    assert positions == [{"epoch": 2, "samples": 2 * each}] * before[0]
    expected = _samples(endless, 3 if each >= now else 4)
    second = _loaders(*after, shuffle=shuffle, drop_last=drop_last)
    for loader in second:
        next(iter(loader))  # a pass that is left
        loader.load_position(positions[0])
    found = _samples([RepeatingLoader(each) for each in second], len(expected) * each // now)
    whole = each // now
    assert [sorted(sum(found[at : at + whole], [])) for at in range(0, len(found), whole)] == expected
    assert second[0].position()["samples"] == positions[0]["samples"] + len(expected) * each


def test_the_rest_of_a_pass_has_every_sample_once():
    first = _loaders(3, 2)
    iterators = [iter(each) for each in first]
    used = sum(_samples(iterators, 4), [])
    second = _loaders(4, 3)
    for loader in second:
        loader.load_position(first[0].position())
    rest = [value for loader in second for batch in loader for value in batch[:, 0].tolist()]
    assert set(used) | set(rest) == set(range(50))
    assert len(rest) == 28  # 26 samples are left; two come twice, so that each of four ranks has seven
    third = _loaders(4, 3)
    state = first[1].state_dict()
    assert (state["passed"], state["batch_size"]) == (0, 2)
    for loader in third:
        loader.load_state_dict({**state, "given": 1})
    assert third[0].position() == {"epoch": 1, "samples": 8}


def test_between_two_passes_the_next_one_begins():
    first = _loaders(2, 5)
    for loader in first:
        list(loader)
    assert first[0].position() == {"epoch": 1, "samples": None}
    second = _loaders(5, 2)
    for loader in second:
        loader.load_position(first[0].position())
    assert _samples([iter(each) for each in second], 1) == _samples([iter(each) for each in first], 1)


def test_a_sampler_of_the_program_has_no_position_for_other_numbers_of_ranks():
    loader = DeepSpeedDataLoader(Noisy(), 2, data_sampler=RandomSampler(Noisy()))
    assert loader.position() is None and DeepSpeedDataLoader(Stream(), 2).position() is None
