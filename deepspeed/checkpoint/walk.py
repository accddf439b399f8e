"""Full tensors out of a model whose parts several groups of ranks hold: brought to the first rank of the job.

The ranks go through the model together, bucket by bucket: those that share one bring its tiles together, the first of
them sends these to the first rank of the job, and that lays them into the logical parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from deepspeed.checkpoint.roster import Listed, Roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.comm.transports.transport import Piece
from deepspeed.zero.access.whole_buckets import bucket_source
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched


@dataclass(frozen=True)
class Step:
    """A tile that travels.

    Attributes:
        listed: Its bucket.
        number: Its place there.
        tile: What it holds.
        completes: Whether all of its logical parameter is there afterwards.
    """

    listed: Listed
    number: int
    tile: Tile
    completes: bool


def rounds(listed: Roster, *, exclude_frozen: bool) -> Iterator[list[Step]]:
    """What travels, in rounds: in each, one bucket of every rank.

    Args:
        listed: The model of all ranks.
        exclude_frozen: Leave parameters without gradient out.
    """
    by_index: dict[int, list[Listed]] = {}
    for entry in listed.listed:
        by_index.setdefault(entry.layout.index, []).append(entry)
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    there: dict[str, int] = {}
    for index in sorted(by_index):
        steps = []
        for entry in by_index[index]:
            for number, (tile, is_frozen) in enumerate(zip(entry.layout.tiles, entry.frozen, strict=True)):
                if exclude_frozen and is_frozen:
                    continue
                seen = held.setdefault(tile.logical, set())
                new = {(box.whole, box.shape): box.numel for box in tile.boxes if (box.whole, box.shape) not in seen}
                seen.update(new)
                total = tile.whole().numel
                before = there.get(tile.logical, 0)
                there[tile.logical] = before + sum(new.values())
                completes = there[tile.logical] == total and (before < total or total == 0)
                steps.append(Step(entry, number, tile, completes))
        yield steps


@torch.no_grad()
def walk_job(run_state: RunState, listed: Roster, *, exclude_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """``(logical name, values)`` on the first rank of the job, nothing elsewhere. Every rank must go through it.

    Args:
        run_state: The training run.
        listed: The model of all ranks.
        exclude_frozen: Leave parameters without gradient out.
    """
    runtime = run_state.runtime
    job, device = runtime.groups.job, runtime.device
    by_index = {bucket.index: bucket for bucket in runtime.buckets}
    wholes: dict[str, torch.Tensor] = {}
    for steps in rounds(listed, exclude_frozen=exclude_frozen):
        if not steps:
            continue
        index = steps[0].listed.layout.index
        mine: dict[int, torch.Tensor] = {}
        if index in by_index and index in listed.numbers:
            with untouched():
                source = bucket_source(runtime, by_index[index], "param")
                assert source is not None
                mine = source.read(range(len(source.layout.tiles)), borrow=True)
        pieces, arrived = [], []
        for step in steps:
            values: torch.Tensor | None = None
            if step.listed.rank == job.rank:
                values = mine[step.number].contiguous().view(-1)
            elif job.rank == 0:
                dtype = getattr(torch, step.listed.layout.dtype)
                values = torch.empty(step.tile.numel, dtype=dtype, device=device)
            if step.listed.rank != 0 and step.tile.numel:
                pieces.append(Piece(step.listed.rank, 0, values))
            arrived.append(values)
        job.move(pieces, label="the parameters of all ranks")
        if job.rank:
            continue
        for step, values in zip(steps, arrived, strict=True):
            assert values is not None
            tile = step.tile
            if tile.part is None:
                yield tile.logical, values.view(tile.shape)
                continue
            whole = wholes.get(tile.logical)
            if whole is None:
                whole = wholes[tile.logical] = torch.empty(tile.global_shape, dtype=values.dtype, device="cpu")
            for box in tile.boxes:
                whole[box.in_whole] = values.view(tile.shape)[box.in_tile].to(whole.device)
            if step.completes:
                yield tile.logical, wholes.pop(tile.logical)
