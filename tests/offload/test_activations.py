"""Inputs of blocks in host memory: when they move, what waits for them, and how much memory is locked."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed.activation_checkpointing import checkpointing
from deepspeed.offload import activations
from deepspeed.offload.streams import CopyStream
from tests.harness.device import simulated_device

BLOCKS, STEPS = 7, 3


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(checkpointing, "settings", checkpointing.settings)
    yield


class _Block(nn.Module):
    """Notes when its forward begins: in forward, and again in backward."""

    def __init__(self, number: int, events: list[str]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.number, self.events = number, events

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.events.append(f"block {self.number}")
        return self.layer(x).tanh() * mask


def _train(in_cpu: bool, call: Callable[..., torch.Tensor], events: list[str]) -> tuple[list[torch.Tensor], int, list]:
    """Returns gradients, bytes that are locked, and by step the waits of the host and the largest device memory."""
    checkpointing.configure(None, checkpoint_in_cpu=in_cpu)
    torch.manual_seed(0)
    found: list[Any] = []
    with simulated_device() as device:
        blocks = [_Block(number, events).to("cuda") for number in range(BLOCKS)]
        x, mask = torch.randn(64, 8).to("cuda").requires_grad_(), torch.ones(64, 8).to("cuda")
        for _ in range(STEPS):
            before, events[:] = device.clocks.waits, []
            y = x
            for block in blocks:
                y = call(block, y, mask)
            events.append("backward")
            y.square().sum().backward()
            found.append(device.clocks.waits - before)
        device.accelerator.synchronize()
        gradients = [parameter.grad.cpu() for block in blocks for parameter in block.parameters()]
        store = checkpointing.settings.on_host
        locked = 0 if store is None else store.locked_bytes
        checkpointing.settings.on_host = None
    return gradients, locked, found


@pytest.mark.parametrize("function", ["checkpoint", "non_reentrant_checkpoint"])
def test_copies_run_beside_the_blocks(function: str) -> None:
    """Reads and writes that nothing orders are errors of the simulated device."""
    events: list[str] = []
    call, copy = getattr(checkpointing, function), CopyStream.copy

    def copying(self: Any, target: torch.Tensor, source: torch.Tensor, **more: Any) -> Any:
        events.append("up" if target.device.type == "cuda" else "down")
        return copy(self, target, source, **more)

    plain, nothing, _ = _train(False, call, [])
    with mock.patch.object(CopyStream, "copy", copying):
        moved, locked, waits = _train(True, call, events)
    assert nothing == 0 and all(map(torch.equal, moved, plain))
    assert waits == [0] * STEPS
    assert locked == BLOCKS * 2 * 64 * 8 * 4  # input and mask of every block, in the first step only
    ahead = activations._AHEAD
    forward, backward = events[: events.index("backward")], events[events.index("backward") + 1 :]
    assert forward.count("down") == 2 * BLOCKS and "up" not in forward and "down" not in backward
    assert backward.count("up") == 2 * (BLOCKS - ahead)  # the last blocks' inputs have not left
    begun = [event for event in backward if event != "up"]
    assert begun == [f"block {number}" for number in reversed(range(BLOCKS))]
    for position, number in enumerate(reversed(range(BLOCKS))):
        before = backward[: backward.index(f"block {number}")].count("up")
        assert before == 2 * min(position + 1, BLOCKS - ahead), (number, before)


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    events: list[str] = []
    checkpointing.configure(None, checkpoint_in_cpu=True)
    with simulated_device():
        blocks = [_Block(number, events).to("cuda") for number in range(BLOCKS)]
        mask = torch.ones(64, 8).to("cuda")
        for _ in range(4):
            y = torch.randn(64, 8).to("cuda").requires_grad_()
            for block in blocks:
                y = checkpointing.checkpoint(block, y, mask)
            del y
        store = checkpointing.settings.on_host
        assert store is not None and store.locked_bytes == BLOCKS * 2 * 64 * 8 * 4
        checkpointing.settings.on_host = None
