"""Attention over keys and values in host memory: copies run beside the computation, and the host does not wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.comm.job.fake import FakeGroup
from deepspeed.offload.streams import CopyHandle
from deepspeed.parallel.sequence.chunked import chunked_attention
from deepspeed.parallel.sequence.host_chunks import HostChunks
from deepspeed.sequence.fpdt_layer import FPDT_Attention
from tests.harness.device import OrderError, simulated_device

CONFIG = SimpleNamespace(
    hidden_size=8, num_attention_heads=2, num_key_value_heads=1, kv_channels=4, attention_dropout=0.0
)


def _weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in ((12, 1, 8), (16, 8), (16,), (8, 8), (8,))]


def _layer(tensors: list[torch.Tensor], offload: bool) -> Any:
    layer = FPDT_Attention(CONFIG, *tensors[1:], FakeGroup((0,)), return_bias=False, chunk_size=4)
    return layer(tensors[0], None, None, None, cpu_offloading=offload)


def test_chunks_of_a_layer_wait_for_nothing_in_forward() -> None:
    with simulated_device() as device:
        found: dict[bool, list[torch.Tensor]] = {}
        for offload in (False, True):
            tensors = [tensor.to("cuda").requires_grad_() for tensor in _weights()]
            before = device.clocks.waits
            out = _layer(tensors, offload)
            assert device.clocks.waits == before
            out.square().sum().backward()
            assert device.clocks.waits - before <= (3 if offload else 0)  # one for each chunk of queries
            found[offload] = [out.detach().cpu(), *(tensor.grad.cpu() for tensor in tensors)]
        for one, other in zip(found[False], found[True], strict=True):
            torch.testing.assert_close(one, other)


def test_chunked_attention_waits_for_nothing() -> None:
    with simulated_device() as device:
        query, key, value = (torch.randn(1, 2, 10, 4).to("cuda").requires_grad_() for _ in range(3))
        before = device.clocks.waits
        chunked_attention(query, key, value, chunk_size=4, window=3).sum().backward()
        assert device.clocks.waits == before


@pytest.mark.parametrize("owner", [(CopyHandle, "wait"), (HostChunks, "settle")], ids=lambda owner: owner[1])
def test_the_orderings_are_needed(monkeypatch: pytest.MonkeyPatch, owner: tuple[type, str]) -> None:
    monkeypatch.setattr(*owner, lambda *_: None)
    with pytest.raises(OrderError), simulated_device():
        _layer([tensor.to("cuda").requires_grad_() for tensor in _weights()], True).square().sum().backward()
