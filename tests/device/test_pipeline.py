"""A pipeline between simulated devices: communicators of pairs, and receives that are kernels."""

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed.parallel.pipe.channel import ACTIVATIONS, TENSORS, ChannelReceiver, ChannelSender, Route
from tests.harness import run_ranks
from tests.harness.device import simulated_rank
from tests.harness.device.peers import SimulatedGroup
from tests.parallel.pipe import support


def _train(on_device: bool, schedule: str) -> tuple[Any, bool]:
    engine = support.engine_of(2, 1, 3, schedule=schedule)
    groups = [] if not on_device else list(engine._interpreter.channels._native.values())
    assert all(isinstance(group, SimulatedGroup) for group in groups)
    at_start = [sorted(group.pairs) for group in groups]
    result = support.train(engine, 3, steps=2)
    made_later = at_start != [sorted(group.pairs) for group in groups]
    engine.destroy()
    return result, made_later


def _items_on_device(real: Any) -> Any:
    return lambda *args: [tuple(tensor.to("cuda") for tensor in item) for item in real(*args)]


def _train_on_device(schedule: str) -> tuple[Any, bool]:
    with simulated_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(support, "items", _items_on_device(support.items))
        return _train(True, schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_pairs_are_connected_at_the_start(schedule: str) -> None:
    """Made in the middle of a step, a communicator blocks the host until the other rank comes too."""
    found = run_ranks(_train_on_device, 2, schedule, backend=None)
    expected = run_ranks(_train, 2, False, schedule)
    assert not any(made_later for _, made_later in found)
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(expected[0][0]), rtol=1e-5, atol=1e-6)


class _Loop:
    """A wire whose sending end is its receiving end."""

    def __init__(self, posts_tensors_ahead: bool) -> None:
        self.posts_tensors_ahead = posts_tensors_ahead
        self.sent: tuple[deque[torch.Tensor], ...] = (deque(), deque(), deque())
        self.started = 0  # receives of tensors

    def send(self, tensor: torch.Tensor, what: int) -> None:
        self.sent[what].append(tensor)

    def receive(self, tensor: torch.Tensor, what: int) -> Any:
        self.started += what == TENSORS
        return SimpleNamespace(wait=lambda: tensor.copy_(self.sent[what].popleft()))

    def has_left(self, _work: Any, _what: int) -> bool:
        return True

    def has_come(self, _work: Any, _what: int) -> bool:
        return False


@pytest.mark.parametrize("posts_ahead", [True, False])
def test_receives_of_tensors_are_started_when_they_have_been_sent(posts_ahead: bool) -> None:
    """Also where the form of messages changes, for which the sender fills what is posted."""
    watched = SimpleNamespace(issue=lambda _: ("", 0), guard=lambda wait, *_, **__: wait())
    route = Route(ACTIVATIONS, 0, 1, (0, 1), watched, 0)
    transport = _Loop(posts_ahead)
    going = ChannelSender(route, transport, packs=False, received=lambda: 0)
    coming = ChannelReceiver(route, transport, torch.device("cpu"), packs=False, drop_sent=lambda _: None)
    values = [torch.arange(float(n)) for n in (3, 3, 3, 5, 5, 3)]
    coming.expect(len(values))
    for number, value in enumerate(values):
        ahead = transport.started - number
        assert ahead == 0 or posts_ahead
        going.send(number, value)
        assert torch.equal(coming.take(number), value)
    assert not any(transport.sent) and (transport.started > len(values)) == posts_ahead
