"""Exports full tensors from a running engine: gathers a few at a time, and keeps or writes them on rank 0.

If several groups of ranks hold parts of the model, full tensors are assembled on the first rank of the job. All ranks
walk through the model together, in parts of buckets: the ranks of a bucket gather its tiles, the first of them sends
these to the first rank of the job, which assembles the logical parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.roster import Listed, Roster, roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.weight_formats import WeightInfo, in_format
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter
from deepspeed.comm.transports.transport import TensorTransfer
from deepspeed.models.tensor_rules import TensorRule
from deepspeed.zero.access.whole_buckets import bucket_source, tile_windows, walk_full
from deepspeed.zero.address import showing_wholes
from deepspeed.zero.storage import dense
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched

GATHERED_BYTES = 2**26
"""Most bytes that are gathered at once; a larger tensor is gathered alone."""


def full_state_dict(run_state: RunState, exchange: Exchange, *, exclude_frozen: bool) -> dict[str, Any] | None:
    """Returns the model's state dict with full parameters in their compute dtype, in host memory.

    Every rank must call it.

    Returns:
        On rank 0 copies of which each owns its storage, but for tied ones, which are one tensor; None elsewhere.
    """
    listed = roster(run_state, exchange)
    buffers = _all_buffers(run_state, listed, exchange)
    found: dict[str, torch.Tensor] = {}
    for names, values in _walk(run_state, listed, buffers, left_out=_frozen(listed, exclude_frozen)):
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
    """Writes full compute parameters, in files of ``limit`` bytes (None: one file). Every rank must call it.

    Raises:
        CheckpointError: Rank 0 could not write; the same on all ranks.
    """
    listed = roster(run_state, exchange)
    buffers = _all_buffers(run_state, listed, exchange)
    entries = _entries(listed, buffers, _frozen(listed, exclude_frozen))
    writer: WeightsWriter | None = None
    failure: BaseException | None = None
    if exchange.rank == 0:
        try:
            writer = WeightsWriter(folder, filename, entries, limit)
        except Exception as error:  # whatever it is, the other ranks must receive it instead of waiting
            failure = error
    waiting = iter(entries)
    for names, values in _walk(run_state, listed, buffers, left_out=_frozen(listed, exclude_frozen)):
        # After a failure rank 0 continues, because the others wait for it.
        for _ in names:
            entry = next(waiting)
            if writer is not None and failure is None:
                try:
                    writer.add(entry, iter([dense(values.detach().to("cpu")).reshape(-1)]))
                except Exception as error:  # torch raises RuntimeError for a full disk
                    failure = error

    def finish() -> None:
        try:
            if failure is not None:
                raise failure
            if writer is not None:
                writer.finish()
        except BaseException:
            if writer is not None:
                writer.abandon()
            raise

    exchange.together(f"writing {folder / filename}", finish)


@dataclass(frozen=True)
class ExportOptions:
    """Names, dtype and selection of exported weights."""

    dtype: torch.dtype | str | None  # see ``weight_formats.in_format``; buffers stay as they are
    rounded: frozenset[str]  # the weights that a format rounds
    # each returns, for the names of all tensors, the conversions of some of them; the next one gets the results' names
    levels: Sequence[Callable[[Collection[str]], list[TensorRule]]]
    rename: Callable[[str], str | None]  # returns the name to yield at last; None leaves a tensor out
    exclude_frozen: bool  # leave parameters without gradient out


def iter_weights(
    run_state: RunState,
    exchange: Exchange,
    form: ExportOptions,
    *,
    everywhere: bool,
    gathered_bytes: int = GATHERED_BYTES,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Streams the full parameters and saved buffers, one at a time. Every rank must go through it.

    Args:
        everywhere: Yield on every rank, with the bits of rank 0; else on rank 0 only.
        gathered_bytes: Most bytes that are gathered at once; a larger tensor is gathered alone.

    Yields:
        ``(name, values)``, a copy; tied parameters once.
    """
    listed = roster(run_state, exchange)
    buffers = _all_buffers(run_state, listed, exchange)
    everyone = exchange if everywhere else None
    routes = _routes(listed, buffers, form)
    firsts = {route.sources[0]: route for route in routes}
    left_out = {entry.name for entry in _entries(listed, buffers, frozenset())} - firsts.keys()
    for names, values in _walk(
        run_state, listed, buffers, left_out=left_out, gathered_bytes=gathered_bytes, everyone=everyone
    ):
        route = firsts[names[0]]
        tensors = {names[0]: values}
        if len(route.sources) > 1:
            others = frozenset(route.sources[1:])
            tensors.update(_fetch(run_state, listed, buffers, others, everyone, values))
        if everywhere or exchange.rank == 0:
            # The walk yields views of the model's memory, or of memory that the next tensors overwrite.
            yield from route.results(tensors, form, names[0] in buffers)
        del values, tensors  # views of what was gathered, which must be free before more is


