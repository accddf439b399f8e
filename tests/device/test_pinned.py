"""Page-locked memory of activations and small vectors: after the first step nothing is locked anew."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.activation_checkpointing import checkpointing
from deepspeed.activation_checkpointing.checkpointing import Partition
from deepspeed.comm.job.connect import channel_over
from deepspeed.comm.job.fake import FakeGroup
from deepspeed.comm.job.job import axis_of
from deepspeed.parallel.tensor.batches import BatchCheck
from tests.device.test_orderings import _layer, _weights
from tests.harness.device import Device, simulated_device


def _attends_to_chunks_in_host_memory(_device: Device) -> Callable[[], Any]:
    tensors = [tensor.to("cuda").requires_grad_() for tensor in _weights()]
    return lambda: _layer(tensors, True).square().sum().backward()


def _keeps_parts_in_host_memory(_device: Device) -> Callable[[], Any]:
    parts = Partition(axis_of(FakeGroup((0,)), "tensor"), on_host=True)
    x = torch.ones(8, 64).to("cuda")
    return lambda: [parts.pack(x * number) for number in range(3)]


def _compares_batches(device: Device) -> Callable[[], Any]:
    model = nn.Linear(4, 4).to("cuda")
    BatchCheck(channel_over(device.world.transport(torch.device("cuda", 0)))).attach(model)
    x = torch.randn(3, 4).to("cuda")
    return lambda: model(x)


@pytest.mark.parametrize(
    "user",
    [
        _attends_to_chunks_in_host_memory,
        _keeps_parts_in_host_memory,
        _compares_batches,
    ],
    ids=lambda user: user.__name__[1:],
)
def test_torchs_pool_serves_every_step_after_the_first(
    user: Callable[[Device], Callable[[], Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of a step waits for its device at least once, in the update."""
    monkeypatch.setattr(checkpointing, "settings", checkpointing.settings)  # restored at the end
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # torch's save_on_cpu locks pages only then
    with simulated_device(ranks=2) as device:
        step = user(device)
        made = []
        for _ in range(5):
            step()
            device.accelerator.synchronize()
            made.append(device.pinned.allocations)
        # What compares batches reads its answer one forward late, so it has two blocks.
        assert made[0] > 0 and made[1:] == made[1:2] * 4 and made[1] <= 2 * made[0], made
