"""The sampler of curricula: what it allows when, alike on all ranks, and going on where it was."""

from collections import Counter

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from deepspeed.data import DeepSpeedDataLoader
from deepspeed.data.curriculum import DeepSpeedDataSampler
from deepspeed.data.indexed import write_dataset
from deepspeed.engine import initialize
from deepspeed.errors import DeepSpeedConfigError
from tests.engine.support import adamw
from tests.harness import run_ranks
from tests.zero.reading import full_params

COUNT = 60
VALUES = [(7 * number) % 20 + 1 for number in range(COUNT)]  # 1 to 20, three times each


def index(folder, name="length", values=VALUES):
    """Index files as the analysis writes them."""
    distinct = sorted(set(values))
    rows = [[number for number, value in enumerate(values) if value == each] for each in distinct]
    sizes = numpy.array([len(row) for row in rows])
    write_dataset(folder / f"{name}_samples", numpy.array(sum(rows, []), dtype=numpy.uint8), sizes)
    write_dataset(folder / f"{name}_values", numpy.array(distinct, dtype=numpy.uint8), numpy.ones(len(distinct), int))
    return {
        "index_to_sample_path": str(folder / f"{name}_samples"),
        "index_to_metric_path": str(folder / f"{name}_values"),
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": 4,
        "max_difficulty": 20,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 8, "difficulty_step": 2},
    }


def section(metrics, **sampling):
    learning = {"enabled": True, "curriculum_metrics": metrics}
    return {
        "enabled": True,
        "seed": 5,
        "data_sampling": {"enabled": True, "num_epochs": 20, "curriculum_learning": learning, **sampling},
    }


def samplers(config, ranks=2, micro=3, accumulation=2, **options):
    return [
        DeepSpeedDataSampler(config, COUNT, micro, rank, ranks, None, accumulation, rank, **options)
        for rank in range(ranks)
    ]


def take(iterators, count):
    return [[next(iterator) for iterator in iterators] for _ in range(count)]


def test_difficulty_grows_by_global_batch(tmp_path):
    ranks = samplers(section({"length": index(tmp_path)}))
    iterators = [iter(sampler) for sampler in ranks]
    seen = set()
    for step in range(1, 12):
        limit = min(4 + 2 * step, 20)
        batch = [number for micro in take(iterators, 2) for share in micro for number in share]
        assert len(batch) == 12 and max(VALUES[number] for number in batch) <= limit
        assert all(sampler.current_difficulties == {"length": limit} for sampler in ranks)
        assert ranks[0].state_dict() == ranks[1].state_dict()
        seen.update(VALUES[number] for number in batch)
    assert ranks[0].consumed_samples == 132 and ranks[0].curriculum_step == 11 and max(seen) == 20


def test_ranks_share_what_one_rank_would_draw(tmp_path):
    config = section({"length": index(tmp_path)})
    (alone,) = samplers(config, ranks=1, micro=6)
    two = [iter(sampler) for sampler in samplers(config)]
    whole = iter(alone)
    for _ in range(30):
        assert [number for share in take(two, 1)[0] for number in share] == next(whole)


def test_a_cluster_is_used_up_before_it_repeats():
    (sampler,) = samplers({"enabled": True, "data_sampling": {"enabled": True}}, ranks=1, micro=7, accumulation=1)
    batches = iter(sampler)
    passes = [[number for _ in range(60) for number in next(batches)] for _ in range(2)]  # seven passes each
    assert all(set(Counter(drawn).values()) == {7} for drawn in passes)
    assert passes[0][:60] != passes[1][:60] and passes[0][:60] != passes[0][60:120]


def test_small_clusters_never_run_short(tmp_path):
    metric = {**index(tmp_path), "min_difficulty": 1, "schedule_type": "fixed_discrete"}
    metric["schedule_config"] = {"difficulty": [1, 20], "max_step": [5]}
    (sampler,) = samplers(section({"length": metric}), ranks=1, micro=20, accumulation=3)
    batches = iter(sampler)
    drawn = [number for _ in range(3) for number in next(batches)]
    assert Counter(drawn) == dict.fromkeys([n for n, value in enumerate(VALUES) if value == 1], 20)