def weight_infos(run_state: RunState, exchange: Exchange, form: ExportOptions) -> list[WeightInfo]:
    """Returns what :func:`iter_weights` yields, without values.

    Communicates only where ranks hold different parts of the model; every rank must call it then.
    """
    listed = roster(run_state, exchange)
    buffers = _all_buffers(run_state, listed, exchange)
    return [
        WeightInfo(name, values.dtype, tuple(values.shape), values.nbytes)
        for route in _routes(listed, buffers, form)
        for name, values in route.results(dict(route.shapes), form, route.sources[0] in buffers)
    ]


@dataclass(eq=False)
class _Route:
    """Converts tensors of a model that must be converted together, for an export."""

    sources: list[str]  # tensors of the model, in the order of the walk
    shapes: dict[str, torch.Tensor]  # these on ``meta``
    conversions: list[TensorRule]  # in order
    names: set[str]  # of the results so far
    rounded: set[str]  # those of them that a format rounds

    def results(
        self, tensors: dict[str, torch.Tensor], form: ExportOptions, is_buffer: bool
    ) -> Iterator[tuple[str, Any]]:
        """Yields the results, copied, of the sources by name; ``tensors`` is emptied."""
        for conversion in self.conversions:
            with showing_wholes():  # some conversions look at shapes of the model's parameters
                tensors.update(conversion.convert({name: tensors.pop(name) for name in conversion.inputs}))
        for result in list(tensors):
            wanted, values = form.rename(result), tensors.pop(result)
            if wanted is not None:
                for name, copied in in_format(result, values, None if is_buffer else form.dtype, self.rounded):
                    yield _renamed(name, result, wanted), copied


