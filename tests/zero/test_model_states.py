"""Tests how a tile is moved when its elements are divided over the ranks in another way (``zero.model_states``)."""

import pytest
import torch

from deepspeed.zero.model_states import moves
from deepspeed.zero.tiling.layout import Fragment


def _division(*numels: int) -> list[Fragment]:
    """Fragments of these lengths, one per rank; rank r has 10 r elements of other tiles before its fragment."""
    starts = [sum(numels[:rank]) for rank in range(len(numels))]
    return [Fragment(0, rank, starts[rank], 10 * rank, numel) for rank, numel in enumerate(numels) if numel]


@pytest.mark.parametrize(
    ("old", "new", "count"),
    [((6, 6), (6, 6), 2), ((12,), (4, 4, 4), 3), ((4, 4, 4), (12,), 3), ((5, 0, 7), (2, 6, 4), 4)],
)
def test_every_element_moves_once_to_its_place(old: tuple[int, ...], new: tuple[int, ...], count: int) -> None:
    before, after = _division(*old), _division(*new)
    slices = torch.full((3, 50), -1)
    for fragment in before:
        values = torch.arange(fragment.tile_start, fragment.tile_stop)
        slices[fragment.rank, fragment.slice_start : fragment.slice_start + fragment.numel] = values
    found, made = torch.full((3, 50), -1), moves(before, after)
    for move in made:
        values = slices[move.source, move.source_start : move.source_start + move.numel]
        assert (values >= 0).all() and move.numel > 0
        found[move.target, move.target_start : move.target_start + move.numel] = values
    for fragment in after:
        expected = list(range(fragment.tile_start, fragment.tile_stop))
        assert found[fragment.rank, fragment.slice_start :][: fragment.numel].tolist() == expected
    assert len(made) == count, "one per pair of fragments that have elements in common"
