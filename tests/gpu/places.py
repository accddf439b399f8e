"""Where a test of this folder runs: on the GPU of this machine, or on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from tests.harness import run_ranks
from tests.harness.device import simulated_device

T = TypeVar("T")

on_both = pytest.mark.parametrize("place", ["simulated", pytest.param("gpu", marks=pytest.mark.gpu)])


def run_at(place: str, check: Callable[..., T], *args: Any) -> T:
    """Runs ``check(*args)`` as the only rank of a job and returns its result.

    Args:
        place: ``"gpu"``: in a process of its own with NCCL; ``"simulated"``: here, where unordered work is an error.
        check: A module-level function; its engines find the device by themselves.
        *args: For it.
    """
    if place == "gpu":
        return run_ranks(check, 1, *args, backend="nccl", timeout=120, fresh="interpreter")[0]
    with simulated_device():
        return check(*args)
