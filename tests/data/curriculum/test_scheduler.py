"""The published shapes of difficulty, against their reference values and a slow writing-out of the formula."""

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.data.curriculum import CurriculumScheduler, shortened
from deepspeed.data.curriculum.scheduler import grown


def scheduler(kind, low=2, high=10, **config):
    return CurriculumScheduler(
        {"min_difficulty": low, "max_difficulty": high, "schedule_type": kind, "schedule_config": config}
    )


def test_reference_values():
    linear = scheduler("fixed_linear", total_curriculum_step=8, difficulty_step=2)
    assert [linear.update_difficulty(step) for step in range(1, 11)] == [2, 4, 4, 6, 6, 8, 8, 10, 10, 10]
    discrete = scheduler("fixed_discrete", 1, 5, difficulty=[1, 2, 3, 4, 5], max_step=[2, 4, 6, 8])
    assert [discrete.update_difficulty(step) for step in range(1, 10)] == [1, 1, 2, 2, 3, 3, 4, 4, 5]
    root = scheduler("fixed_root", 0, 100, total_curriculum_step=100, difficulty_step=1, root_degree=2)
    assert [root.get_difficulty(step) for step in (0, 1, 4, 25, 81, 100, 400)] == [0, 10, 20, 50, 90, 100, 100]
    assert root.get_current_difficulty() == 0


@given(st.integers(0, 200), st.integers(0, 60), st.integers(0, 60), st.integers(1, 90), st.integers(1, 20))
def test_linear_growth_in_exact_numbers(step, low, more, steps, granularity):
    high = low + more
    exact = Fraction(step, steps) * (high - low) + low
    found = grown(step, low=low, high=high, steps=steps, granularity=granularity)
    multiples = {exact.__floor__() // granularity * granularity}
    if exact.denominator == 1:  # a float may lie just below
        multiples.add((exact.__floor__() - 1) // granularity * granularity)
    least = math.ceil(low / granularity) * granularity
    assert found in {min(max(value, least), high) for value in multiples}
    assert 0 < found or low == 0, "never a sequence of no token"


def test_a_custom_schedule_may_fall_again():
    custom = scheduler("custom")
    with pytest.raises(ValueError, match="set_custom_curriculum_learning_schedule"):
        custom.update_difficulty(1)
    custom.set_custom_get_difficulty(lambda step: 10 - step)
    assert [custom.update_difficulty(step) for step in range(3)] == [10, 9, 8]


def test_state():
    first, second = (scheduler("fixed_linear", total_curriculum_step=8, difficulty_step=2) for _ in range(2))
    first.update_difficulty(5)
    second.set_state(first.get_state())
    assert second.get_state() == first.get_state() and second.get_current_difficulty() == 6
    second.set_current_difficulty(4)
    assert second.get_current_difficulty() == 4


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match="total_curriculum_step is required.*difficulty_step is required"):
        scheduler("fixed_linear")
    with pytest.raises(ValueError, match="max_step expected one entry fewer"):
        scheduler("fixed_discrete", difficulty=[1, 2], max_step=[1, 2])
    with pytest.raises(ValueError, match="min_difficulty 5 is more than max_difficulty 2"):
        scheduler("custom", 5, 2)
    with pytest.raises(ValueError, match='"quadratic" is none of'):
        scheduler("quadratic")
    with pytest.raises(ValueError, match="max_difficulty is required"):
        CurriculumScheduler({"min_difficulty": 1, "schedule_type": "custom"})


def test_shortening():
    import torch

    tokens, flags = torch.arange(12).view(2, 6), torch.ones(2)
    cut = shortened({"tokens": tokens, "rest": (flags, [tokens, "text"])}, 4)
    assert cut["tokens"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]] and cut["tokens"].is_contiguous()
    assert cut["rest"][0] is flags and cut["rest"][1][0].shape == (2, 4) and cut["rest"][1][1] == "text"
    assert shortened(tokens, 99).shape == (2, 6)
