"""The all-to-all of autograd: values, gradients and gradients of gradients, with pieces of unequal sizes."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from deepspeed.comm.transports.differentiable import all_to_all
from deepspeed.comm.transports.transport import LocalTransport, Transport
from deepspeed.parallel.sequence.exchange import _Move, in_equal_parts
from tests.harness.loopback import run_threads


@dataclass(frozen=True)
class Rows:
    """Rank r sends ``numbers[r][s]`` elements to rank s."""

    transport: Transport
    numbers: tuple[tuple[int, ...], ...]

    def run(self, *values: torch.Tensor) -> torch.Tensor:
        received = [row[self.transport.rank] for row in self.numbers]
        out = values[0].new_empty(sum(received))
        sent = self.numbers[self.transport.rank]
        self.transport.all_to_all(values[0].contiguous(), sent, out, received, label="rows").wait()
        return out

    def reverse(self) -> Rows:
        return Rows(self.transport, tuple(zip(*self.numbers, strict=True)))


NUMBERS = ((1, 2, 0), (3, 0, 1), (2, 2, 2))


def cubes(transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
    start = 100.0 * transport.rank
    x = torch.arange(start, start + sum(NUMBERS[transport.rank]), dtype=torch.float64, requires_grad=True)
    arrived = all_to_all(Rows(transport, NUMBERS), x)
    (first,) = torch.autograd.grad((arrived**3).sum(), x, create_graph=True)
    torch.testing.assert_close(first, 3 * x**2)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return arrived.detach(), second / x.detach().clamp(min=1.0) ** 3


def test_rows_arrive_and_their_gradients_of_both_orders_return():
    found = run_threads(cubes, 3)
    assert [arrived.tolist() for arrived, _ in found] == [
        [0.0, 100.0, 101.0, 102.0, 200.0, 201.0],
        [1.0, 2.0, 202.0, 203.0],
        [103.0, 204.0, 205.0],
    ]
    for rank, (_, ratio) in enumerate(found):
        torch.testing.assert_close(ratio[rank == 0 :], torch.full_like(ratio[rank == 0 :], 36.0))


class Token:
    pass


def test_a_token_is_kept_until_the_backward():
    token, x = Token(), torch.ones(1, requires_grad=True)
    arrived = all_to_all(Rows(LocalTransport(), ((1,),)), x, expected=token)
    reference = weakref.ref(token)
    del token
    assert reference() is not None
    arrived.sum().backward(retain_graph=True)
    assert reference() is None


def heads_and_tokens(transport: Transport) -> None:
    """Of an exchange of heads for tokens, whose backward was not differentiable."""
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    tokens, heads = in_equal_parts(3 * transport.size, transport.size), in_equal_parts(4, transport.size)
    inside = all_to_all(_Move(transport, 1, 2, False, tokens, heads), x)
    (first,) = torch.autograd.grad((inside**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    torch.testing.assert_close(second, 36 * x**3)


def test_an_exchange_of_heads_has_second_derivatives():
    run_threads(heads_and_tokens, 2)
