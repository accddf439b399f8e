"""Random stacks of features keep what they must, or raise one of the package's errors."""

import math

import pytest

from tests.ecosystem.support import needs_transformers
from tests.random_stacks import calls, keys
from tests.random_stacks.documented import reason_of
from tests.random_stacks.kinds import KINDS, attempt
from tests.random_stacks.resuming import end_of
from tests.random_stacks.stack import Stack

QUICK = {"configurations": 4007, "calls": 2002, "layouts": 383, "worlds": 494, "watched": 430}
MANY = {"configurations": 40, "calls": 40, "layouts": 30, "worlds": 20, "watched": 30}


def check(kind: str, seed: int) -> str:
    """Runs the stack of a seed and returns how it ended; a failure prints how to run it alone."""
    stack = KINDS[kind].draw(seed)
    outcome = attempt(stack)
    print(f"{kind} {seed}: {outcome.kind} after {outcome.seconds:.1f} s")
    if outcome.is_finding:
        pytest.fail(f"{outcome.text}\n{stack.describe()}\nAlone: python -m tests.random_stacks {kind} {seed}")
    return outcome.kind


@pytest.mark.parametrize("kind, seed", QUICK.items())
def test_a_few(kind: str, seed: int) -> None:
    assert check(kind, seed) == "equal"


@pytest.mark.parametrize("key", ["fp16.loss_scale", "zero_optimization.reduce_bucket_size"])
def test_a_few_keys(key: str) -> None:
    assert check("keys", keys.keys().index(tuple(key.split(".")))) == "equal"


def test_differences_are_found() -> None:
    stack = Stack("configurations", 0, 2, {"communication_compression": {"islands": {"size": 1}}}, "AdamW")
    assert end_of(stack, [], [], [1.0, 2.0])[0] == "equal"
    assert end_of(stack, [], ["losses"], [1.0, 2.0])[0] == "different"
    assert end_of(stack, ["losses"], [], [1.0, 2.0])[0] == "documented"
    assert end_of(stack, [], [], [1.0, math.nan])[0] == "different"
    assert end_of(stack, [], [], [1.0, 1.0])[0] == "different"
    assert not calls.is_close(("train", 1.0), ("train", 1.1), 1e-2)
    assert not calls.is_close({"a": [1.0]}, {"a": [1.0, 2.0]}, 1e-2)
    assert calls.is_close(("train", [1.0, math.nan]), ("train", [1.001, math.nan]), 1e-2)


def test_documented_differences_belong_to_their_features() -> None:
    plain = Stack("layouts", 0, 2, {"zero_optimization": {"stage": 1}}, "AdamW")
    unused = Stack("layouts", 0, 2, {"zero_optimization": {"ignore_unused_parameters": False}}, "AdamW")
    text = "parameters of experts: ignore_unused_parameters is false, so that is an error"
    assert not any(reason_of(comparison, plain, text) for comparison in ("resumed", "stage 0", "failure"))
    assert reason_of("failure", unused, text) and not reason_of("failure", unused, "another error")


def test_every_kind_draws_the_same_again() -> None:
    for kind, (draw, _) in KINDS.items():
        assert draw(3) == draw(3), kind
        assert draw(3) != draw(4), kind


@needs_transformers
@pytest.mark.slow
@pytest.mark.parametrize("kind, seed", [(kind, seed) for kind, count in MANY.items() for seed in range(count)])
def test_many(kind: str, seed: int) -> None:
    check(kind, seed)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(keys.keys())))
def test_every_key(number: int) -> None:
    check("keys", number)
