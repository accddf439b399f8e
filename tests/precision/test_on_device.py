"""Building modules with a dtype and a device."""

import pytest
import torch
from torch import nn

from deepspeed import OnDevice


def test_meta_device_and_dtype():
    with OnDevice(dtype=torch.bfloat16):
        layer = nn.Linear(4, 4)
        positions = torch.arange(3)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    assert positions.is_meta and positions.dtype == torch.int64
    assert torch.get_default_dtype() == torch.float32 and not torch.empty(1).is_meta


def test_real_device():
    with OnDevice(dtype=torch.float16, device="cpu"):
        layer = nn.Linear(4, 4)
    assert layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float16


def test_disabled_and_nested_and_failing():
    with OnDevice(dtype=torch.int8, enabled=False):
        assert torch.empty(1).dtype == torch.float32
    context = OnDevice(dtype=torch.float16)
    with pytest.raises(KeyError), context:
        with context, OnDevice(dtype=torch.float64, device="cpu"):
            assert torch.empty(1).dtype == torch.float64 and not torch.empty(1).is_meta
        assert torch.empty(1).dtype == torch.float16 and torch.empty(1).is_meta
        raise KeyError
    assert torch.empty(1).dtype == torch.float32


def test_integer_dtype_is_refused():
    with pytest.raises(ValueError, match="int8.*floating"):
        OnDevice(dtype=torch.int8)
