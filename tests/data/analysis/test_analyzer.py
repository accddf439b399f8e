"""The analyzers: what each sample measures ends in the index files, whoever has looked at it."""

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from deepspeed.data.analysis import DataAnalyzer, DistributedDataAnalyzer
from deepspeed.data.curriculum import DeepSpeedDataSampler
from deepspeed.data.indexed import MMapIndexedDataset
from deepspeed.errors import NotYetSupportedError
from tests.harness import on_ranks, run_ranks

COUNT = 23
LENGTHS = [3 + number * 5 % 7 for number in range(COUNT)]


class Texts(Dataset):
    """Samples as mappings with several fields, as tuples, or with numbers of their own."""

    def __init__(self, kind: str = "mapping") -> None:
        self.kind = kind

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, number: int):
        tokens = torch.zeros(10, dtype=torch.long)
        tokens[: LENGTHS[number]] = 1 + number % 3
        if self.kind == "tuple":
            return tokens, tokens, tokens
        sample = {"tokens": tokens, "mask": tokens > 0, "labels": tokens}
        return {**sample, "index": torch.tensor([COUNT - 1 - number])} if self.kind == "own numbers" else sample


def _tokens(batch):
    return batch[0] if isinstance(batch, (tuple, list)) else batch["tokens"]


def length(batch):
    return (_tokens(batch) > 0).sum(dim=1)


def counts(batch):
    return torch.bincount(_tokens(batch).view(-1), minlength=4)


METRICS = {
    "metric_names": ["length", "tokens"],
    "metric_functions": [length, counts],
    "metric_types": ["single_value_per_sample", "accumulate_value_over_samples"],
}


def check(folder, lengths=LENGTHS):
    def rows(name):
        return [row.tolist() for row in MMapIndexedDataset(folder / "length" / f"length_{name}")[:]]

    distinct = sorted(set(lengths))
    by_length = [[number for number, each in enumerate(lengths) if each == value] for value in distinct]
    assert rows("sample_to_metric") == [[each] for each in lengths]
    assert rows("index_to_metric") == [[value] for value in distinct]
    assert rows("index_to_sample") == by_length == rows("index_to_sample_percentile_merged")
    sums = MMapIndexedDataset(folder / "tokens" / "tokens_metric_value")
    expected = sum(torch.bincount(_tokens(Texts()[number]), minlength=4) for number in range(COUNT))
    assert len(sums) == 1 and sums[0].tolist() == expected.tolist()
    assert MMapIndexedDataset(folder / "length" / "length_index_to_sample").dtype == numpy.uint8


@pytest.mark.parametrize("kind", ["mapping", "tuple"])
@pytest.mark.parametrize(("workers", "threads", "batch"), [(1, 1, 1), (1, 3, 4), (3, 2, 5)])
def test_parts_of_any_number_give_the_same_files(kind, workers, threads, batch, tmp_path):
    made = [
        DataAnalyzer(Texts(kind), workers, worker, threads, batch_size=batch, save_path=tmp_path, **METRICS)
        for worker in range(workers)
    ]
    for analyzer in made[1:]:
        analyzer.run_map()
    if workers > 1:
        with pytest.raises(FileNotFoundError, match="6 parts of the metric length, but 2 are missing .*worker0_th"):
            made[0].run_reduce()
    made[0].run_map_reduce()
    check(tmp_path)
    assert (tmp_path / "length" / f"worker{workers - 1}_thread{threads - 1}").is_dir()


def test_specific_threads(tmp_path):
    for threads in ([1], [0, 2]):
        DataAnalyzer(
            Texts(), num_threads=3, specific_threads=threads, batch_size=4, save_path=tmp_path, **METRICS
        ).run_map()
    DataAnalyzer(Texts(), num_threads=3, num_threads_reduce=2, save_path=tmp_path, **METRICS).run_reduce()
    check(tmp_path)


def test_samples_with_numbers_of_their_own(tmp_path):
    DataAnalyzer(Texts("own numbers"), batch_size=4, save_path=tmp_path / "a", **METRICS).run_map_reduce()
    check(tmp_path / "a", LENGTHS[::-1])
    numbers = list(range(COUNT))[::-1]
    DataAnalyzer(Texts(), batch_size=4, save_path=tmp_path / "b", sample_indices=numbers, **METRICS).run_map_reduce()
    check(tmp_path / "b", LENGTHS[::-1])


