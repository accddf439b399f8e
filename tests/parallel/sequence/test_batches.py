"""What the loader adapter gives each rank: all samples once, cut, padded and with the next token's label."""

import re

import pytest
import torch
import torch.distributed as dist

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.batches import describe_batch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter
from tests.harness import on_ranks, run_ranks


def _row(number, length):
    ids = 100 * number + torch.arange(length)
    return {"input_ids": ids[None], "labels": ids[None].clone(), "name": f"text {number}"}


def _adapter(rows):
    return UlyssesSPDataLoaderAdapter(rows, dist.get_rank(), dist.group.WORLD, dist.get_world_size(), "cpu")


def _cuts(capture):
    rank, size = dist.get_rank(), dist.get_world_size()
    # Lengths that differ, that the ranks do not divide, and one rank whose loader is shorter.
    rows = [_row(10 * rank + number, 5 + rank) for number in range(3 - rank)]
    adapter = _adapter(rows)
    assert len(adapter) == size * len(rows) and iter(adapter) is adapter
    for _epoch in range(2):
        batches = list(adapter)
        assert [batch["name"] for batch in batches] == ["text 0", "text 10", "text 1", "text 11"]
        for batch in batches:
            assert set(batch) == {"input_ids", "position_ids", "shift_labels", "name"}
            number = int(batch["name"].split()[1])
            length = 5 + number // 10
            ids = torch.cat((100 * number + torch.arange(length), torch.zeros(6 - length, dtype=torch.int64)))
            labels = torch.cat((ids[1:length], torch.full((7 - length,), -100)))
            mine = slice(3 * rank, 3 * rank + 3)
            assert torch.equal(batch["input_ids"], ids[None, mine])
            assert torch.equal(batch["shift_labels"], labels[None, mine])
            places = torch.cat((torch.arange(length), torch.arange(6 - length)))  # padding is a document of its own
            assert torch.equal(batch["position_ids"], places[None, mine])
    # The same entries in another order.
    turned = {name: _row(rank, 4)[name] for name in (("labels", "input_ids") if rank else ("input_ids", "labels"))}
    first, second = _adapter([turned])
    assert (first["input_ids"] < 100).all() and (second["input_ids"] >= 100).all()
    wrong = _row(rank, 4)
    if rank == 1:
        wrong["labels"] = wrong["labels"][:, :3]
    with pytest.raises(DeepSpeedConfigError, match=re.escape("found labels (1, 3); take other entries")):
        next(_adapter([wrong]))
    with pytest.raises(DeepSpeedConfigError, match="different entries: input_ids int64, position_ids int64, shift"):
        next(_adapter([{name: value for name, value in _row(rank, 4).items() if name != "labels" or rank == 0}]))


@on_ranks(2)
def test_every_pass_skips_the_same_batches() -> None:
    rank = dist.get_rank()
    rows = [_row(10 * rank + number, 4) for number in range(3)]
    adapter = _adapter(rows).skipping(3, lambda loader, count: loader[count:])
    for _epoch in range(2):
        names = []
        for batch in adapter:
            names.append(batch["name"])
            assert len(adapter) == 3
        assert names == ["text 11", "text 2", "text 12"]


def test_batches_are_cut(capfd):
    run_ranks(_cuts, 2, None)


def _same_samples():
    from deepspeed import logging as ours

    logs = []
    ours.logger.addHandler(type("Kept", (__import__("logging").Handler,), {"emit": lambda _, r: logs.append(r.msg)})())
    list(_adapter([_row(0, 5)]))
    return logs


def test_labels_are_a_tensor_or_none():
    ids = torch.ones(2, 3, dtype=torch.int64)
    without, tensors = describe_batch({"input_ids": ids, "labels": None}, 2)
    assert not without.problem and "shift_labels" not in tensors
    wrong, _ = describe_batch({"input_ids": ids, "labels": [[1, 1, 1]] * 2}, 2)
    assert "expected labels as a tensor, found list" in wrong.problem  # and no exception, which other ranks await


def test_the_same_samples_on_all_ranks_are_remarked():
    logs = run_ranks(_same_samples, 2)[0]
    assert any("brought the same samples, so each sample is used 2 times" in line for line in logs)
    assert any("padded at the end" in line for line in logs)
