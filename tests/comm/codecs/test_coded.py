"""Reductions and gathers as codes: equal to a simulation in one process, the same bits on all ranks, bounded errors."""

import pytest
import torch

from deepspeed.comm.base.codec import Codec, Residual, coded_nbytes, decode, encode
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.codecs.coded import CodedTransport, coded
from deepspeed.comm.codecs.table import Int4Codec, Int8Codec, SignCodec, WholeSignCodec
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import LocalTransport, Reduction
from tests.engine.support import rank, same_on_all_ranks
from tests.harness import on_ranks

ROUNDS, SLICE = 20, 576
CODECS: tuple[Codec, ...] = (SignCodec(64), WholeSignCodec(), Int8Codec(64), Int4Codec(64))


def values(round_: int, of_rank: int, numel: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(1000 * round_ + of_rank)
    return torch.randn(numel, generator=made) + 0.3


def decoded(codec: Codec, due: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    codes = torch.empty(coded_nbytes(codec, due.numel()), dtype=torch.uint8)
    encode(codec, due, error, codes)
    out = torch.empty_like(due)
    decode(codec, codes, out)
    return out


def simulated(
    codec: Codec, ranks: int, round_: int, sent: torch.Tensor, owned: torch.Tensor, length: int = SLICE
) -> torch.Tensor:
    """The mean over ranks in two stages; ``sent`` and ``owned`` are the errors by rank and by owner."""
    whole = []
    given = [values(round_, of_rank, ranks * length) for of_rank in range(ranks)]
    fitted = [codec.fitted(one, error) for one, error in zip(given, sent, strict=True)]
    for owner in range(ranks):
        total = torch.zeros(length)
        for of_rank in range(ranks):
            place = slice(owner * length, (owner + 1) * length)
            total += decoded(fitted[of_rank], given[of_rank][place], sent[of_rank, place])
        whole.append(decoded(codec, total * (1.0 / ranks), owned[owner]))
    return torch.cat(whole)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_two_stages_equal_the_simulation() -> None:
    plain = Job.adopt().axis_of().transport()
    ranks, numel = plain.size, plain.size * SLICE
    for number, codec in enumerate(CODECS):
        transport = coded(plain, codec)
        assert isinstance(transport, CodedTransport) and not transport.is_exact
        sent, owned = torch.zeros(ranks, numel), torch.zeros(ranks, SLICE)
        mine = Residual(torch.zeros(numel), torch.zeros(SLICE))
        exact = total = torch.zeros(numel)
        before = dict(traffic.ran)
        for round_ in range(ROUNDS):
            seen: list[torch.Tensor] = []
            how = Reduction(
                scale=1.0 / ranks,
                key=4 * (number * ROUNDS + round_) + 1,
                label="the test",
                limit=1 << 20,
                visit=lambda part, seen=seen: seen.append(part.clone()),
                error=mine,
            )
            out = torch.empty(numel)
            transport.all_reduce(values(round_, rank(), numel), out, how).wait()
            assert torch.equal(out, simulated(codec, ranks, round_, sent, owned)), (codec.name, round_)
            assert torch.equal(torch.cat(seen), out)
            exact = exact + sum(values(round_, one, numel) for one in range(ranks)) / ranks
            total = total + out
        assert same_on_all_ranks(out.numpy().tobytes())
        assert torch.equal(mine.sent, sent[rank()]) and torch.equal(mine.owned, owned[rank()])
        # What is still owed is what the errors hold: it does not grow with the rounds.
        owed = sent.mean(dim=0) + owned.reshape(-1)
        torch.testing.assert_close(total + owed, exact, rtol=1e-4, atol=1e-3)
        assert owed.norm() < 3.0 * values(0, 0, numel).norm()
        # Each rank sends its codes of the others' slices, and those of its sum to all others.
        moved = traffic.ran["send"].nbytes - (before["send"].nbytes if "send" in before else 0)
        assert moved == ROUNDS * 2 * (ranks - 1) * coded_nbytes(codec, SLICE), codec.name


@on_ranks(3)
def test_a_gather_overwrites_every_slice() -> None:
    plain = Job.adopt().axis_of().transport()
    for number, codec in enumerate(CODECS):
        transport = coded(plain, codec)
        assert isinstance(transport, CodedTransport)
        every = [values(7, one, SLICE).to(torch.bfloat16) for one in range(plain.size)]
        flat = torch.zeros(plain.size * SLICE, dtype=torch.bfloat16)
        transport.my_slice(flat).copy_(every[rank()])
        transport.all_gather(flat, key=4 * number, label="the test").wait()
        assert torch.equal(flat, torch.cat([transport.as_gathered(one) for one in every]))
        assert same_on_all_ranks(flat.float().numpy().tobytes())
        assert not torch.equal(transport.my_slice(flat), every[rank()])


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
def test_error_feedback_stays_bounded(codec: Codec) -> None:
    """The sum of what came out differs from the sum of the means by no more after 10,000 rounds than after 1,000."""
    ranks, length, total, furthest = 2, 48, torch.zeros(96, dtype=torch.float64), {1_000: 0.0, 10_000: 0.0}
    sent, owned = torch.zeros(ranks, 96), torch.zeros(ranks, length)
    for round_ in range(10_000):
        exact = sum(values(round_, one, 96).double() for one in range(ranks)) / ranks
        total += simulated(codec, ranks, round_, sent, owned, length) - exact
        norm = total.norm().item()
        for rounds in furthest:
            furthest[rounds] = max(furthest[rounds], norm) if round_ < rounds else furthest[rounds]
    assert furthest[10_000] < 1.5 * furthest[1_000] < 1.5 * 6.0 * 96**0.5


def test_nothing_is_coded_where_nothing_is_sent() -> None:
    alone = LocalTransport()
    assert coded(alone, SignCodec()) is alone and alone.is_exact
