"""The gradients of an input that several cut layers share, on ranks that are threads."""

import torch

from deepspeed.comm.transports.channel import Channel
from deepspeed.parallel.tensor.regions import SharedInput, enter_shared
from tests.harness.loopback import LoopbackTransport, run_threads

ROWS, WIDTH, RANKS = 3, 4, 2


def _weight(rank: int, layer: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * rank + layer))


def _sent_back(rank: int, layer: int) -> torch.Tensor:
    return torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(100 + 10 * rank + layer))


def _summed(layers: int) -> torch.Tensor:
    return sum(
        (_sent_back(rank, layer) @ _weight(rank, layer) for rank in range(RANKS) for layer in range(layers)),
        torch.zeros(ROWS, WIDTH),
    )


def test_the_last_of_three_layers_starts_the_one_sum():
    def body(transport: LoopbackTransport) -> tuple[list[bool], torch.Tensor]:
        shared = SharedInput(Channel(transport), "the input", lambda _: None)
        shared.users = 3
        started = [shared.add(_sent_back(transport.rank, layer), _weight(transport.rank, layer)) for layer in range(3)]
        assert started[2] is not None
        return [one is not None for one in started], started[2].wait()

    for starts, total in run_threads(body, RANKS):
        assert starts == [False, False, True]
        torch.testing.assert_close(total, _summed(3))


def test_where_a_layer_has_no_part_in_backward_the_rest_is_summed_at_the_input_and_added():
    """Two of three layers send something back; the input also has a user that is not cut."""

    def body(transport: LoopbackTransport) -> torch.Tensor:
        shared = SharedInput(Channel(transport), "the input", lambda _: None)
        shared.users = 3
        values = torch.zeros(ROWS, WIDTH, requires_grad=True)
        entered = enter_shared(values, shared)
        for layer in range(2):
            assert shared.add(_sent_back(transport.rank, layer), _weight(transport.rank, layer)) is None
        (2 * entered).sum().backward()
        assert values.grad is not None
        return values.grad

    for gradient in run_threads(body, RANKS):
        torch.testing.assert_close(gradient, 2 + _summed(2))
