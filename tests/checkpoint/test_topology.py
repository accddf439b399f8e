"""Whatever wrote a checkpoint, any number of ranks at any stage reads it: every value, by name."""

from collections.abc import Sequence

import pytest
import torch

from tests.checkpoint.training import (
    PRECISIONS,
    engine,
    fragments,
    joined,
    offload,
    other_state,
    train,
)
from tests.harness import assert_states_equal, run_ranks

RANKS = (1, 2, 3, 4)
CELLS = ((0, "none"), *((stage, tier) for stage in (1, 2, 3) for tier in ("none", "cpu", "nvme")))
"""Stage, and tier of the optimizer's states; at stage 3 the parameters live there too."""
EVERY_CELL = range(len(CELLS))
DAILY = tuple(CELLS.index(cell) for cell in ((0, "none"), (1, "nvme"), (2, "cpu"), (3, "none"), (3, "nvme")))
"""The cells outside of the slow tests: every stage, every tier."""
SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 300}}


def tag_of(ranks: int, cell: int) -> str:
    stage, tier = CELLS[cell]
    return f"{ranks}x{stage}-{tier}"


def pairwise() -> dict[int, list[tuple[int, list[str]]]]:
    """Per number of reading ranks the reading cells, each with the checkpoints that it loads.

    25 loads in which every two of the cells meet, and every two numbers of ranks; all 1600 are the slow test.
    """
    plan: dict[int, dict[int, list[str]]] = {ranks: {} for ranks in RANKS}
    for number, writing in enumerate(DAILY):
        for other, reading in enumerate(DAILY):
            writers, readers = RANKS[(number + other) % 4], RANKS[(number + 2 * other) % 4]
            plan[readers].setdefault(reading, []).append(tag_of(writers, writing))
    return {ranks: list(cells.items()) for ranks, cells in plan.items()}


def build(cell: int, files: str, *, seed: int = 3, small_buckets: bool = False):
    stage, tier = CELLS[cell]
    sections = offload(stage, tier, tier if stage == 3 else "none", files)
    zero = {**sections, **(SMALL_BUCKETS["zero_optimization"] if small_buckets else {})}
    return engine(stage, "bf16", seed=seed, zero_optimization=zero)


def write_all(folder: str, ranks: int, files: str, cells: Sequence[int]):
    """Trains and saves in each cell; returns what was saved."""
    saved = {}
    for cell in cells:
        run = build(cell, files)
        train(run, range(3))
        run.save_checkpoint(folder, tag=tag_of(ranks, cell))
        saved[tag_of(ranks, cell)] = fragments(run), other_state(run)
        run.destroy()
    return saved


def read(folder: str, jobs: list[tuple[int, list[str]]], files: str):
    """Loads checkpoints into engines with other values; returns what they then hold, and the loss of the next step.

    Every other cell reads with buckets that no checkpoint was written with.
    """
    found = {}
    for cell, tags in jobs:
        run = build(cell, files, seed=8, small_buckets=cell % 2 == 1)
        train(run, range(7, 8))
        for tag in tags:
            run.load_checkpoint(folder, tag=tag)
            held = fragments(run), other_state(run)
            found[(cell, tag)] = held, train(run, range(3, 4))
        run.destroy()
    return found


def merge(results: list[dict]) -> dict:
    """Per checkpoint the whole parameters and what all ranks agree on."""
    made = {}
    for key in results[0]:
        other = [rank[key][1] for rank in results]
        for entry in other[1:]:
            assert_states_equal(entry, other[0])
        made[key] = joined([rank[key][0] for rank in results]), other[0]
    return made


def write_checkpoints(tmp_path_factory, cells: Sequence[int]):
    """A folder with checkpoints of these cells by all numbers of ranks, and what they hold."""
    folder = str(tmp_path_factory.mktemp("written"))
    files = str(tmp_path_factory.mktemp("files"))
    saved: dict = {}
    for ranks in RANKS:
        saved.update(merge(run_ranks(write_all, ranks, folder, ranks, files, cells)))
    assert len(saved) == len(RANKS) * len(cells)
    return folder, saved


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_checkpoints(tmp_path_factory, DAILY)


@pytest.fixture(scope="module")
def all_written(tmp_path_factory):
    return write_checkpoints(tmp_path_factory, EVERY_CELL)


def check(ranks: int, jobs: list[tuple[int, list[str]]], written, files: str) -> int:
    """How many loads were compared."""
    folder, saved = written
    results = run_ranks(read, ranks, folder, jobs, files, timeout=280)
    for key in results[0]:
        held, expected = merge([{key: rank[key][0]} for rank in results])[key], saved[key[1]]
        assert_states_equal(held[0], expected[0])
        assert_states_equal(held[1], expected[1])
    # The next step is the same wherever it is taken, but for the order of sums over ranks.
    mean = {key: sum(rank[key][1][0] for rank in results) / ranks for key in results[0]}
    assert max(mean.values()) - min(mean.values()) < 1e-2
    return len(mean)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_topology_reads_every_other_pairwise(ranks, written, tmp_path):
    jobs = pairwise()[ranks]
    assert check(ranks, jobs, written, str(tmp_path)) == sum(len(tags) for _, tags in jobs) > 4


@pytest.mark.slow
@pytest.mark.parametrize("reading", EVERY_CELL, ids=["-".join(map(str, cell)) for cell in CELLS])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_topology_reads_every_other(ranks, reading, all_written, tmp_path):
    assert check(ranks, [(reading, list(all_written[1]))], all_written, str(tmp_path)) == 40


def test_the_plan_meets_every_pair():
    loads = [
        (*tag.split("x", 1), readers, cell)
        for readers, jobs in pairwise().items()
        for cell, tags in jobs
        for tag in tags
    ]
    assert len(loads) == len(set(loads)) == 25
    writers, cells = [load[0] for load in loads], [(load[1], load[3]) for load in loads]
    assert len(set(cells)) == 25 and len({(load[0], load[2]) for load in loads}) == 16 and set(writers) == set("1234")


def precision_tag(stage: int, precision: str) -> str:
    return f"{stage}-{precision}"


def write(folder: str, stages: tuple[int, ...], precision: str):
    """Trains and saves at each stage; returns what was saved."""
    saved = {}
    for stage in stages:
        run = engine(stage, precision)
        train(run, range(3))
        run.save_checkpoint(folder, tag=precision_tag(stage, precision))
        saved[precision_tag(stage, precision)] = fragments(run), other_state(run)
    return saved


def read_precision(folder: str, tags: list[str], precision: str):
    """The values that a run of another precision takes over."""
    found = {}
    for stage in (0, 3):
        run = engine(stage, precision, seed=8)
        for tag in tags:
            run.load_checkpoint(folder, tag=tag)
            found[(stage, tag)] = fragments(run), None
    return found


@pytest.fixture(scope="module")
def precisions(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("precisions"))
    saved: dict = {}
    for precision in PRECISIONS:
        saved.update(merge(run_ranks(write, 2, folder, (1, 3), precision)))
    return folder, saved


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_reads_every_other(precision, precisions):
    folder, saved = precisions
    results = run_ranks(read_precision, 1, folder, list(saved), precision)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    for (_, tag), (held, _) in merge(results).items():
        expected = saved[tag][0]
        for key, values in expected.items():
            kind, name = key.split("/")
            if kind == "master" or kind.startswith("state."):
                assert_states_equal(held[key], values)
                if kind == "master":
                    assert_states_equal(held[f"compute/{name}"], values.to(dtype))
            elif f"master/{name}" not in expected:  # frozen: saved in the precision of its run only
                assert_states_equal(held[key], values.to(dtype))
