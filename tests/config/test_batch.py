"""Batch arithmetic: every combination of the three keys, derived or refused with all numbers."""

import itertools
from typing import Any

import pytest

from deepspeed.config import BatchSizes, parse, resolve_batch
from deepspeed.errors import DeepSpeedConfigError
from tests.config.support import only_problem, problems

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def test_every_combination_against_the_rule() -> None:
    """Brute force: what resolves satisfies the product and keeps what was given; what does not has no solution."""
    for ranks, total, micro, steps in itertools.product(
        (1, 2, 3), (None, 1, 4, 6, 12), (None, 1, 2, 3), (None, 1, 2, 4)
    ):
        solutions = {
            BatchSizes(m * s * ranks, m, s)
            for m in range(1, 13)
            for s in range(1, 13)
            if total in (None, m * s * ranks) and micro in (None, m) and steps in (None, s)
        }
        if steps is None and (total is None or micro is None):
            solutions = {each for each in solutions if each.accumulation_steps == 1}
        try:
            assert resolve_batch(total, micro, steps, ranks) in solutions
        except DeepSpeedConfigError:
            assert not solutions or (total is None and micro is None)


def test_the_product_is_printed_with_all_numbers() -> None:
    text = only_problem({TOTAL: 30, MICRO: 4, STEPS: 2}, dp_world_size=4)
    for part in (
        f"{TOTAL}: 30",
        f"{MICRO} 4",
        f"{STEPS} 2",
        "data-parallel size 4",
        "32",
        "leave one of the three out",
    ):
        assert part in text


def test_messages_name_the_source_of_each_number(tmp_path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(f'{{\n  "{TOTAL}": 30,\n  "{MICRO}": 4,\n  "{STEPS}": "auto"\n}}')
    with pytest.raises(DeepSpeedConfigError) as raised:
        parse(str(path), dp_world_size=4)
    text = str(raised.value)
    assert "ds_config.json cannot be used" in text and "16 or 32 would fit" in text
    assert text.endswith(
        f"Where the numbers come from: {TOTAL} (line 2) is given as 30; {MICRO} (line 3) is given as 4; "
        f'{STEPS} is "auto"; the data-parallel size is the number of ranks that share the batch: 4'
    )
    assert f"{MICRO} is not given; {STEPS} is not given" in only_problem({TOTAL: 30}, batch=False, dp_world_size=4)


def test_ranks_that_accelerate_has_not_counted_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {TOTAL: 16, MICRO: 16, STEPS: 1}
    assert "on_cpu.py" not in only_problem(config, batch=False, dp_world_size=2)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert "Accelerate has counted one process" in only_problem(config, batch=False, dp_world_size=2)
    assert "on_cpu.py" not in only_problem({**config, TOTAL: 24}, batch=False, dp_world_size=2)


@pytest.mark.parametrize(
    ("config", "ranks", "fit"),
    [({TOTAL: 30, MICRO: 4}, 2, "24 or 32"), ({TOTAL: 30}, 4, "28 or 32"), ({TOTAL: 3, STEPS: 2}, 2, "4 would fit")],
)
def test_the_error_names_sizes_that_would_fit(config: dict[str, int], ranks: int, fit: str) -> None:
    assert fit in only_problem(config, batch=False, dp_world_size=ranks)


def test_without_the_number_of_ranks_only_impossible_products_are_refused() -> None:
    assert parse({TOTAL: 32, MICRO: 4, STEPS: 2}).batch is None
    assert "30 does not fit" in only_problem({TOTAL: 30, MICRO: 4, STEPS: 2})


def test_integral_floats_and_text() -> None:
    assert parse({TOTAL: "16", MICRO: 4.0}, dp_world_size=2).batch == BatchSizes(16, 4, 2)


@pytest.mark.parametrize("name", [TOTAL, MICRO, STEPS])
@pytest.mark.parametrize("value", [0, -1, "abc", 1.5, True])
def test_impossible_sizes_are_refused_by_name_once(name: str, value: Any) -> None:
    config = {TOTAL: 8, MICRO: 4, STEPS: 2, name: value}
    assert only_problem(config, batch=False).startswith(f"{name}: expected an integer > 0")


def test_accumulation_alone_or_nothing() -> None:
    assert f"{STEPS} alone does not determine" in only_problem({STEPS: 4}, batch=False)
    assert "set one of them" in only_problem({"fp16": {"enabled": True}}, batch=False)


def test_auto_is_derived_and_the_value_is_logged() -> None:
    parsed = parse({TOTAL: "auto", MICRO: 4, STEPS: "auto"}, dp_world_size=2)
    assert parsed.batch == BatchSizes(8, 4, 1)
    assert parsed.notices == [f'{TOTAL}: "auto" became 8', f'{STEPS}: "auto" became 1']


def test_auto_that_nothing_determines_is_refused_by_name() -> None:
    found = problems({TOTAL: "auto", MICRO: "auto", STEPS: "auto"}, batch=False, dp_world_size=2)
    assert [each.partition(":")[0] for each in found] == [TOTAL, MICRO]
    assert all('"auto" is left in it' in each for each in found)
    assert only_problem({MICRO: "auto", STEPS: 2}, batch=False).startswith(f"{MICRO}: ")


def test_data_parallel_size_must_agree() -> None:
    assert "2 is stated" in only_problem({"data_parallel_size": 2, TOTAL: 8}, dp_world_size=4)
    assert parse({"data_parallel_size": 4, TOTAL: 8}, dp_world_size=4).batch == BatchSizes(8, 2, 1)


def test_resolve_batch_raises_by_itself() -> None:
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size: 5 does not fit"):
        resolve_batch(5, None, None, 2)


def test_a_product_over_all_ranks_differs_from_one_over_ranks_with_other_samples() -> None:
    """Accelerate and the Trainer multiply all ranks, also those that share layers."""
    shared = {"tensor_parallel": {"autotp_size": 2}}
    parsed = parse({TOTAL: 24, MICRO: 3, STEPS: 2, **shared}, dp_world_size=2)
    assert parsed.batch == BatchSizes(12, 3, 2) and parsed.root.train_batch_size == 12
    assert any("24 counts each of the 4 ranks" in notice and "12 samples" in notice for notice in parsed.notices)
    assert parse({TOTAL: 12, MICRO: 3, STEPS: 2, **shared}, dp_world_size=2).batch == BatchSizes(12, 3, 2)
    assert parse({TOTAL: 24, MICRO: 3, **shared}, dp_world_size=2).batch == BatchSizes(24, 3, 4)  # nothing contradicts
    assert "48 does not fit" in only_problem({TOTAL: 48, MICRO: 3, STEPS: 2, **shared}, dp_world_size=2)
    assert "24 does not fit" in only_problem({TOTAL: 24, MICRO: 3, STEPS: 2}, dp_world_size=2)
