"""``deterministic``: the same run twice gives the same bits, and what cannot is refused by its name."""

import os
import random

import numpy
import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.data import DeepSpeedDataLoader, set_random_seed
from deepspeed.engine.agreeing import VARIABLES, choose_algorithms
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import WIDTH, engine_of, inputs
from tests.harness import on_ranks
from tests.harness.logged import logged
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


class Noise(torch.utils.data.Dataset):
    """Samples that are drawn from all three generators."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(WIDTH) + random.random() + numpy.random.rand() + 10 * index


def _batches(workers: int, number: int = 9, skip: int = 0) -> list[torch.Tensor]:
    loader = DeepSpeedDataLoader(Noise(), 2, num_local_io_workers=workers, seed=1, data_parallel_world_size=2)
    if skip:
        started = DeepSpeedDataLoader(Noise(), 2, seed=1, data_parallel_world_size=2)
        for _ in range(skip):
            next(started)
        loader.load_state_dict(started.state_dict())
    found: list[torch.Tensor] = []
    while len(found) < number:
        found += list(loader)
    return found[:number]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_numbers_of_a_loader_are_its_own(workers):
    """Two passes: equal whatever the program has drawn, new ones in each, and the program's own are not drawn."""
    set_random_seed(1)
    first = _batches(workers)
    after = torch.rand(1), random.random(), numpy.random.rand()
    set_random_seed(2)
    second = _batches(workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert len({float(batch.sum()) for batch in first}) == len(first)
    set_random_seed(1)
    assert after == (torch.rand(1), random.random(), numpy.random.rand())
    if not workers:  # a resumed pass goes on with the same numbers
        assert all(torch.equal(a, b) for a, b in zip(first[2:], _batches(0, 7, skip=2), strict=True))


def _trained(stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    set_random_seed(3)
    model = nn.Sequential(tower(), nn.Dropout(0.1))
    engine = deepspeed.initialize(
        model=model,
        training_data=Noise(),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "deterministic": True,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )[0]
    assert torch.are_deterministic_algorithms_enabled()
    losses = []
    for batch in engine.training_dataloader:
        loss = engine(batch)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    masters = full_masters(engine)
    engine.destroy()
    assert not torch.are_deterministic_algorithms_enabled()
    return losses, masters


@on_ranks(2)
def test_the_same_bits_twice():
    for stage in (1, 3):
        (losses, masters), (again, masters_again) = _trained(stage), _trained(stage)
        assert losses == again and len(losses) == 3 and all(loss == loss for loss in losses)
        assert all(torch.equal(masters[name], masters_again[name]) for name in masters)


class Unpooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool, self.unpool = (
            nn.Linear(WIDTH, 8),
            nn.MaxPool1d(2, return_indices=True),
            nn.MaxUnpool1d(2),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unpool(*self.pool(self.layer(x))).sum()


@on_ranks(1)
def test_what_cannot_be_deterministic():
    engine = engine_of(Unpooled(), 0, deterministic=True)
    with pytest.raises(RuntimeError, match="max_unpooling2d.* does not have a deterministic implementation"):
        engine(inputs(0))
    engine.destroy()
    with pytest.raises(DeepSpeedConfigError, match="Name a codec"):
        engine_of(tower(), 0, deterministic=True, communication_compression={"gradients": "auto"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        with pytest.raises(DeepSpeedConfigError, match="Leave it at its default"):
            engine_of(tower(), 0, deterministic=True)


def test_variables(monkeypatch):
    """They are set before the group exists; where it exists already, a line names those that are not set."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    choose_algorithms({"train_batch_size": 1}, is_started=False)
    with logged() as lines:
        choose_algorithms({"deterministic": True}, is_started=True)
    (line,) = lines.about("deterministic: ")
    assert all(name in line for name in VARIABLES)
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    choose_algorithms({"deterministic": "true"}, is_started=False)
    assert {name: os.environ[name] for name in VARIABLES} == {**VARIABLES, "NCCL_ALGO": "Tree"}
    with logged() as lines:
        choose_algorithms({"deterministic": True}, is_started=True)
    assert not lines.about("deterministic: ")
