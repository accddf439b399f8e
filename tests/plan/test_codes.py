"""Bytes by formula are those of the books, for every way and number of ranks; and when codes pay."""

from __future__ import annotations

import pytest
import torch

from deepspeed.comm.codecs.codec import CHUNK, coded_nbytes
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.table import BlockCodec, Int4Codec, Int8Codec, SignCodec
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.counters import counted
from deepspeed.comm.transports.transport import Reduction
from deepspeed.plan.codes import CodecCost, NetworkLink, exchange_seconds, plain_bits_sent, sent_bytes
from tests.harness import run_ranks

CODECS: tuple[BlockCodec, ...] = (SignCodec(2048), Int8Codec(256), Int4Codec(256))
# Nanoseconds of one core, as benchmarks/compression.py measures them.
TIMES = {"sign": (3.2, 0.8), "int8": (1.9, 0.5), "int4": (4.2, 1.2)}


def way_of(codec: BlockCodec) -> CodecCost:
    return CodecCost(codec.name, 8 * coded_nbytes(codec, CHUNK) / CHUNK, *TIMES[codec.name])


def books() -> None:
    plain = Job.current().axis_of().transport()
    numel = 6 * 2048 * plain.size
    for number, codec in enumerate((None, *CODECS)):
        for whole in (False, True):
            transport, out = coded(plain, codec), torch.empty(numel if whole else numel // plain.size)
            with counted() as traffic:
                how = Reduction(1.0, 8 * number + 4 * whole + 1, "the test", numel)
                flat = torch.randn(numel).bfloat16()
                (transport.all_reduce if whole else transport.reduce_scatter)(flat, out, how).wait()
                moved = traffic.ran["send"].nbytes
            bits = plain_bits_sent(16, plain.size, whole=whole)
            way = CodecCost("plain", bits, 0.0, 0.0) if codec is None else way_of(codec)
            assert moved == pytest.approx(sent_bytes(numel, plain.size, way, whole=whole), rel=1e-3), (way, whole)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_by_formula_are_those_of_the_books(ranks: int) -> None:
    run_ranks(books, ranks)


def test_when_codes_pay() -> None:
    plain = CodecCost("plain", plain_bits_sent(16, 4, whole=True), 0.0, 0.0)
    pays = {
        (speed, codec.name): exchange_seconds(20_000_000, 4, NetworkLink(speed / 8), way_of(codec), whole=True)
        < exchange_seconds(20_000_000, 4, NetworkLink(speed / 8), plain, whole=True)
        for speed in (1e8, 1e9, 1e10, 1e12)
        for codec in CODECS
    }
    assert all(pays[speed, codec.name] for speed in (1e8, 1e9) for codec in CODECS)
    assert not any(pays[1e12, codec.name] for codec in CODECS)
