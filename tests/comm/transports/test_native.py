"""The transport over a backend's own collectives, here gloo's: small exchanges use the device that they were given."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.counters import counted
from deepspeed.comm.base.recorder import log
from deepspeed.comm.transports import native
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import Reduction
from tests.device.support import engine_at, step
from tests.harness import run_ranks
from tests.harness.device import simulated_device


def _gather_ranks():
    with pytest.MonkeyPatch.context() as patch:  # a GPU that the group has nothing to do with
        patch.setattr(torch.cuda, "is_available", lambda: True)
        transport = NativeTransport(dist.group.WORLD, dist.get_rank(), 2, torch.device("cpu"))
        rows = transport.gather_small(torch.tensor([dist.get_rank(), 7]), channel="call", label="a test")
    return rows.tolist()


def test_small_exchanges_pass_through_the_device_of_the_group():
    assert run_ranks(_gather_ranks, 2) == [[[0, 7], [1, 7]]] * 2


def _named_in_the_log():
    transport = NativeTransport(dist.group.WORLD, dist.get_rank(), 2, torch.device("cpu"))
    flat, out = torch.ones(128), torch.empty(128)
    log.enabled = True
    try:
        how = Reduction(scale=0.5, key=1, label="gradients", limit=1 << 20)
        transport.all_reduce(flat, out=out, how=how).wait()
        return out.sum().item(), list(log.totals)
    finally:
        log.enabled = False
        log.totals.clear()


def test_the_log_takes_arguments_by_name():
    assert run_ranks(_named_in_the_log, 2) == [(128.0, ["all_reduce"])] * 2


def _exact_sum():
    transport = NativeTransport(dist.group.WORLD, dist.get_rank(), 4, torch.device("cpu"))
    transport.sums_exactly = True
    found = []
    for dtype, out_dtype in ((torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32,) * 2):
        # In bf16 256 + 1 is 256, whatever the order of the ranks.
        flat = torch.full((4 * 64,), 256.0 if transport.rank == 2 else 1.0, dtype=dtype)
        out, seen = torch.empty(64, dtype=out_dtype), []
        how = Reduction(scale=0.5, key=1, label="gradients", limit=1 << 20, visit=seen.append)
        with counted() as traffic:
            transport.reduce_scatter(flat, out, how).wait()
        assert torch.equal(torch.cat(seen), out)
        found.append((out.unique().tolist(), {name: tally.nbytes for name, tally in traffic.ran.items()}))
    return found


def test_sums_of_16_bits_round_once():
    exchanged, summed = {"all_to_all_single": 3 * 64 * 2}, {"reduce_scatter_tensor": 4 * 64 * 4}
    expected = [([129.5], exchanged), ([130.0], exchanged), ([129.5], summed)]  # 129.5 is 130 in bf16
    assert run_ranks(_exact_sum, 4) == [expected] * 4


@pytest.mark.parametrize(("setting", "ranks", "is_exact"), [("auto", 64, False), ("auto", 65, True), (True, 2, True)])
def test_which_engines_sum_exactly(setting, ranks, is_exact):
    with simulated_device(ranks=ranks), counted() as traffic:
        engine = engine_at(2, zero={"exact_sums": setting})
        step(engine)
        engine.destroy()
    assert ("all_to_all_single" in traffic.ran, "reduce_scatter_tensor" in traffic.ran) == (is_exact, not is_exact)


def _requested_streams():
    requested = []

    class Device:
        def Event(self):  # noqa: N802 - torch's name
            return SimpleNamespace(record=requested.append)

        def current_stream(self, index):
            return f"stream of device {index}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "get_accelerator", Device)
        transport = NativeTransport(dist.group.WORLD, dist.get_rank(), 2, torch.device("cuda", 1))
        transport.watch = SimpleNamespace(wait=lambda blocking, *_, **__: blocking(), follow=lambda *_: None)
        transport.guard(lambda: None, ("gather", 1), "a gather")
    return requested


def test_waits_are_followed_on_the_stream_of_the_transports_device():
    """A program may have made another device the current one."""
    assert run_ranks(_requested_streams, 2) == [["stream of device 1"]] * 2
