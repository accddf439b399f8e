"""Rows of zeros beside codes that cannot say 0: they arrive as zeros, and error feedback stays 0."""

import torch

from deepspeed.comm.base.codec import Residual
from deepspeed.comm.base.zero_rows import ZeroRows, row_starts
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.table import SignCodec, WholeSignCodec
from deepspeed.comm.job.job import Job
from deepspeed.comm.transports.transport import Reduction
from tests.engine.support import rank, same_on_all_ranks
from tests.harness import on_ranks


def test_rows_of_tensors() -> None:
    # A matrix of 3 rows, a gap, a vector, a gap at the end; a column is one row.
    assert row_starts([0, 16, 24], [(3, 5), (4,), (3, 1)], 32) == [0, 5, 10, 15, 16, 20, 24, 27]
    assert row_starts([0], [()], 4) == [0, 1]


def test_marks_are_those_of_the_rows() -> None:
    rows = ZeroRows([0, 5, 10, 15], 20, 2, torch.device("cpu"))
    flags = torch.zeros(1, rows.nbytes, dtype=torch.uint8)
    values, error = torch.zeros(1, 10), torch.zeros(1, 10)
    values[0, 7] = 1.0
    mask = rows.write(0, values, error, flags)
    assert mask is not None and mask[0].tolist() == [False] * 5 + [True] * 5
    error[0, 2] = -1.0
    assert rows.write(0, values, error, flags) is None  # all of them
    assert rows.write(1, torch.ones(1, 10), None, flags) is None
    values.zero_()
    values[0, 0] = float("nan")
    mask = rows.write(1, values, None, flags)
    assert mask is not None and mask[0].tolist() == [True] * 5 + [False] * 5


def test_elements_of_rows_that_are_not_zeros() -> None:
    rows = ZeroRows([0, 5, 7, 10, 16], 20, 2, torch.device("cpu"))
    flat = torch.zeros(20)
    flat[[6, 11, 17]] = 1.0
    numbers = rows.numbers(flat)
    assert numbers.tolist() == [1, 3, 4]
    assert rows.elements(numbers).tolist() == [5, 6, *range(10, 20)]
    assert rows.per_slice(numbers) == [(1, 2), (2, 10)]


@on_ranks(2)
def test_rows_of_zeros_stay_zeros() -> None:
    plain = Job.adopt().axis_of().transport()
    width, count = 12, 8 * plain.size  # rows, some of which two slices share
    numel = width * count
    for number, codec in enumerate((SignCodec(64), WholeSignCodec())):
        transport = coded(plain, codec)
        error = Residual(torch.zeros(numel), torch.zeros(numel // plain.size))
        rows = ZeroRows(range(0, numel, width), numel, plain.size, torch.device("cpu"))
        total = torch.zeros(count, width)
        for round_ in range(5):
            made = torch.Generator().manual_seed(10 * round_ + rank())
            values = torch.randn(count, width, generator=made)
            values[::3] = 0.0  # on all ranks
            values[1 + rank()] = 0.0  # on this one
            how = Reduction(
                scale=0.5, key=4 * (10 * number + round_), label="the test", limit=1 << 20, error=error, rows=rows
            )
            out = torch.empty(numel)
            transport.all_reduce(values.view(-1), out, how).wait()
            assert not bool(out.view(count, width)[::3].any())
            assert bool((out.view(count, width)[1] != 0).all())
            total += out.view(count, width)
        assert same_on_all_ranks(total.numpy().tobytes())
        kept = error.sent.view(count, width)
        assert not bool(kept[::3].any()) and not bool(kept[1 + rank()].any()) and bool(kept[4].any())
