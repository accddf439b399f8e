"""Every legal combination of settings equals the one-process reference; the others are refused with their reason.

`make test` runs a pairwise cover of all axes, with those optimizers that differ in more than their formula.
`make test-all` runs the whole product of the main axes, in which the number of ranks, the bucket limits and the
overflow step take turns.
"""

import itertools

import pytest

from tests.engine.matrix.cells import AXES, SIDE_AXES, Cell
from tests.engine.matrix.pairwise import every, pairwise
from tests.engine.matrix.run import run_cells
from tests.harness import run_ranks

BATCH = 10  # cells per call: the start of a run of several ranks costs as much as a cell


def _batches(cells: list[Cell]) -> list[tuple[int, list[Cell]]]:
    made = []
    for ranks in SIDE_AXES["ranks"]:
        mine = [cell for cell in cells if cell.ranks == ranks]
        made += [(ranks, mine[start : start + BATCH]) for start in range(0, len(mine), BATCH)]
    return made


DAILY = [
    name
    for name in AXES["optimizer"]
    if name not in ("client Adam", "client RMSprop", "client Lion", "config Adam", "config SGD", "config Adagrad")
]
"""The others are updated by the same code; their formulas are compared in tests/ops."""


def _cover() -> list[Cell]:
    return [Cell(**row) for row in pairwise({**AXES, **SIDE_AXES, "optimizer": DAILY})]


def _product() -> list[Cell]:
    """All of it, with the side axes in turn: their product has 24 members, and 24 divides no cycle of the main axes."""
    turns = itertools.cycle(every(SIDE_AXES))
    next(turns)
    cells = []
    for number, row in enumerate(every(AXES)):
        if number % 23 == 0:
            next(turns)
        cells.append(Cell(**row, **next(turns)))
    return cells


def _id(batch: tuple[int, list[Cell]]) -> str:
    return f"{batch[0]} ranks"


def _check(ranks: int, cells: list[Cell]) -> None:
    problems = run_ranks(run_cells, ranks, cells, timeout=30 + 20 * len(cells))[0]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("batch", _batches(_cover()), ids=_id)
def test_pairwise_cover(batch):
    _check(*batch)


@pytest.mark.slow
@pytest.mark.parametrize("batch", _batches(_product()), ids=_id)
def test_every_cell(batch):
    _check(*batch)
