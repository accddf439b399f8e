"""A resumed run goes on with the batch that would have come next."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, RandomSampler

import deepspeed
from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from tests.harness import run_ranks


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


def test_training_goes_on_with_the_same_data(tmp_path):
    for straight, resumed in run_ranks(resume, 2, str(tmp_path)):
        assert straight == resumed
