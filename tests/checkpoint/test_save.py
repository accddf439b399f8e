"""Copies of what training will change (``checkpoint.save``)."""

import torch

from deepspeed.checkpoint.save import HostCopy


def test_what_lies_in_host_memory_is_copied_without_a_kept_buffer() -> None:
    host = HostCopy()
    given = [torch.arange(3.0), torch.ones(2, 2, dtype=torch.bfloat16), torch.empty(0, 5)]
    first = host.take(given)
    expected = [tensor.clone() for tensor in given]
    for tensor in given:
        tensor.zero_()
    second = host.take(given)
    assert host.nbytes == 0
    for kept, later, value in zip(first, second, expected, strict=True):
        assert torch.equal(kept, value) and kept.dtype == value.dtype, "the next copy leaves it alone"
        assert not later.any()
