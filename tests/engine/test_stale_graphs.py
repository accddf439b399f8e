"""A backward through values that have changed since their forward is an error, as with plain torch."""

import pytest

from tests.engine.support import engine_of, inputs, rank
from tests.harness import on_ranks
from tests.harness.toy_models import tower

LIMITS = ({}, {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0})


@on_ranks(2)
def test_a_backward_after_the_update_of_its_weights():
    for stage, zero in ((0, {}), (2, {}), *((3, limits) for limits in LIMITS)):
        engine = engine_of(tower(), stage, zero=zero)
        for _ in range(2):
            early = engine(inputs(0, rank()))
            engine.backward(engine(inputs(1, rank())))
            engine.step()
            with pytest.raises(RuntimeError, match=r"changed since|modified by an inplace operation"):
                engine.backward(early)
        engine.backward(engine(inputs(2, rank())))  # the engine is as good as before
        engine.step()
        early = engine(inputs(3, rank()))
        engine.backward(early, retain_graph=True)  # twice through the same graph, as nothing has changed
        engine.backward(early)
        engine.step()
        engine.destroy()
