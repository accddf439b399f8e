"""A model of one's own that attends to its own part of a sequence only is found in its first forward."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import logger
from tests.engine.support import SHARDED
from tests.harness import run_ranks
from tests.sequence.net import Net, batch, cut


class Scores(torch.nn.Module):
    """Attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        return torch.softmax(query @ key.transpose(1, 2), -1) @ value


class Warnings(logging.Handler):
    """Keeps the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _first_forwards() -> None:
    rank, seen = dist.get_rank(), Warnings()
    logger.addHandler(seen)
    part = cut(batch(0), rank, 2)
    tokens, hidden = (part["ids"], part["positions"]), torch.ones(2, 8, 8)
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
        ):
            engine = deepspeed.initialize(model=make(), config=config)[0]
            seen.texts.clear()
            if attends and stage == 0:
                with pytest.raises(DeepSpeedConfigError, match=r"sequence_parallel_size 2: .*DistributedAttention"):
                    engine(*inputs)
            else:
                engine(*inputs)
                # At stage 3 the group's count of collectives includes what ZeRO gathers: no proof, so a warning.
                warned = any("exchanged nothing through deepspeed.sequence" in text for text in seen.texts)
                assert warned == (attends is not None and rank == 0), (stage, seen.texts)
            engine(*inputs)  # only the first forward is observed
            engine.destroy()


def test_a_model_that_exchanges_nothing_is_found():
    run_ranks(_first_forwards, 2)
