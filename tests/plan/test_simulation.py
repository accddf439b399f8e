"""Plans against real runs: bytes by kind, their highest sum, activations, collectives and what is sent for them."""

import pytest

from tests.harness import run_ranks
from tests.plan.cells import OFFLOADS, STAGES, Cell, assert_true, measure, planned

MUON = (("optimizer", {"type": "Muon", "params": {"lr": 1e-3}}),)
AUTOCAST = (("torch_autocast", {"enabled": True, "dtype": "bfloat16"}),)
VARIANTS = [
    Cell(0, accumulation=2),
    Cell(1, accumulation=3, precision="fp32"),
    Cell(2, accumulation=5),
    Cell(3, accumulation=5),
    Cell(3, checkpointing=True),
    Cell(1, checkpointing=True),
    Cell(3, precision="fp16"),
    Cell(2, precision="fp32"),
    Cell(3, "cpu", "cpu", accumulation=2),
    Cell(3, zero=(("stage3_max_reuse_distance", 10**9), ("stage3_max_live_parameters", 10**9))),
    Cell(0, zero=(("reduce_bucket_size", 20_000),)),
    Cell(1, more=(("communication_data_type", "fp32"),)),
    Cell(3, more=(("prescale_gradients", True),)),
    Cell(0, more=(("optimizer", {"type": "Lion", "params": {"lr": 1e-4}}),)),
    *(Cell(stage, precision="fp32", more=AUTOCAST) for stage in (0, 2, 3)),
    Cell(3, precision="fp32", checkpointing=True, more=AUTOCAST),
    Cell(1, precision="fp32", accumulation=2, checkpointing=True, more=AUTOCAST),
    *(Cell(stage, more=(("optimizer", {"type": "Lamb", "params": {"lr": 1e-4}}),)) for stage in (0, 1, 3)),
]


def _compare(cells, ranks, folder):
    for_each_rank = run_ranks(measure, ranks, cells, str(folder), timeout=240)
    wrong = []
    for number, cell in enumerate(cells):
        rank = number % ranks
        try:
            assert_true(planned(cell, ranks, str(folder), rank), for_each_rank[rank][number])
        except AssertionError as error:
            wrong.append(f"{cell} on rank {rank} of {ranks}:\n{error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_stages(ranks, tmp_path):
    _compare([*STAGES, *(Cell(stage, more=MUON) for stage in range(4))], ranks, tmp_path)


@pytest.mark.parametrize("ranks", [3, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (1, 2, 4))])
def test_offload(ranks, tmp_path):
    _compare(OFFLOADS, ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_variants(ranks, tmp_path):
    _compare(VARIANTS, ranks, tmp_path)
