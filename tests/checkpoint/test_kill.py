"""``kill -9`` at any moment of a save leaves a whole checkpoint, named by ``latest``, and no litter that stays."""

import os
import tempfile

import pytest

from tests.checkpoint.killed import main
from tests.harness import run_ranks


def run(*arguments: str, timeout: float) -> str:
    (shown,) = run_ranks(main, 1, *arguments, backend=None, fresh=True, timeout=timeout)
    return shown


@pytest.fixture
def folder():
    """In memory where there is such a place: what is synced here need not outlive the machine."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, prefix="checkpoints-") as name:
        yield name


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("tag", "act"),
    [
        ("same", "before"),
        ("", "half"),
        pytest.param("", "before", marks=SLOW),
        pytest.param("", "after", marks=SLOW),
        pytest.param("same", "half", marks=SLOW),
        pytest.param("same", "after", marks=SLOW),
    ],
)
def test_death_at_each_file_operation(tag, act, folder):
    shown = run(folder, "operations", tag, act, timeout=250)
    assert int(shown.split()[0]) > 40


@pytest.mark.parametrize("count", [5, pytest.param(60, marks=[SLOW, pytest.mark.timeout(900)])])
def test_death_of_a_rank_at_a_random_moment(count, folder):
    shown = run(folder, "moments", str(count), timeout=800)
    assert shown.count("moment ") == count


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=[SLOW, pytest.mark.timeout(900)])])
def test_death_of_a_stage_at_a_random_moment(count, folder):
    shown = run(folder, "moments", str(count), "pipeline", timeout=800)
    assert shown.count("moment ") == count


HOMES = ("none", "cpu", "nvme")
CELLS = [
    f"{stage},{precision},{states},{parameters}"
    for stage in range(4)
    for states in (HOMES if stage else HOMES[:1])
    for parameters in (HOMES if stage == 3 else HOMES[:1])
    for precision in ("fp32", "bf16", "fp16")
]


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(["1,bf16,cpu,none", "2,fp16,nvme,none", "3,fp32,nvme,nvme", "3,bf16,cpu,cpu"], id="some"),
        pytest.param(CELLS, id="all", marks=[SLOW, pytest.mark.timeout(900)]),
    ],
)
def test_a_killed_run_continues_bit_for_bit(cells, folder):
    """Losses, weights, masters, moments: as if it had not been killed; for every stage, precision and tier."""
    shown = run(folder, "runs", *cells, timeout=800)
    assert shown.count("cell ") == len(cells)
