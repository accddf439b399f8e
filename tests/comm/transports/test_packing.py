"""Tensors of any shapes travel one behind another."""

import pytest
import torch

from deepspeed.comm.transports import packing


@pytest.mark.parametrize("shapes", [[(3,), ()], [(), (3,)], [(2, 2), (1, 2)], [(2, 2), (0, 5), (3,)], [()], [(0,)], []])
def test_written_tensors_are_read(shapes):
    tensors = [torch.randn(shape) for shape in shapes]
    flat = torch.empty(packing.numel_of(tensors))
    packing.write(tensors, flat)
    assert torch.equal(flat, torch.cat([torch.empty(0), *(tensor.reshape(-1) for tensor in tensors)]))
    places = [torch.empty(shape) for shape in shapes]
    packing.read(flat, places)
    assert all(map(torch.equal, places, tensors))
