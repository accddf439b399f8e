"""One row per axis: the sets that follow from it, and that every part of the package reads the same row."""

from __future__ import annotations

import importlib

import pytest

from deepspeed import axes
from deepspeed.config.degrees import data_parallel_size, degrees
from deepspeed.config.sections.root import Root
from deepspeed.engine_feature import EngineFeature
from deepspeed.plan.degrees import DEGREES
from deepspeed.run_report import analysis


def test_what_ranks_divide_decides_every_set() -> None:
    assert axes.AXES == ("pipe", "data", "expert", "sequence", "tensor")
    assert axes.SAMPLES == ("data", "expert")
    assert axes.SAME_PART == ("data", "expert", "sequence")
    assert axes.SAME_EXPERTS == ("data", "sequence")
    assert axes.OTHER_PARTS == ("pipe", "tensor")
    assert axes.PARTS_OF_LAYERS == ("tensor",)
    assert axes.SAME_SAMPLES == ("pipe", "sequence", "tensor")
    assert set(axes.SAMPLES) | set(axes.SAME_SAMPLES) == set(axes.SAME_PART) | set(axes.OTHER_PARTS) == set(axes.AXES)


def test_no_name_means_two_axes() -> None:
    names = [name for row in axes.ROWS for name in (row.name, *row.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("row", axes.ROWS, ids=lambda row: row.name)
def test_a_row_has_what_others_read(row: axes.AxisRow) -> None:
    assert row.counts
    assert analysis._AXIS_ADVICE[row.name] == row.advice
    assert (row.option in DEGREES) == (row.option is not None)
    if row.feature is not None:
        assert isinstance(importlib.import_module(row.feature).FEATURE, EngineFeature)


@pytest.mark.parametrize(
    ("config", "axis"),
    [
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, axes.EXPERT),
        ({"sequence_parallel_size": 2}, axes.SEQUENCE),
        ({"tensor_parallel": {"autotp_size": 2}}, axes.TENSOR),
    ],
)
def test_the_key_of_a_row_requests_its_ranks(config: dict[str, object], axis: str) -> None:
    root = Root.model_validate(config)
    assert degrees(root) == {name: 2 if name == axis else 1 for name in axes.KEYS}
    assert data_parallel_size(root, 8) == (8 if axis in axes.SAMPLES else 4)
    assert data_parallel_size(root, 8, stages=2) == (4 if axis in axes.SAMPLES else 2)


def test_experts_that_are_switched_off_take_no_ranks() -> None:
    assert set(degrees(Root.model_validate({"expert_parallel": {"autoep_size": 4}})).values()) == {1}
