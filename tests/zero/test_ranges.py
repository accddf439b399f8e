"""What a profile of torch shows of ZeRO (``zero.ranges``)."""

from unittest import mock

import torch

from deepspeed.zero import ranges
from tests.engine.support import engine_of, inputs, rank
from tests.harness import run_ranks
from tests.harness.toy_models import tower

UNITS = ("first", "layers.0", "layers.1", "last")
WORK = ("gather", "wait for gather", "pack", "reduce", "wait for reduction", "update", "publish")


def _names():
    engine = engine_of(tower(depth=2), 3)

    def step(number):
        engine.backward(engine(inputs(number, rank())).square().mean())
        engine.step()

    with mock.patch.object(ranges, "record_function", side_effect=AssertionError):  # no profiler runs
        step(0)
    with torch.profiler.profile() as profile:
        step(1)
    return {event.key for event in profile.key_averages() if event.key.startswith("ZeRO::")}


def test_every_gather_reduction_bucket_and_update_has_the_name_of_its_module():
    expected = {f"ZeRO::{work} {unit}" for work in WORK for unit in UNITS}
    assert run_ranks(_names, 2) == [expected] * 2
