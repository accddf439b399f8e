"""Loaders, also those of Accelerate and of pipelines."""

from collections import Counter, namedtuple
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

import deepspeed
from deepspeed.data import DeepSpeedDataLoader, RepeatingLoader, move_to_device, set_random_seed
from deepspeed.data.accelerate_loaders import _batches_at, _before_first, _restore_order, _with_batches
from deepspeed.data.curriculum import DeepSpeedDataSampler, shortened
from deepspeed.data.indexed import write_dataset
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.pipe import PipelineModule
from tests.data.curriculum.test_feature import SECTION
from tests.harness import on_ranks, run_ranks
from tests.parallel.pipe.support import VOCABULARY, config, engine_of, layers, loss_fn

# The distributed loader, endless repetition, and the helpers around batches.


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


# States of Accelerate's stateful loaders at other batch sizes, and which orders can be continued.


def test_the_same_sample_in_batches_of_another_size():
    assert _batches_at(6, 8, 16) == (3, "") and _batches_at(3, 16, 8) == (6, "")
    count, reason = _batches_at(5, 8, 16)
    assert count == 2 and reason == "8 samples are repeated, as 40 samples are not a multiple of a batch of 16"
    assert _batches_at(5, None, 16)[0] == 5 and "an order of its own" in _batches_at(5, None, 16)[1]


def test_a_state_with_another_count():
    alone = {"_num_yielded": 4, "_sampler_iter_yielded": 4, "_iterator_finished": False}
    assert _with_batches(alone, 2) == {"_num_yielded": 2, "_sampler_iter_yielded": 2, "_iterator_finished": False}
    main = {"_num_workers": 2, "_sampler_iter_yielded": 4, "_base_seed": 1}
    snapshot = {"_snapshot_step": 4, "_last_yielded_worker_id": 1, "_main_snapshot": main, "_worker_snapshots": {}}
    workers = {"_snapshot": snapshot, "_steps_since_snapshot": 1}
    assert _with_batches(workers, 5) is workers
    found = _with_batches(workers, 3)
    assert found["_steps_since_snapshot"] == 0 and found["_snapshot"]["_snapshot_step"] == 3
    assert found["_snapshot"]["_last_yielded_worker_id"] == 0  # the third of two workers' batches is the first one's
    assert found["_snapshot"]["_main_snapshot"] == {**main, "_sampler_iter_yielded": 3}
    assert snapshot["_snapshot_step"] == 4 and main["_sampler_iter_yielded"] == 4


def _loader(generator=None):
    return SimpleNamespace(batch_sampler=BatchSampler(RandomSampler(range(24), generator=generator), 2, False))


def test_a_generator_continues_on_any_number_of_ranks():
    generator = torch.Generator().manual_seed(3)
    expected = list(RandomSampler(range(24), generator=torch.Generator().manual_seed(3)))
    for loader in (_loader(), _loader(torch.Generator())):
        assert _restore_order(loader, {"generator": generator.get_state()}, is_end=False) == ""
        assert list(loader.batch_sampler.sampler) == expected


@pytest.mark.parametrize("order", [{"random": torch.get_rng_state(), "is_begun": False}, {"generator": None}])
def test_an_order_that_one_rank_has_drawn_is_not_continued_on_several(order):
    loader = _loader(torch.Generator())
    assert "use_seedable_sampler=True" in _restore_order(loader, order, is_end=False)
    assert _restore_order(loader, order, is_end=True) == ""  # the next pass is drawn anew


def test_the_state_before_a_pass_that_workers_have_begun():
    generator = torch.Generator().manual_seed(3)
    before, sampler = generator.get_state(), RandomSampler(range(24), generator=generator)
    next(iter(sampler))
    assert torch.equal(_before_first(sampler), before)
    list(sampler)
    assert _before_first(sampler) is None  # not the first pass of the generator


# Curricula with pipelines: lengths by the batch function, samples by the configured sampler.


COUNT = 30


class Pairs(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.full((6,), number % VOCABULARY)
        return tokens, tokens


RANDOM_LTD = {
    "enabled": True,
    "data_routing": {
        "enabled": True,
        "random_ltd": {
            "enabled": True,
            "total_layer_num": 4,
            "random_ltd_layer_num": 1,
            "random_ltd_layer_id": [1],
            "random_ltd_schedule": {
                "min_value": 2,
                "max_value": 4,
                "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 4, "seq_per_step": 1},
            },
        },
    },
}


@on_ranks(2)
def test_the_batch_function_cuts():
    engine = engine_of(2, 1, 2, {"curriculum_learning": SECTION})
    seen = []

    def cut(item):
        length = engine.curriculum_scheduler_legacy.get_current_difficulty()
        seen.append(length)
        return shortened(item, length)

    engine.set_batch_fn(cut)
    tokens = torch.zeros(2, 12, dtype=torch.long)
    for _ in range(4):
        engine.train_batch(iter([(tokens, tokens)] * 2))
    for name, section in (
        ("progressive_layer_drop", {"progressive_layer_drop": {"enabled": True}}),
        ("data_efficiency.data_routing.random_ltd", {"data_efficiency": RANDOM_LTD}),
    ):
        with pytest.raises(DeepSpeedConfigError, match=f"{name} with a PipelineModule"):
            engine_of(2, 1, 2, section)
    assert seen == [2, 2, 4, 4, 4, 4, 6, 6]


def _samples(metric):
    learning = {"enabled": True, "curriculum_metrics": {"number": metric}}
    efficiency = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}

    def started():
        torch.manual_seed(3)
        module = PipelineModule(layers(), num_stages=2, loss_fn=loss_fn)
        whole = config(1, 2, data_efficiency=efficiency)
        return deepspeed.initialize(model=module, training_data=Pairs(), config=whole)[0]

    engine = started()
    for _ in range(2):
        engine.train_batch()
    state = engine.training_dataloader.sampler_state()
    for _ in range(2):
        engine.train_batch()
    again = started()
    again.training_dataloader.load_sampler_state(state)  # as loading a checkpoint does
    for _ in range(2):
        again.train_batch()
    assert again.training_dataloader.sampler_state() == engine.training_dataloader.sampler_state()
    states = [None] * 2
    dist.all_gather_object(states, engine.training_dataloader.sampler_state())
    assert states[0] == states[1], "both stages see the same samples"
    expected = DeepSpeedDataSampler(efficiency, COUNT, 2, 0, 1, None, 2)
    batches = iter(expected)
    for _ in range(8):
        next(batches)
    return states[0] == expected.state_dict()


def test_all_stages_see_the_samples_that_the_curriculum_allows(tmp_path):
    write_dataset(tmp_path / "samples", numpy.arange(COUNT), numpy.ones(COUNT, int))
    write_dataset(tmp_path / "values", numpy.arange(1, COUNT + 1), numpy.ones(COUNT, int))
    metric = {
        "index_to_sample_path": str(tmp_path / "samples"),
        "index_to_metric_path": str(tmp_path / "values"),
        "difficulty_type": "value",
        "min_difficulty": 4,
        "max_difficulty": COUNT,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 6, "difficulty_step": 2},
    }
    assert run_ranks(_samples, 2, metric) == [True, True]
