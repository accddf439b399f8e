"""Full tensors out of a running engine: brought together bucket by bucket, kept or written on rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.roster import Roster, roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.walk import rounds, walk_job
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter
from deepspeed.zero.access.whole_buckets import walk_full


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
        # After a failure rank 0 goes on, because the others wait for it.
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
