"""``ds_elastic``: batches that many numbers of ranks can share."""

import json
import time

import pytest

from deepspeed.cli import elastic
from deepspeed.cli.elastic import best_batch
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.errors import DeepSpeedConfigError, ElasticityIncompatibleWorldSize


def brute_force(total, section):
    """For each number of ranks the largest micro-batch that divides its share."""
    found = {}
    for ranks in range(section.min_gpus, min(section.max_gpus, total) + 1):
        fits = [micro for micro in section.micro_batch_sizes if total % (micro * ranks) == 0]
        if fits:
            found[ranks] = max(fits)
    return found


@pytest.mark.parametrize("larger", [True, False])
def test_no_batch_suits_more_numbers_of_ranks(larger):
    section = Elasticity(
        max_train_batch_size=120, micro_batch_sizes=[2, 3, 7], min_gpus=2, max_gpus=30, prefer_larger_batch=larger
    )
    best = best_batch(section)
    counts = {total: len(brute_force(total, section)) for total in range(1, 121)}
    equal = [total for total, count in counts.items() if count == max(counts.values())]
    assert best.train_batch_size == (max(equal) if larger else min(equal))
    assert best.micro_batch_size == brute_force(best.train_batch_size, section)


def test_a_large_batch_is_found_quickly():
    section = Elasticity(max_train_batch_size=10**6, micro_batch_sizes=[2, 4, 6, 9], min_gpus=8, max_gpus=1024)
    start = time.process_time()
    best = best_batch(section)
    assert time.process_time() - start < 2
    assert best.micro_batch_size == brute_force(best.train_batch_size, section) and len(best.micro_batch_size) > 80


def test_micro_batches_that_others_divide_change_nothing():
    plain = Elasticity(max_train_batch_size=500, micro_batch_sizes=[2, 3], max_gpus=50)
    more = Elasticity(max_train_batch_size=500, micro_batch_sizes=[2, 3, 4, 6, 9], max_gpus=50)
    assert best_batch(plain).train_batch_size == best_batch(more).train_batch_size
    assert list(best_batch(plain).micro_batch_size) == list(best_batch(more).micro_batch_size)


@pytest.mark.parametrize("values", [{"max_train_batch_size": 10**8}, {"max_gpus": 10**20}])
def test_a_search_that_would_take_hours_ends_in_a_sentence(values):
    section = Elasticity(**{"max_train_batch_size": 10**7, "micro_batch_sizes": [1], **values})
    with pytest.raises(DeepSpeedConfigError, match="--search: expected .* up to .*, found .*; lower .* or leave"):
        best_batch(section)


def test_the_command(tmp_path, capsys):
    path = tmp_path / "ds.json"
    section = {"enabled": True, "version": 0.1, "max_train_batch_size": 64, "micro_batch_sizes": [1, 2, 4]}
    path.write_text(json.dumps({"elasticity": {**section, "max_gpus": 16}}))
    elastic.main(["-c", str(path), "-w", "5", "--search"])
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") : out.index("}") + 1]) == {**section, "max_gpus": 16}
    assert out[out.index("final") :].splitlines() == [
        "final_batch_size .... 60",
        "valid_gpus .......... [1, 2, 3, 4, 5, 6, 10, 12, 15]",
        "micro_batch_size .... 4",
        "",
        "train_batch_size: 60",
        "numbers of ranks that can share it: 1, 2, 3, 4, 5, 6, 10, 12, 15",
        "with 5 ranks: train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 3",
    ]
    elastic.main(["-c", str(path)])
    assert "micro_batch_size ." not in capsys.readouterr().out
    with pytest.raises(ElasticityIncompatibleWorldSize, match="8 data-parallel ranks cannot share"):
        elastic.main(["-c", str(path), "-w", "8"])
    path.write_text("{}")
    with pytest.raises(DeepSpeedConfigError, match="expected a section 'elasticity'"):
        elastic.main(["-c", str(path)])


def test_an_impossible_range():
    with pytest.raises(DeepSpeedConfigError, match="no batch up to max_train_batch_size 4"):
        best_batch(Elasticity(max_train_batch_size=4, micro_batch_sizes=[2], min_gpus=3, max_gpus=9))
