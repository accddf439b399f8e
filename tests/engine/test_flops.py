"""The MFU of the step line."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from deepspeed.accelerator.devices import DEVICES
from deepspeed.engine import flops
from deepspeed.engine.flops import FlopsCounter


@pytest.fixture
def known(monkeypatch):
    """A device with a peak of 1e6 operations per second."""
    monkeypatch.setattr(flops, "device_of_product", lambda name: replace(DEVICES["h100"], flops=1e6))


def _count(model, inputs, units):
    counted = FlopsCounter(True)
    counted.before_forward(units)
    with counted.counting(model):
        model(inputs)
    return counted


def test_the_products_of_one_forward_count_three_times(known):
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 5))
    counted = _count(model, torch.randn(4, 6), units=4)
    per_token = 3 * 2 * (6 * 10 + 10 * 5)
    assert counted.share(7.0) == pytest.approx(per_token * 7 / 1e6)
    counted.before_forward(4)
    with counted.counting(model):
        model(torch.randn(40, 6))
    assert counted.share(7.0) == pytest.approx(per_token * 7 / 1e6), "only the first one is counted"
    assert counted.operations(7) == pytest.approx(per_token * 7)


def test_attention_counts(known):
    def attend(query):
        return nn.functional.scaled_dot_product_attention(query, query, query)

    model = nn.Module()
    model.forward = attend
    counted = _count(model, torch.randn(2, 3, 8, 16), units=1)
    assert counted.share(1.0) == pytest.approx(3 * 2 * 2 * (2 * 3) * 8 * 8 * 16 / 1e6)


def test_unknown_where_nothing_can_be_counted(known):
    assert FlopsCounter(False).share(1.0) is None, "another rank"
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    counted = FlopsCounter(True)
    counted.before_forward(1)
    with counted.counting(compiled):
        pass
    assert counted.share(1.0) is None
    with pytest.raises(RuntimeError, match="shapes"):
        _count(nn.Linear(2, 2), torch.randn(1, 3), units=1)


def test_a_processor_has_no_known_peak():
    assert FlopsCounter(True).peak is None
