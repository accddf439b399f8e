"""States of Accelerate's stateful loaders at other batch sizes, and which orders can be continued."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler

from deepspeed.data.accelerate_loaders import _batches_at, _before_first, _restore_order, _with_batches


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
