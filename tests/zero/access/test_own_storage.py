"""Parameters that are taken out of an engine."""

from __future__ import annotations

import torch

from deepspeed.zero.access.own_storage import own_parameters
from deepspeed.zero.address import address_of
from tests.engine.support import engine_of
from tests.harness import run_ranks
from tests.harness.toy_models import tower


def _take_parameters_out() -> None:
    engine = engine_of(tower(depth=1), 1)
    model = engine.module
    former = model.first.weight
    former.is_shared = ["a mark of the program"]
    own_parameters(model)
    assert model.first.weight is not former and torch.equal(model.first.weight, former)
    assert model.first.weight.is_shared is former.is_shared
    assert address_of(former) is not None and address_of(model.first.weight) is None
    assert not any(name.startswith(("ds_", "_ds_")) for name in vars(model.first.weight))
    engine.destroy()


def test_attributes_of_programs_go_with_the_copies() -> None:
    run_ranks(_take_parameters_out, 1)