def test_the_end():
    small = {"enabled": True, "data_sampling": {"enabled": True, "num_epochs": 2}}
    for drop_last, micro_batches in ((True, 17), (False, 18)):
        for sampler in samplers(small, ranks=1, micro=7, accumulation=1, drop_last=drop_last):
            batches = list(sampler)
            assert len(batches) == len(sampler) == micro_batches and {len(batch) for batch in batches} == {7}
            assert list(sampler) == []


def test_percentiles(tmp_path):
    metric = {**index(tmp_path), "difficulty_type": "percentile", "max_difficulty": 10, "min_difficulty": 1}
    del metric["index_to_metric_path"]
    metric["schedule_config"] = {"difficulty": [1, 5, 10], "max_step": [3, 6]}
    metric["schedule_type"] = "fixed_discrete"
    (sampler,) = samplers(section({"length": metric}), ranks=1, micro=10, accumulation=6)
    batches = iter(sampler)
    for limit, steps in ((2, 3), (10, 3), (20, 1)):
        drawn = [number for _ in range(6 * steps) for number in next(batches)]
        assert max(VALUES[number] for number in drawn) == limit


def test_fewer_samples_than_percentiles(tmp_path):
    metric = {**index(tmp_path), "difficulty_type": "percentile", "max_difficulty": 2 * COUNT, "min_difficulty": 1}
    (sampler,) = samplers(section({"length": metric}), ranks=1, micro=1, accumulation=1)
    with pytest.raises(ValueError, match=f"easiest sample: percentile {2 * COUNT}, since {COUNT} samples are too few"):
        next(iter(sampler))


def test_several_metrics_intersect(tmp_path):
    other = [number % 10 for number in range(COUNT)]
    metrics = {
        "length": index(tmp_path),
        "rarity": {**index(tmp_path, "rarity", other), "min_difficulty": 2, "max_difficulty": 9},
        "cut": {
            "clustering_type": "single_cluster",
            "min_difficulty": 1,
            "max_difficulty": 9,
            "schedule_type": "custom",
        },
    }
    (sampler,) = samplers(section(metrics), ranks=1, micro=12, accumulation=1)
    sampler.set_custom_curriculum_learning_schedule({"cut": lambda step: step})
    with pytest.raises(ValueError, match="expected one of the metrics length, rarity, cut; found 'width'"):
        sampler.set_custom_curriculum_learning_schedule({"width": lambda step: step})
    drawn: Counter[int] = Counter()
    batches = iter(sampler)
    for step in range(1, 60):
        batch = next(batches)
        now = sampler.current_difficulties
        assert now["cut"] == step
        assert all(VALUES[number] <= now["length"] and other[number] <= now["rarity"] for number in batch)
        drawn.update(batch)
    assert set(drawn) == set(range(COUNT)), "in the end all are allowed"


def test_a_state_continues_bit_for_bit_and_on_other_ranks(tmp_path):
    config = section({"length": index(tmp_path)})
    ranks = samplers(config)
    iterators = [iter(sampler) for sampler in ranks]
    take(iterators, 9)  # in the middle of a global batch
    state = torch.load(_saved(tmp_path, ranks[0].state_dict()), weights_only=True)
    rest = take(iterators, 30)
    again = samplers(config)
    for sampler in again:
        sampler.load_state_dict(state)
    assert take([iter(sampler) for sampler in again], 30) == rest
    three = samplers(config, ranks=3, micro=2)
    for sampler in three:
        sampler.load_state_dict(state)
    shares = take([iter(sampler) for sampler in three], 30)
    assert _flat(shares) == _flat(rest)


def _flat(shares):
    return [number for micro in shares for share in micro for number in share]


def _saved(folder, state):
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def test_a_state_of_the_published_package(tmp_path):
    (sampler,) = samplers(section({"length": index(tmp_path)}), ranks=1)
    sampler.load_state_dict({"consumed_samples": 48, "curriculum_step": 4, "batch": [], "np_rng_state": ()})
    next(iter(sampler))
    assert sampler.curriculum_step == 5 and sampler.current_difficulties == {"length": 14}