def _routes(listed: Roster, buffers: dict[str, torch.Tensor], form: ExportOptions) -> list[_Route]:
    """Returns the routes of all tensors that leave, in the order of the walk."""
    frozen = _frozen(listed, form.exclude_frozen)
    routes: dict[str, _Route] = {}  # by the name of a result
    shapes: dict[str, torch.Tensor] = {}
    for entry in _entries(listed, buffers, frozenset()):
        if entry.same_as is None:
            shapes[entry.name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            routes[entry.name] = _Route(
                [entry.name], {entry.name: shapes[entry.name]}, [], {entry.name}, {entry.name} & form.rounded
            )
    order = {name: number for number, name in enumerate(shapes)}
    for level in form.levels:
        for conversion in level(list(shapes)):
            joined = list(dict.fromkeys(routes[name] for name in conversion.inputs))
            route = joined[0]
            for other in joined[1:]:
                route.sources += other.sources
                route.shapes |= other.shapes
                route.conversions += other.conversions
                route.names |= other.names
                route.rounded |= other.rounded
            route.conversions.append(conversion)
            route.sources.sort(key=order.__getitem__)
            matrices = [name for name in conversion.inputs if shapes[name].dim() > 1]
            is_rounded = bool(matrices) and route.rounded.issuperset(matrices)
            with showing_wholes():
                made = conversion.convert({name: shapes.pop(name) for name in conversion.inputs})
            shapes.update(made)
            route.names = route.names.difference(conversion.inputs).union(made)
            if is_rounded:
                route.rounded |= {name for name, values in made.items() if values.dim() > 1}
            for name in conversion.inputs:
                routes.pop(name)
            routes.update(dict.fromkeys(route.names, route))
    left = [route for route in dict.fromkeys(routes.values()) if not frozen.issuperset(route.sources)]
    left = [route for route in left if any(form.rename(name) is not None for name in route.names)]
    return sorted(left, key=lambda route: order[route.sources[0]])


def _fetch(
    run_state: RunState,
    listed: Roster,
    buffers: dict[str, torch.Tensor],
    names: Collection[str],
    everyone: Exchange | None,
    beside: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """Gathers some tensors at once, out of the order of the walk. Every rank must call it.

    Returns:
        The tensors by name, on the device of ``beside``; empty where the walk yields nothing.
    """
    runtime = run_state.runtime
    own = {name: buffers[name] for name in buffers if name in names}
    found: dict[str, torch.Tensor] = {}
    if own or not _is_whole(run_state, listed):
        left_out = listed.shapes().keys() - names
        walk = _walk(run_state, listed, own, left_out=left_out, gathered_bytes=1, everyone=everyone)
        found.update((every[0], values) for every, values in walk)
    else:
        with untouched(), torch.no_grad():
            for bucket in runtime.buckets:
                wanted = [place for place, tile in enumerate(bucket.layout.tiles) if tile.logical in names]
                source = bucket_source(runtime, bucket, "param") if wanted else None
                if source is not None:
                    read = source.read(wanted, borrow=True)
                    found.update((bucket.layout.tiles[place].logical, values) for place, values in read.items())
    return {name: values.to(beside.device) for name, values in found.items()}


def _is_whole(run_state: RunState, listed: Roster) -> bool:
    """Returns whether the same ranks share all of every parameter."""
    return run_state.is_one_part and not any(entry.layout.has_parts for entry in listed.listed)


def _renamed(name: str, weight: str, wanted: str) -> str:
    """Returns the name of a weight, or of the scales beside it, where the weight is called ``wanted``."""
    if name == weight:
        return wanted
    module, of_module = weight.rpartition(".")[0], wanted.rpartition(".")[0]
    return of_module + name.removeprefix(module)


def _all_buffers(run_state: RunState, listed: Roster, exchange: Exchange) -> dict[str, torch.Tensor]:
    """Returns the persistent buffers by name: this rank's, and host copies of those that only other ranks have.

    Every rank must call it; communicates only where ranks have other parts of the model.
    """
    own = run_state.buffers()
    if run_state.is_one_part:
        return own
    mine = {name: buffer.detach().cpu() for name, buffer in own.items() if name in listed.buffers}
    gathered = exchange.gather(mine if exchange.rank else {}, "the buffers of all ranks")
    return {**{name: buffer for theirs in gathered for name, buffer in theirs.items()}, **own}


def _walk(
    run_state: RunState,
    listed: Roster,
    buffers: dict[str, torch.Tensor],
    *,
    left_out: Set[str],
    gathered_bytes: int = GATHERED_BYTES,
    everyone: Exchange | None = None,
) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yields ``(all names, values)`` of each parameter and buffer, valid until the next.

    Every rank must iterate to the end.

    If not all ranks have the whole model, only the first rank of the job yields anything; with ``everyone``, the
    exchange between all, every rank does.
    """
    tied = _tied(listed)
    for name, values in _parameters(run_state, listed, left_out, gathered_bytes, everyone is not None):
        yield [name, *tied.get(name, ())], values
        del values
    job = run_state.runtime.groups.job
    buffers = {name: buffer for name, buffer in buffers.items() if name not in left_out}
    if everyone is not None and job.size > 1:
        own = [(name, str(buffer.dtype), list(buffer.shape)) for name, buffer in buffers.items()]
        for name, dtype, shape in everyone.gather(own if job.rank == 0 else [], "the buffers of rank 0")[0]:
            place = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
            yield [name, *tied.get(name, ())], _from_first(run_state, buffers[name] if job.rank == 0 else place)
    elif run_state.is_one_part or job.rank == 0:
        for name, buffer in buffers.items():
            yield [name, *tied.get(name, ())], buffer


def _from_first(run_state: RunState, values: torch.Tensor) -> torch.Tensor:
    """Broadcasts rank 0's tensor and returns it on the device; other ranks pass one of equal shape and dtype."""
    on_device = values.detach().to(run_state.runtime.device).contiguous()
    if on_device.numel():
        transfer = TensorTransfer(0, None, on_device.view(-1).view(torch.uint8))
        run_state.runtime.groups.job.move([transfer], label="the weights of rank 0")
    return on_device


def _parameters(
    run_state: RunState, listed: Roster, left_out: Set[str], gathered_bytes: int, everywhere: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    if not _is_whole(run_state, listed):
        yield from walk_job(run_state, listed, left_out=left_out, gathered_bytes=gathered_bytes, everywhere=everywhere)
        return
    for tile, values in walk_full(run_state.runtime, gathered_bytes, left_out):
        yield tile.logical, values
        del values


def _frozen(listed: Roster, exclude_frozen: bool) -> set[str]:
    """Returns the parameters to leave out: those without gradient, if they are excluded."""
    return set(listed.frozen()) if exclude_frozen else set()


def _tied(listed: Roster) -> dict[str, list[str]]:
    tied: dict[str, list[str]] = {}
    for alias, name in listed.aliases.items():
        tied.setdefault(name, []).append(alias)
    return tied


def _entries(listed: Roster, buffers: dict[str, torch.Tensor], left_out: Set[str]) -> list[TensorEntry]:
    tied = _tied(listed)
    found: list[TensorEntry] = []

    def add(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        found.append(TensorEntry(name, dtype, shape))
        found.extend(TensorEntry(alias, dtype, shape, same_as=name) for alias in tied.get(name, ()))

    for steps in rounds(listed, left_out=left_out):
        for step in steps:
            if step.completes:
                add(step.tile.logical, getattr(torch, step.listed.layout.dtype), step.tile.global_shape)
    for name, buffer in buffers.items():
        add(name, buffer.dtype, tuple(buffer.shape))
    return found


@dataclass(frozen=True)
class Step:
    """One tile in flight to rank 0."""

    listed: Listed  # its bucket
    number: int  # its place there
    tile: Tile  # what it holds
    completes: bool  # whether all of its logical parameter is there afterwards


def rounds(listed: Roster, *, left_out: Set[str], gathered_bytes: int = GATHERED_BYTES) -> Iterator[list[Step]]:
    """Yields what is sent in rounds of ``gathered_bytes`` at most over all ranks; a larger tile is sent alone."""
    by_index: dict[int, list[Listed]] = {}
    for entry in listed.listed:
        by_index.setdefault(entry.layout.index, []).append(entry)
    held: dict[str, set[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    there: dict[str, int] = {}
    for index in sorted(by_index):
        entries = by_index[index]
        windows = {id(entry): _windows(entry, gathered_bytes // len(entries)) for entry in entries}
        for number in range(max(map(len, windows.values()))):
            steps = []
            for entry in entries:
                for place in windows[id(entry)][number] if number < len(windows[id(entry)]) else ():
                    tile = entry.layout.tiles[place]
                    if tile.logical in left_out:
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
                    steps.append(Step(entry, place, tile, completes))
            yield steps


def _windows(entry: Listed, limit: int) -> list[list[int]]:
    """Returns the tiles of a bucket in the groups that are gathered at once; the same on all ranks."""
    itemsize = getattr(torch, entry.layout.dtype).itemsize
    return list(tile_windows(entry.layout, set(range(len(entry.layout.tiles))), itemsize, limit))


@torch.no_grad()
def walk_job(
    run_state: RunState,
    listed: Roster,
    *,
    left_out: Set[str],
    gathered_bytes: int = GATHERED_BYTES,
    everywhere: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields ``(logical name, values)``, on the job's first rank alone unless ``everywhere``.

    Every rank must iterate to the end.
    """
    runtime = run_state.runtime
    job, device = runtime.groups.job, runtime.device
    by_index = {bucket.index: bucket for bucket in runtime.buckets}
    wholes: dict[str, torch.Tensor] = {}
    everyones = partial(_from_first, run_state) if everywhere else torch.Tensor.detach
    for steps in rounds(listed, left_out=left_out, gathered_bytes=gathered_bytes):
        if not steps:
            continue
        index = steps[0].listed.layout.index
        mine: dict[int, torch.Tensor] = {}
        entry = listed.listed[listed.numbers[index]] if index in listed.numbers else None
        wanted = [step.number for step in steps if step.listed is entry]
        if wanted and index in by_index:
            with untouched():
                source = bucket_source(runtime, by_index[index], "param")
                assert source is not None
                mine = source.read(wanted, borrow=True)
                del source
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
            for step in steps if everywhere else ():
                if step.tile.part is None or step.completes:
                    dtype, shape = getattr(torch, step.listed.layout.dtype), step.tile.global_shape
                    yield step.tile.logical, _from_first(run_state, torch.empty(shape, dtype=dtype, device=device))
            continue
        for step, values in zip(steps, arrived, strict=True):
            assert values is not None
            tile = step.tile
            if tile.part is None:
                yield tile.logical, everyones(values.view(tile.shape))
                continue
            whole = wholes.get(tile.logical)
            if whole is None:
                whole = wholes[tile.logical] = torch.empty(tile.global_shape, dtype=values.dtype, device="cpu")
            for region in tile.regions:
                whole[region.in_whole] = values.view(tile.shape)[region.in_tile].to(whole.device)
            if step.completes:
                yield tile.logical, everyones(wholes.pop(tile.logical))
        del arrived, transfers, values  # before the next round gathers
