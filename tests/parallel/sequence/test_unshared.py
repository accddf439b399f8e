"""A model of one's own that attends to its own part of a sequence only is found in its first forward."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

import deepspeed
from deepspeed.comm.base.torch_groups import counts_sends
from deepspeed.comm.job.job import Job, axis_of
from deepspeed.comm.transports.transport import TensorTransfer
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
from deepspeed.parallel.sequence.loss import mean_loss
from deepspeed.parallel.sequence.unshared import program_calls
from tests.engine.support import SHARDED
from tests.harness import on_ranks
from tests.parallel.sequence.net import Net, batch, cut


class Scores(torch.nn.Module):
    """Attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return torch.softmax(query @ key.transpose(1, 2), -1) @ value


class ScoresOfAll(Scores):
    """The same, on keys and values that the program gathers by itself."""

    def __init__(self, gather: Callable[..., None]) -> None:
        super().__init__()
        self.gather = gather

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        everything = [torch.empty_like(x) for _ in range(2)]
        self.gather(everything, x.contiguous())
        return super().forward(torch.cat(everything, 1))


class ScoresOfRing(Scores):
    """The same, on the sum of tokens that go round the ranks by ``send`` and ``recv``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        theirs, other = torch.empty_like(x), 1 - dist.get_rank()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, theirs, other)])
        for work in works:
            work.wait()
        return super().forward(x + theirs)


class ScoresAfterCollection(Scores):
    """The same, while the transports of a destroyed engine are collected: their counts go with them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return super().forward(x)


class ScoresAndLoss(Scores):
    """Attention to its own part, and a loss over whole sequences, which is no exchange of tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mean_loss(super().forward(x).mean(-1), torch.zeros(x.shape[:2]), dist.group.WORLD)


class Warnings(logging.Handler):
    """Keeps the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(2)
def test_a_model_that_exchanges_nothing_is_found() -> None:
    rank, seen = dist.get_rank(), Warnings()
    logger.addHandler(seen)
    part = cut(batch(0), rank, 2)
    tokens, hidden = (part["ids"], part["positions"]), torch.ones(2, 8, 8)
    own_group = dist.new_group([0, 1])
    for stage in (0, 3):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "sequence_parallel_size": 2,
            "zero_optimization": {"stage": stage, **(SHARDED if stage == 3 else {})},
        }
        for make, inputs, attends in (
            (Net, tokens, True),
            (Scores, (hidden,), True),
            (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True), (hidden, hidden, hidden), True),
            (lambda: torch.nn.Linear(8, 8), (hidden,), False),
            (lambda: Net(group=dist.group.WORLD), tokens, None),
            (lambda: ScoresOfAll(dist.all_gather), (hidden,), None),
            (lambda: ScoresOfAll(partial(deepspeed.comm.all_gather, group=own_group)), (hidden,), None),
            (ScoresAndLoss, (hidden,), True),
            (ScoresAfterCollection, (hidden,), True),
        ):
            engine = deepspeed.initialize(model=make(), config=config)[0]
            seen.texts.clear()
            if attends:
                with pytest.raises(DeepSpeedConfigError, match=r"sequence_parallel_size 2: .*DistributedAttention"):
                    engine(*inputs)
            else:
                engine(*inputs)
                warned = any("no exchange was found in its first forward" in text for text in seen.texts)
                assert warned == (attends is False and rank == 0), (stage, seen.texts)
            engine(*inputs)  # only the first forward is observed
            engine.destroy()


@on_ranks(2)
def test_sends_and_recvs_are_an_exchange_where_torch_does_not_count_them() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "sequence_parallel_size": 2, "zero_optimization": {"stage": 0}}
    hidden = torch.ones(2, 8, 8)
    # As on NCCL, whose groups count collectives only.
    with (
        mock.patch("deepspeed.parallel.sequence.unshared.operations_of", lambda group: 0),
        mock.patch("deepspeed.parallel.sequence.unshared.counts_sends", lambda group, device: False),
    ):
        for make in (ScoresOfRing, Scores):
            engine = deepspeed.initialize(model=make(), config=config)[0]
            if make is ScoresOfRing:
                assert engine(hidden).shape == (2, 8, 8)
            else:
                with pytest.raises(DeepSpeedConfigError, match="exchanged nothing"):
                    engine(hidden)
            engine.destroy()


@on_ranks(2)
def test_calls_of_the_program_are_counted_apart_from_transfers_of_the_package() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    # A backend for each device, as of cpu:gloo,cuda:nccl. Torch itself counts nothing for such a group.
    make = lambda store, rank, size, timeout: dist.ProcessGroupGloo(store, rank, size, timeout)  # noqa: E731
    dist.Backend.register_backend("gloo_too", make, devices=["cuda"])
    mixed = dist.new_group([0, 1], backend="cpu:gloo,cuda:gloo_too")
    assert mixed._get_backend_name() == "undefined"
    begin, transport = program_calls(Job.adopt(), [0, 1]), Job.adopt().connector.over(mixed, None)
    channel = axis_of(world, "sequence").channel(torch.device("cpu"))
    channel.sum(torch.ones(3), "a sum")
    transport.broadcast(torch.ones(3), 0, label="values")
    transport.move([TensorTransfer(0, 1, torch.ones(3))], label="values")
    assert program_calls(Job.adopt(), [0, 1]) == begin
    dist.all_reduce(torch.ones(3), group=mixed)
    assert program_calls(Job.adopt(), [0, 1]) == begin + 1
    (dist.send if rank == 0 else dist.recv)(torch.ones(3), 1 - rank)
    assert program_calls(Job.adopt(), [0, 1]) == begin + 2
    assert counts_sends(mixed, torch.device("cpu"))
    dist.new_group([0, 1], backend="fake")
    assert program_calls(Job.adopt(), [0, 1]) is None  # this backend counts nothing
    assert program_calls(Job.adopt(), [rank]) == 0  # no group lies within one rank
