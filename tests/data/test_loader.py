"""The distributed loader, endless repetition, and the helpers around batches."""

from collections import Counter, namedtuple

import numpy
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader, move_to_device, set_random_seed


class Numbers(Dataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


def samples(loader) -> list[int]:
    return [int(value) for batch in loader for value in batch]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shares_are_equal_and_cover_the_dataset(ranks, drop_last):
    loaders = [
        DeepSpeedDataLoader(
            Numbers(23), 4, data_parallel_world_size=ranks, data_parallel_rank=rank, dataloader_drop_last=drop_last
        )
        for rank in range(ranks)
    ]
    shares = [samples(loader) for loader in loaders]
    assert len({len(share) for share in shares}) == 1 and len({len(loader) for loader in loaders}) == 1
    counts = Counter(value for share in shares for value in share)
    if drop_last:
        assert max(counts.values()) == 1 and sum(counts.values()) == 23 // ranks // 4 * 4 * ranks
        assert all(len(batch) == 4 for batch in loaders[0])
    else:
        assert set(counts) == set(range(23)) and sum(counts.values()) == -(-23 // ranks) * ranks


def test_drop_last_by_either_name():
    assert len(DeepSpeedDataLoader(Numbers(5), 2, drop_last=True)) == 2
    assert len(DeepSpeedDataLoader(Numbers(5), 2, dataloader_drop_last=True)) == 2
    assert len(DeepSpeedDataLoader(Numbers(5), 2)) == 3


def test_each_pass_is_shuffled_again_and_repeatably():
    first = DeepSpeedDataLoader(Numbers(50), 5, data_parallel_world_size=2, data_parallel_rank=1)
    passes = [samples(first), samples(first)]
    assert passes[0] != passes[1] and passes[0] != sorted(passes[0])
    again = DeepSpeedDataLoader(Numbers(50), 5, data_parallel_world_size=2, data_parallel_rank=1)
    again.set_epoch(1)
    assert samples(again) == passes[1]
    assert samples(DeepSpeedDataLoader(Numbers(6), 4, shuffle=False)) == list(range(6))


def test_next_without_iter():
    loader = DeepSpeedDataLoader(Numbers(4), 2, shuffle=False)
    assert next(loader).tolist() == [0, 1] and next(loader).tolist() == [2, 3]
    with pytest.raises(StopIteration):
        next(loader)


def test_iterable_dataset_is_read_as_it_is(monkeypatch):
    from deepspeed.data import loader as loader_module

    warnings: list[str] = []
    monkeypatch.setattr(loader_module, "warn_once", lambda key, line: warnings.append(line))
    DeepSpeedDataLoader(Stream(5), 2)
    assert warnings == []
    loader = DeepSpeedDataLoader(Stream(5), 2, data_parallel_world_size=2, data_parallel_rank=1)
    assert samples(loader) == samples(loader) == list(range(5))
    assert loader.data_sampler is None
    assert len(warnings) == 1 and "all 2 ranks read whole" in warnings[0]
    with pytest.raises(ValueError, match="found an IterableDataset; leave data_sampler out"):
        DeepSpeedDataLoader(Stream(5), 2, data_sampler=SequentialSampler(range(5)))


def test_own_collate_sampler_and_options():
    loader = DeepSpeedDataLoader(
        Numbers(6), 3, collate_fn=lambda batch: ("mine", batch), data_sampler=SequentialSampler(range(4))
    )
    assert list(loader) == [("mine", [0, 1, 2]), ("mine", [3])]
    batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    assert [len(batch) for batch in DeepSpeedDataLoader(Numbers(6), 3, data_sampler=batches)] == [2, 2, 1]
    worker = DeepSpeedDataLoader(Numbers(6), 3, shuffle=False, num_local_io_workers=1)
    assert samples(worker) == list(range(6)) and worker.dataloader.num_workers == 1


def test_timer_is_started_for_each_batch():
    class Timer:
        started = 0

        def start(self) -> None:
            self.started += 1

    timer = Timer()
    samples(DeepSpeedDataLoader(Numbers(6), 3, tput_timer=timer))
    assert timer.started == 3  # the third finds the end


def test_repeating_loader():
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert len(loader) == 2 and iter(loader) is loader


def test_repeating_loader_reshuffles_distributed_samplers():
    sampler = DistributedSampler(Numbers(30), num_replicas=1, rank=0)
    sampler.set_epoch(7)
    loader = RepeatingLoader(DataLoader(Numbers(30), batch_size=30, sampler=sampler))
    first, second, third = (next(loader).tolist() for _ in range(3))
    assert sampler.epoch == 9 and len({tuple(first), tuple(second), tuple(third)}) == 3
    ours = RepeatingLoader(DeepSpeedDataLoader(Numbers(30), 30))
    assert next(ours).tolist() != next(ours).tolist()


def test_repeating_nothing_is_an_error():
    for nothing in ([], iter([])):
        with pytest.raises(ValueError, match="yields no batch when started again"):
            next(RepeatingLoader(nothing))
    generator = RepeatingLoader(value for value in [1])
    assert next(generator) == 1
    with pytest.raises(ValueError, match="a generator cannot"):
        next(generator)


Pair = namedtuple("Pair", "left right")


def test_move_to_device():
    item = {"a": torch.ones(2), "b": [torch.ones(1), (torch.zeros(1), "text")], "c": Pair(torch.ones(1), None)}
    moved = move_to_device(item, "meta")
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][1][0].is_meta
    assert moved["b"][1][1] == "text" and isinstance(moved["c"], Pair) and moved["c"].left.is_meta
    assert move_to_device(item["a"], "cpu") is item["a"]
    some = move_to_device(item, "meta", lambda part: isinstance(part, torch.Tensor) and part.numel() == 2)
    assert some["a"].is_meta and not some["b"][0].is_meta


def test_set_random_seed():
    import random

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    set_random_seed(5)
    first = draw()
    assert draw() != first
    set_random_seed(5)
    assert draw() == first
    set_random_seed(2**40 + 1)
