"""Param groups of ranks that have different ones: merged by their values, given back by their parameters."""

from typing import Any

import torch
from torch import nn

from deepspeed.checkpoint.param_groups import GroupChoice, RankGroups, join_groups, merge_groups, schedule_for
from deepspeed.checkpoint.upstream.pipeline import _names_by_stage


def rank(*rates: float, schedule: dict[str, Any] | None = None) -> RankGroups:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return RankGroups.of(torch.optim.SGD(groups), schedule)


def merged_names(*ranks: tuple[RankGroups, list[list[str]]]) -> list[tuple[float, list[str]]]:
    return [(group["lr"], group["params"]) for group in merge_groups(ranks, None).groups]


def test_equal_groups_of_two_ranks_are_one():
    found = merged_names((rank(0.1, 0.2), [["a"], ["b"]]), (rank(0.1, 0.2), [["c"], ["d"]]))
    assert found == [(0.1, ["a", "c"]), (0.2, ["b", "d"])]


def test_groups_with_other_values_stay_apart():
    found = merged_names((rank(0.1), [["a"]]), (rank(0.3, 0.1), [["b"], ["c"]]))
    assert found == [(0.1, ["a", "c"]), (0.3, ["b"])]


def test_equal_groups_of_one_rank_stay_apart():
    found = merged_names((rank(0.1, 0.1), [["a"], ["b"]]), (rank(0.1, 0.1), [["c"], ["d"]]))
    assert found == [(0.1, ["a", "c"]), (0.1, ["b", "d"])]


def test_the_group_of_the_same_number_goes_first():
    found = merged_names((rank(0.1, 0.1), [["a"], ["b"]]), (rank(0.3, 0.1), [["c"], ["d"]]))
    assert found == [(0.1, ["a"]), (0.1, ["b", "d"]), (0.3, ["c"])]


def test_a_group_without_parameters_is_kept_of_the_first_rank_only():
    assert merged_names((rank(0.1), [[]]), (rank(0.2), [[]]), (rank(0.3), [["a"]])) == [(0.1, []), (0.3, ["a"])]


def test_a_parameter_cut_over_ranks_with_other_values_is_named(caplog):
    found = merged_names((rank(0.1), [["a"]]), (rank(0.3), [["a", "b"]]))
    assert found == [(0.1, ["a"]), (0.3, ["b"])] and "'a'" in caplog.text


def test_groups_that_a_schedule_will_part_are_not_one():
    """At the start of a warm-up the current learning rates are equal, the ``base_lrs`` of the schedulers are not."""
    first, second = ({"base_lrs": [base], "_schedulers": [{"_last_lr": [base]}]} for base in (0.1, 0.3))
    held = merge_groups([(rank(0.0, schedule=first), [["a"]]), (rank(0.0, schedule=second), [["b"]])], first)
    assert [group["params"] for group in held.groups] == [["a"], ["b"]]
    assert held.schedule == {"base_lrs": [0.1, 0.3], "_schedulers": [{"_last_lr": [0.1, 0.3]}]}
    mine = {"base_lrs": [7.0, 8.0], "_schedulers": [{"_last_lr": [7.0, 8.0]}]}
    chosen = schedule_for(held.schedule, mine, 2, [GroupChoice(1, [1]), GroupChoice(None, [])])
    assert chosen == {"base_lrs": [0.3, 8.0], "_schedulers": [{"_last_lr": [0.3, 8.0]}]}


def test_stages_of_the_original_package_are_joined_alike():
    groups = [{"lr": 0.1, "params": ["a"]}]
    join_groups(groups, [{"lr": 0.3, "params": ["b"]}, {"lr": 0.1, "params": ["c", "a"]}])
    assert groups == [{"lr": 0.1, "params": ["a", "c"]}, {"lr": 0.3, "params": ["b"]}]


def test_stages_of_the_original_package_may_have_fewer_groups():
    optimizers = [{"param_groups": [{"params": [0]}, {"params": [1]}]}, {"param_groups": [{"params": [0]}]}]
    found = _names_by_stage(optimizers, ["0.", "1."], [["0.weight", "1.weight"], ["0.bias"]])
    assert found == [[["0.weight"], ["0.bias"]], [["1.weight"]]]