def test_many_values_are_merged_to_about_a_hundred_rows(tmp_path):
    values = torch.randperm(250, generator=torch.Generator().manual_seed(0)) * 300
    DataAnalyzer(
        values,
        batch_size=16,
        save_path=tmp_path,
        metric_names=["value"],
        metric_functions=[lambda batch: batch - 5],
        metric_types=["single_value_per_sample"],
    ).run_map_reduce()
    merged = MMapIndexedDataset(tmp_path / "value" / "value_index_to_sample_percentile_merged")
    assert len(merged) == 125 and set(merged.sizes.tolist()) == {2}
    assert merged.values.tolist() == values.argsort().tolist()
    assert MMapIndexedDataset(tmp_path / "value" / "value_index_to_metric").dtype == numpy.int32


def _together(folder):
    DistributedDataAnalyzer(Texts(), batch_size=4, save_path=folder / "memory", **METRICS).run_map_reduce()
    import torch.distributed as dist

    DataAnalyzer(
        Texts(), dist.get_world_size(), dist.get_rank(), batch_size=4, save_path=folder / "files", **METRICS
    ).run_map_reduce()
    with pytest.raises((ValueError, RuntimeError), match="metric length: its function gave 4 values for a batch of 3"):
        bad = {**METRICS, "metric_functions": [lambda batch: length(batch)[:4].repeat(2)[:4], counts]}
        DistributedDataAnalyzer(Texts(), batch_size=4, save_path=folder / "bad", **bad).run_map_reduce()


@on_ranks(2)
def test_a_failure_of_one_rank_is_raised_on_all(tmp_path):
    folder = tmp_path
    import torch.distributed as dist

    def failing(batch):
        if dist.get_rank() == 1:
            raise OSError("no such disk")
        return length(batch)

    expected = (
        (RuntimeError, "rank 1 could not continue: .*no such disk") if dist.get_rank() == 0 else (OSError, "disk")
    )
    metrics = {**METRICS, "metric_functions": [failing, counts]}
    analyzer = DataAnalyzer(Texts(), 2, dist.get_rank(), batch_size=4, save_path=folder, **metrics)
    with pytest.raises(expected[0], match=expected[1]):
        analyzer.run_map_reduce()


def test_the_ranks_of_a_job(tmp_path):
    run_ranks(_together, 2, tmp_path)
    check(tmp_path / "memory")
    check(tmp_path / "files")


def _alone(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepspeed.comm.all_gather_object", None)  # a call would fail
        _together(folder)


def test_a_job_of_one_rank_gathers_nothing(tmp_path):
    run_ranks(_alone, 1, tmp_path)
    check(tmp_path / "memory")
    check(tmp_path / "files")


def test_what_comes_out_feeds_a_curriculum(tmp_path):
    DataAnalyzer(Texts(), save_path=tmp_path, **METRICS).run_map_reduce()
    metric = {
        "index_to_sample_path": f"{tmp_path}/length/length_index_to_sample",
        "index_to_metric_path": f"{tmp_path}/length/length_index_to_metric",
        "difficulty_type": "value",
        "min_difficulty": 5,
        "max_difficulty": 9,
        "schedule_type": "fixed_discrete",
        "schedule_config": {"difficulty": [5, 9], "max_step": [10]},
    }
    learning = {"enabled": True, "curriculum_metrics": {"length": metric}}
    config = {"enabled": True, "data_sampling": {"enabled": True, "curriculum_learning": learning}}
    batches = iter(DeepSpeedDataSampler(config, COUNT, 4, 0, 1))
    easy = {number for _ in range(10) for number in next(batches)}
    assert easy == {number for number in range(COUNT) if LENGTHS[number] <= 5}


def test_what_is_wrong_is_named(tmp_path):
    with pytest.raises(ValueError, match="expected equal lengths, found 1, 2 and 2"):
        DataAnalyzer(Texts(), **{**METRICS, "metric_names": ["one"]})
    with pytest.raises(ValueError, match="metric length: metric_type: .* found 'mean'"):
        DataAnalyzer(Texts(), **{**METRICS, "metric_types": ["mean", "mean"]})
    with pytest.raises(NotYetSupportedError, match="use a metric function"):
        DataAnalyzer(Texts(), custom_reduce=print)
    halves = {**METRICS, "metric_functions": [lambda batch: length(batch) / 2, counts]}
    with pytest.raises(ValueError, match="expected integers from its function, found float32"):
        DataAnalyzer(Texts(), save_path=tmp_path, **halves).run_map()
    with pytest.raises(ValueError, match="sample 1 was analyzed more than once"):
        DataAnalyzer(Texts(), save_path=tmp_path, sample_indices=[1] * COUNT, **METRICS).run_map_reduce()


def test_a_sum_of_numbers(tmp_path):
    total = {"metric_names": ["total"], "metric_functions": [lambda batch: length(batch).sum()]}
    DataAnalyzer(Texts(), save_path=tmp_path, metric_types=["accumulate_value_over_samples"], **total).run_map_reduce()
    assert MMapIndexedDataset(tmp_path / "total" / "total_metric_value")[0].tolist() == [sum(LENGTHS)]
