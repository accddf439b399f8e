"""Full tensors out of a running engine: brought together bucket by bucket, kept or written on rank 0.

Of a model whose parts several groups of ranks hold, full tensors are brought to the first rank of the job. The ranks go
through the model together, bucket by bucket: those that share one bring its tiles together, the first of them sends
these to the first rank of the job, and that lays them into the logical parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.roster import Listed, Roster, roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter
from deepspeed.comm.transports.transport import TensorTransfer
from deepspeed.zero.access.whole_buckets import bucket_source, walk_full
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched


def full_state_dict(run_state: RunState, exchange: Exchange, *, exclude_frozen: bool) -> dict[str, Any] | None:
    """The model's state dict with full parameters in their compute dtype, in host memory. Every rank must call it.

    Args:
        run_state: The training run.
        exchange: The ranks; only rank 0 keeps the values.
        exclude_frozen: Leave frozen parameters out.

    Returns:
        On rank 0 copies of which each owns its storage, but for tied ones, which are one tensor; None elsewhere.
    """
    listed = roster(run_state, exchange)
    found: dict[str, torch.Tensor] = {}
    for names, values in _walk(run_state, listed, exclude_frozen=exclude_frozen):
        if exchange.rank == 0:
            copied = values.to("cpu", copy=True, memory_format=torch.contiguous_format)
            found.update(dict.fromkeys(names, copied))
    if exchange.rank != 0:
        return None
    state: dict[str, Any] = {key: found.pop(key) for key in run_state.state_dict_names() if key in found}
    return {**state, **found, **listed.extra_state, **run_state.extra_state()}


def write_weights(
    run_state: RunState, exchange: Exchange, folder: Path, filename: str, *, exclude_frozen: bool, limit: int | None
) -> None:
    """Writes the full parameters, in their compute dtype, for other programs. Every rank must call it.

    Args:
        run_state: The training run.
        exchange: The ranks.
        folder: Made if it is not there; only rank 0 writes.
        filename: Ends in ``.safetensors`` for that format.
        exclude_frozen: Leave frozen parameters out.
        limit: Largest file in bytes; None for one file.

    Raises:
        CheckpointError: Rank 0 could not write; the same on all ranks.
    """
    listed = roster(run_state, exchange)
    entries = _entries(run_state, listed, exclude_frozen)
    writer: WeightsWriter | None = None
    failure: BaseException | None = None
    if exchange.rank == 0:
        try:
            writer = WeightsWriter(folder, filename, entries, limit)
        except Exception as error:  # whatever it is, the other ranks must hear of it instead of waiting
            failure = error
    waiting = iter(entries)
    for names, values in _walk(run_state, listed, exclude_frozen=exclude_frozen):
        # After a failure rank 0 continues, because the others wait for it.
        for _ in names:
            entry = next(waiting)
            if writer is not None and failure is None:
                try:
                    writer.add(entry, iter([values.detach().to("cpu").contiguous().reshape(-1)]))
                except Exception as error:  # torch tells of a full disk by a RuntimeError
                    failure = error

    def finish() -> None:
        if failure is not None:
            if writer is not None:
                writer.abandon()
            raise failure
        if writer is not None:
            writer.finish()

    exchange.together(f"writing {folder / filename}", finish)


def iter_weights(
    run_state: RunState, exchange: Exchange, *, dtype: torch.dtype | None, exclude_frozen: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams the full parameters and saved buffers, one at a time. Every rank must go through it.

    Args:
        run_state: The training run.
        exchange: The ranks.
        dtype: Of floating parameters; None: their compute dtype.
        exclude_frozen: Leave frozen parameters out.

    Yields:
        On rank 0 ``(name, values)``, a copy; tied parameters once. Nothing on other ranks.
    """
    buffers = run_state.buffers().keys()
    for names, values in _walk(run_state, roster(run_state, exchange), exclude_frozen=exclude_frozen):
        if exchange.rank != 0:
            continue
        is_cast = values.is_floating_point() and names[0] not in buffers
        wanted = dtype if is_cast and dtype is not None else values.dtype
        # What the walk gives is the model's own memory, or memory that the next bucket overwrites.
        yield names[0], values.detach().to(wanted, copy=True)


def _walk(run_state: RunState, listed: Roster, *, exclude_frozen: bool) -> Iterator[tuple[list[str], torch.Tensor]]:
    """``(all names, values)`` of every parameter and buffer; valid until the next. Every rank must go through it.

    Where not all ranks have the whole model, only the first one of the job gets to see anything.
    """
    tied = _tied(listed)
    for name, values in _parameters(run_state, listed, exclude_frozen):
        yield [name, *tied.get(name, ())], values
    if run_state.is_one_part or run_state.runtime.groups.job.rank == 0:
        for name, buffer in run_state.buffers().items():
            yield [name, *tied.get(name, ())], buffer


def _parameters(run_state: RunState, listed: Roster, exclude_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
    if not run_state.is_one_part or any(entry.layout.has_parts for entry in listed.listed):
        yield from walk_job(run_state, listed, exclude_frozen=exclude_frozen)
        return
    frozen = {name for parameter, name in run_state.runtime.param_names.items() if not parameter.requires_grad}
    for tile, values in walk_full(run_state.runtime, "param", left_out=frozen if exclude_frozen else (), borrow=True):
        yield tile.logical, values


def _tied(listed: Roster) -> dict[str, list[str]]:
    tied: dict[str, list[str]] = {}
    for alias, name in listed.aliases.items():
        tied.setdefault(name, []).append(alias)
    return tied


def _entries(run_state: RunState, listed: Roster, exclude_frozen: bool) -> list[TensorEntry]:
    """Returns what :func:`_walk` will yield, one entry per name."""
    tied = _tied(listed)
    found: list[TensorEntry] = []

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        found.append(TensorEntry(name, dtype, shape))
        found.extend(TensorEntry(alias, dtype, shape, same_as=name) for alias in tied.get(name, ()))

    for steps in rounds(listed, exclude_frozen=exclude_frozen):
        for step in steps:
            if step.completes:
                add(step.tile.logical, getattr(torch, step.listed.layout.dtype), step.tile.global_shape)
    for name, buffer in run_state.buffers().items():
        add(name, buffer.dtype, tuple(buffer.shape))
    return found


@dataclass(frozen=True)
class Step:
    """One tile on its way to rank 0.

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
    """Yields what is sent, in rounds: in each, one bucket of every rank.

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
                new = {
                    (region.whole, region.shape): region.numel
                    for region in tile.regions
                    if (region.whole, region.shape) not in seen
                }
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
        transfers, arrived = [], []
        for step in steps:
            values: torch.Tensor | None = None
            if step.listed.rank == job.rank:
                values = mine[step.number].contiguous().view(-1)
            elif job.rank == 0:
                dtype = getattr(torch, step.listed.layout.dtype)
                values = torch.empty(step.tile.numel, dtype=dtype, device=device)
            if step.listed.rank != 0 and step.tile.numel:
                transfers.append(TensorTransfer(step.listed.rank, 0, values))
            arrived.append(values)
        job.move(transfers, label="the parameters of all ranks")
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
            for region in tile.regions:
                whole[region.in_whole] = values.view(tile.shape)[region.in_tile].to(whole.device)
            if step.completes:
                yield tile.logical, wholes.pop(tile.logical)
