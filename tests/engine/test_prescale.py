"""prescale_gradients and gradient_predivide_factor: the mean stays the mean, only the moment of the division moves.

The moment shows in what travels: the transport is asked for gradients that are divided already, and for a smaller
division afterwards.
"""

import pytest

from deepspeed.comm.host.gloo import GlooTransport
from tests.engine.support import engine_of, inputs, rank
from tests.harness import assert_states_equal, on_ranks
from tests.harness.toy_models import tower
from tests.zero.reading import full_masters


def _train(stage, monkeypatch, **config):
    """Masters after two steps, and per reduction (largest element sent, factor applied afterwards)."""
    sent = []
    for name in ("reduce_scatter", "all_reduce"):
        original = getattr(GlooTransport, name)

        def spying(self, source, out, how, _original=original):
            sent.append((source.abs().max().item(), how.scale))
            return _original(self, source, out, how)

        monkeypatch.setattr(GlooTransport, name, spying)
    engine = engine_of(tower(), stage, **config)
    for step in range(2):
        engine.backward(engine(inputs(step, rank())))
        engine.step()
    monkeypatch.undo()
    return full_masters(engine), sent


def _compare(stage, ranks):
    with pytest.MonkeyPatch.context() as patch:
        plain, whole = _train(stage, patch)
        before, divided = _train(stage, patch, prescale_gradients=True)
        parts, halved = _train(stage, patch, gradient_predivide_factor=2.0)
    assert {scale for _, scale in whole} == {1 / ranks}
    assert {scale for _, scale in divided} == {1.0}
    assert {scale for _, scale in halved} == {2 / ranks}
    first = len(whole) // 2  # later steps start from rounded weights
    for (all_of_it, _), (some, _), (half, _) in zip(whole[:first], divided[:first], halved[:first], strict=True):
        assert some == pytest.approx(all_of_it / ranks, rel=1e-6)
        assert half == pytest.approx(all_of_it / 2, rel=1e-6)
    exact = ranks in (1, 2, 4)  # a division by a power of two rounds nothing
    for other in (before, parts):
        assert_states_equal(other, plain, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)


@on_ranks(2, 3)
def test_the_step_is_the_same_and_the_division_moves(ranks):
    for stage in range(4):
        _compare(stage, ranks)
