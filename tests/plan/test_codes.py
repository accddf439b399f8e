"""Compares bytes by formula with the traffic counters, for every codec and number of ranks; tests when codes pay."""

import pytest
import torch

from deepspeed.accelerator.devices import Device
from deepspeed.comm.base.counters import counted
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.table import BlockCodec, Int4Codec, Int8Codec, SignCodec
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction
from deepspeed.plan.codes import CodedCost, PlannedSum, coded_costs
from deepspeed.plan.machine import Machine
from tests.harness import on_ranks

CODECS: tuple[BlockCodec, ...] = (SignCodec(2048), Int8Codec(256), Int4Codec(256))


def costs(numel: int, ranks: int, whole: bool, network: float = 1e9) -> list[CodedCost]:
    """Returns the cost of one bf16 sum between ranks on nodes of their own, without a codec and with each."""
    machine = Machine(Device("cpu", 0, 0.0, 0.0, 0.0, 0.0, "the test"), ranks, 1, 0, network=network)
    one = PlannedSum(numel, tuple(range(ranks)), 0, whole, 16, 1, 0)
    return coded_costs([one], machine, native=False, may_skip=False, codecs=CODECS)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_bytes_by_formula_equal_the_counted_bytes() -> None:
    plain = Job.adopt().axis_of().transport()
    numel = 6 * 2048 * plain.size
    for number, codec in enumerate((None, *CODECS)):
        for whole in (False, True):
            transport, out = coded(plain, codec), torch.empty(numel if whole else numel // plain.size)
            with counted() as traffic:
                how = Reduction(1.0, 8 * number + 4 * whole + 1, "the test", numel)
                flat = torch.randn(numel).bfloat16()
                (transport.all_reduce if whole else transport.reduce_scatter)(flat, out, how).wait()
                moved = traffic.ran["send"].nbytes
            cost = costs(numel, plain.size, whole)[number]
            assert moved == pytest.approx(cost.nbytes, rel=1e-3), (cost, whole)


def test_when_codes_pay() -> None:
    pays = {}
    for speed in (1e8, 1e9, 1e10, 1e12):
        plain, *rows = costs(20_000_000, 4, whole=True, network=speed / 8)
        pays |= {(speed, row.name): row.seconds < plain.seconds for row in rows}
    assert all(pays[speed, codec.name] for speed in (1e8, 1e9) for codec in CODECS)
    assert not any(pays[1e12, codec.name] for codec in CODECS)
