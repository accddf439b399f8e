"""The transport over a backend's own collectives, here gloo's: small exchanges use the device that they were given."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from deepspeed.comm.recorder import log
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.comm.transports.transport import Reduction
from tests.harness import run_ranks


def _tell():
    with pytest.MonkeyPatch.context() as patch:  # a GPU that the group has nothing to do with
        patch.setattr(torch.cuda, "is_available", lambda: True)
        transport = NativeTransport(dist.group.WORLD, dist.get_rank(), 2, torch.device("cpu"))
        rows = transport.gather_small(torch.tensor([dist.get_rank(), 7]), channel="call", label="a test")
    return rows.tolist()


def test_small_exchanges_pass_through_the_device_of_the_group():
    assert run_ranks(_tell, 2) == [[[0, 7], [1, 7]]] * 2


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
