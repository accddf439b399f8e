"""The transport over a backend's own collectives, here gloo's: small exchanges use the device that they were given."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.base.recorder import log
from deepspeed.comm.transports import native
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import Reduction
from tests.harness import run_ranks


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
