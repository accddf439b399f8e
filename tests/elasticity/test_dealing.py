"""How micro-batches are dealt."""

from __future__ import annotations

import pytest

from deepspeed.elasticity.dealing import deal


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 12, 13])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_micro_batch_once_and_as_many_rounds_on_every_rank(micro_batches, ranks):
    dealt = [deal(micro_batches, ranks, rank) for rank in range(ranks)]
    assert [entry.number for own in dealt for entry in own if entry.counts] == list(range(micro_batches))
    assert {len(own) for own in dealt} == {-(-micro_batches // ranks)}
    assert all(entry.number < micro_batches for own in dealt for entry in own)
