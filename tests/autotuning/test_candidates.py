"""Which configurations are looked at."""

from __future__ import annotations

import pytest

from deepspeed.autotuning.candidates import BLOCKS, BatchLimits, CandidateSpace
from deepspeed.autotuning.experiment import applied, split_choices
from deepspeed.errors import DeepSpeedConfigError


def space(config, total=24, ranks=2, only=None, offloads=True, limits=None):
    base, choices = split_choices(config)
    return CandidateSpace(base, choices, limits or BatchLimits(total), ranks, only, offloads=offloads)


def test_every_candidate_has_the_same_global_batch():
    found = space({"train_batch_size": 24})
    seen = set()
    for setting in found.settings():
        for micro in found.micro_batches(setting):
            changes = found.changes(setting, micro)
            assert changes["train_batch_size"] == 24 == 2 * micro * changes["gradient_accumulation_steps"]
            seen.add((setting.stage, micro))
    assert seen == {(stage, micro) for stage in range(4) for micro in (1, 2, 3, 4, 6, 12)}


def test_what_is_written_stays_and_lists_are_candidates():
    assert [s.stage for s in space({"zero_optimization": {"stage": 2}}).settings()] == [2]
    assert [s.stage for s in space({"zero_optimization": {"stage": [1, 3]}}).settings()] == [1, 3]
    assert [s.stage for s in space({"zero_optimization": {"stage": "all"}}).settings()] == [0, 1, 2, 3]
    listed = space({"zero_optimization": {"stage": 2, "reduce_bucket_size": [1000, 2000]}}).settings()
    assert [s.changes["zero_optimization.reduce_bucket_size"] for s in listed] == [1000, 2000]
    found = space({"train_micro_batch_size_per_gpu": [2, 5, 6]})
    assert found.micro_batches(found.settings()[0]) == [6, 2]  # 5 does not divide 12 samples


def test_axes_in_lists_take_ranks_from_the_batch():
    found = space({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": [1, 2]}}, total=8, ranks=4)
    plain, cut = found.settings()
    assert found.micro_batches(plain) == [2, 1] and found.micro_batches(cut) == [4, 2, 1]
    assert found.name(cut, 4) == "z1_gas1_tmbspg4_tp2"


def test_what_needs_less_memory_is_recomputation_and_offload():
    found = space({"zero_optimization": {"stage": 3}})
    (setting,) = found.settings()
    relieved = found.relieved(setting)
    assert [other.words for other in relieved] == [("recompute",), ("offload",), ("recompute", "offload")]
    assert relieved[2].changes["zero_optimization.offload_param"] == {"device": "cpu"}
    assert relieved[2].changes[BLOCKS] is True
    assert [o.words for o in space({"zero_optimization": {"stage": 0}}).relieved(setting)] != []
    on_host = space({"zero_optimization": {"stage": 3}}, offloads=False)
    assert [other.words for other in on_host.relieved(setting)] == [("recompute",)]


def test_bucket_sizes_that_are_written_are_not_refined():
    found = space({"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 7}})
    assert found.refined(found.settings()[0]) == []
    assert len(space({"zero_optimization": {"stage": 2}}).refined(found.settings()[0])) == 5


def test_a_batch_that_ranks_cannot_share_is_refused():
    found = space({}, total=5)
    with pytest.raises(DeepSpeedConfigError, match="expected a multiple of the 2 data-parallel ranks"):
        found.micro_batches(found.settings()[0])
    tight = space({}, total=10, limits=BatchLimits(10, least=2, most=4))
    with pytest.raises(DeepSpeedConfigError, match="none of the micro-batch sizes to try divides the 5 samples"):
        tight.micro_batches(tight.settings()[0])


def test_changes_leave_the_rest_of_a_configuration_alone():
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "autotuning": {"enabled": True}}
    made = applied(
        config, {"zero_optimization.offload_param": None, "fp16.enabled": True, "zero_optimization.stage": 1}
    )
    assert made == {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True}}
    assert config["zero_optimization"]["stage"] == 3
    lists = {
        "zero_optimization": {"stage": "auto", "leaf_module": {"classes": ["A"]}, "ignore_unused_parameters": True}
    }
    base, choices = split_choices(lists)
    assert base == lists and choices == {"zero_optimization.stage": []}
