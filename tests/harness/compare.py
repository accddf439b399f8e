"""Comparing nested states (dicts, sequences, tensors, numbers), and references that one rank computes for all."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist

_SHOWN = 20

P = ParamSpec("P")
T = TypeVar("T")


def on_first_rank(reference: Callable[P, T]) -> Callable[P, T]:
    """Decorates a reference that is the same on all ranks: rank 0 computes it and sends it to the others.

    Every rank must call it, with equal arguments. What it returns travels by pickle. It draws no random numbers of the
    program. Without a process group, or with one rank, it is called as it is.
    """

    @functools.wraps(reference)
    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return reference(*args, **kwargs)
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            with torch.random.fork_rng(devices=[]):
                found = [reference(*args, **kwargs)]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    return inside


def assert_states_equal(actual: Any, expected: Any, rtol: float = 0, atol: float = 0) -> None:
    """Asserts that two nested states have the same structure, dtypes, shapes and values.

    With the default tolerances tensors must agree bit for bit, except that NaN equals NaN. All differences are
    reported together, each with its path.

    Args:
        actual: What the code under test made.
        expected: What it should be.
        rtol: Relative tolerance of floating point values.
        atol: Absolute tolerance of floating point values.
    """
    problems: list[str] = []
    _compare(actual, expected, "state", rtol, atol, problems)
    if problems:
        rest = [f"... and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise AssertionError("\n".join([f"{len(problems)} differences:", *problems[:_SHOWN], *rest]))


def _compare(actual: Any, expected: Any, path: str, rtol: float, atol: float, problems: list[str]) -> None:
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key in [key for key in expected if key not in actual]:
            problems.append(f"{path}[{key!r}] is missing")
        for key in [key for key in actual if key not in expected]:
            problems.append(f"{path}[{key!r}] is not expected")
        for key in [key for key in expected if key in actual]:
            _compare(actual[key], expected[key], f"{path}[{key!r}]", rtol, atol, problems)
    elif isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            problems.append(f"{path} has {len(actual)} elements, expected {len(expected)}")
            return
        for index, (left, right) in enumerate(zip(actual, expected, strict=True)):
            _compare(left, right, f"{path}[{index}]", rtol, atol, problems)
    elif isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        _compare_tensors(actual, expected, path, rtol, atol, problems)
    elif isinstance(expected, np.ndarray) and isinstance(actual, np.ndarray):
        _compare_tensors(torch.from_numpy(actual), torch.from_numpy(expected), path, rtol, atol, problems)
    elif isinstance(expected, (float, complex)) and isinstance(actual, (int, float, complex)):
        same = actual == expected or (actual != actual and expected != expected)
        if not same and not abs(actual - expected) <= atol + rtol * abs(expected):
            problems.append(f"{path} is {actual!r}, expected {expected!r}")
    elif type(actual) is not type(expected) or actual != expected:
        problems.append(f"{path} is {actual!r}, expected {expected!r}")


def _compare_tensors(
    actual: torch.Tensor, expected: torch.Tensor, path: str, rtol: float, atol: float, problems: list[str]
) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        problems.append(
            f"{path} is {actual.dtype} of shape {tuple(actual.shape)}, "
            f"expected {expected.dtype} of shape {tuple(expected.shape)}"
        )
        return
    left, right = actual.detach().cpu(), expected.detach().cpu()
    if left.is_floating_point() or left.is_complex():
        wide = torch.complex128 if left.is_complex() else torch.float64
        left, right = left.to(wide), right.to(wide)
        different = ~torch.isclose(left, right, rtol=rtol, atol=atol, equal_nan=True)
    else:
        different = left != right
    count = int(different.sum())
    if count:
        first = tuple(different.nonzero()[0].tolist())
        worst = (left[different].to(torch.complex128) - right[different].to(torch.complex128)).abs().max().item()
        problems.append(
            f"{path}: {count} of {left.numel()} elements differ, by up to {worst:.3g}; "
            f"first at {list(first)}: {left[first].item()!r}, expected {right[first].item()!r}"
        )
