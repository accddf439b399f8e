"""How single parameters are cut (``parallel.tensor.making``)."""

import pytest
import torch
from torch import nn

from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.parallel.tensor.layout import ParameterCut
from deepspeed.parallel.tensor.making import cut_parameter
from deepspeed.parallel.tensor.split import Split
from deepspeed.zero.address import address_of
from deepspeed.zero.construction.provisional import shard_parameters
from deepspeed.zero.group import BucketGroup
from tests.harness.loopback import LoopbackTransport, run_threads


@pytest.mark.parametrize(("group", "expected"), [(None, "cut"), ("experts", "experts")])
def test_a_sharded_parameter_is_sharded_again_in_the_group_of_its_parts(group: str | None, expected: str) -> None:
    """A later ``initialize`` refuses parameters that were sharded over a group of another name and other ranks."""
    whole = ParameterCut("up", (4, 2), 0, Split.evenly(4, 1))

    def body(transport: LoopbackTransport) -> tuple[str, str]:
        parameter, cpu = nn.Parameter(torch.ones(4, 2)), torch.device("cpu")
        data = BucketGroup.over(transport)
        shard_parameters([parameter], ["up"], group=data, device=cpu, dtype=None, shard_device=cpu)
        cut_parameter(parameter, whole, "up", Channel(LocalTransport()), group, transport)
        address = address_of(parameter)
        assert address is not None
        return address.bucket.group.name, address.bucket.layout.group

    assert run_threads(body, 2) == [(expected, expected)] * 2