class Numbers(Dataset):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([float(number), float(VALUES[number])])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_reads_ahead(workers, tmp_path):
    config = section({"length": index(tmp_path)})

    def loader():
        return DeepSpeedDataLoader(Numbers(), 3, data_sampler=samplers(config)[1], num_local_io_workers=workers)

    first = loader()
    seen = []
    first.post_process_func = lambda batch, state: (seen.append(state["current_difficulties"]["length"]), batch)[1]
    iterator = iter(first)
    before = [next(iterator) for _ in range(5)]
    assert seen == [6, 6, 8, 8, 10] and all(
        batch[:, 1].max() <= limit for batch, limit in zip(before, seen, strict=True)
    )
    state, position = first.sampler_state(), first.state_dict()
    rest = [next(iterator) for _ in range(8)]
    again = loader()
    again.load_sampler_state(state)
    again.load_state_dict(position)
    assert all(torch.equal(one, other) for one, other in zip(rest, again, strict=False))
    first.load_sampler_state(state)
    assert torch.equal(next(iter(first)), rest[0])
    assert torch.equal(next(iter(first)), rest[1]), "a pass that is left has read ahead; nothing is lost"


def _started(stage, accumulation, config):
    model = Line()
    full = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "data_efficiency": config,
    }
    return initialize(model=model, optimizer=adamw(model), training_data=Numbers(), config=full)[0]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(2, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x / 20).square().mean()


def _training(folder, config, stage):
    def trained(engine, loader, steps):
        for _ in range(2 * steps):
            engine.backward(engine(next(loader)))
            engine.step()

    engine = _started(stage, 2, config)
    assert engine.data_sampling_enabled() and engine.curriculum_learning_enabled() and not engine.random_ltd_enabled()
    batches = iter(engine.training_dataloader)
    trained(engine, batches, 3)
    engine.save_checkpoint(folder)
    trained(engine, batches, 3)
    again = _started(stage, 2, config)
    again.load_checkpoint(folder)
    trained(again, iter(again.training_dataloader), 3)
    a, b = full_params(engine), full_params(again)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert engine.training_dataloader.sampler_state() == again.training_dataloader.sampler_state()
    return engine.training_dataloader.sampler_state()["current_difficulties"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_training_is_bitwise_the_same(stage, tmp_path):
    metrics = {"length": index(tmp_path)}
    assert run_ranks(_training, 2, tmp_path / "saved", section(metrics), stage) == [{"length": 16}] * 2


def _resumed_alone(folder, config):
    engine = _started(1, 4, config)
    engine.load_checkpoint(folder)
    state = engine.training_dataloader.sampler_state()
    return state["consumed_samples"], state["current_difficulties"]


def test_another_number_of_ranks_continues(tmp_path):
    config = section({"length": index(tmp_path)})
    run_ranks(_training, 2, tmp_path / "saved", config, 1)
    assert run_ranks(_resumed_alone, 1, tmp_path / "saved", config) == [(24, {"length": 10})]


def test_what_is_wrong_is_named(tmp_path):
    metric = index(tmp_path)
    with pytest.raises(DeepSpeedConfigError, match="at least one metric is required"):
        samplers(section({}))
    with pytest.raises(DeepSpeedConfigError, match="length.index_to_sample_path: is required unless"):
        samplers(section({"length": {**metric, "index_to_sample_path": None}}))
    (none,) = samplers(section({"length": {**metric, "min_difficulty": 0, "schedule_type": "custom"}}), ranks=1)
    none.set_custom_curriculum_learning_schedule({"length": lambda step: 0})
    with pytest.raises(ValueError, match=r"allows no sample at length 0 \(the easiest sample: 1\); raise min_diff"):
        next(iter(none))
    few = DeepSpeedDataSampler(section({"length": metric}), 9, 2, 0, 1)
    with pytest.raises(ValueError, match="expected samples below 9, .* found "):
        next(iter(few))
    other = index(tmp_path, "other", [1, 2])
    wrong = {**metric, "index_to_metric_path": other["index_to_metric_path"]}
    with pytest.raises(ValueError, match="20 rows of samples in .* 2 values"):
        samplers(section({"length": wrong}))
