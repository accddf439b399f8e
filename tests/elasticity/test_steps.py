"""How micro-batches are assigned."""

import pytest

from deepspeed.elasticity.steps import assign_micro_batches


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_micro_batch_once_and_as_many_rounds_on_every_rank(micro_batches, ranks):
    assigned = [assign_micro_batches(micro_batches, ranks, rank) for rank in range(ranks)]
    assert [entry.number for own in assigned for entry in own if entry.counts] == list(range(micro_batches))
    assert {len(own) for own in assigned} == {-(-micro_batches // ranks)}
    assert all(entry.number < micro_batches for own in assigned for entry in own)
