"""Shows the content of a checkpoint as tables: ``ds_inspect`` and ``python -m deepspeed.checkpoint inspect``."""

from __future__ import annotations

import argparse
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.directory import LATEST, Format, find, format_of, read_pointer, tags, what_exists
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource, SavedParameter
from deepspeed.checkpoint.upstream import UpstreamSource
from deepspeed.errors import CheckpointError

_SHOWN_TILES = 4


@dataclass
class KindTotals:
    """Tensors of one kind and dtype."""

    parameters: int = 0  # how many parameters have it
    numel: int = 0  # elements
    nbytes: int = 0  # bytes, padding not counted


@dataclass
class Summary:
    """Describes a checkpoint for users."""

    folder: Path  # the tag folder
    format: Format  # who wrote it
    facts: dict[str, str]  # name to text, for the first table
    # by kind and dtype
    kinds: dict[tuple[str, str], KindTotals] = field(default_factory=lambda: defaultdict(KindTotals))
    source: CheckpointSource | None = None  # the open checkpoint
    problems: list[str] = field(default_factory=list)  # what is wrong with it; empty for a healthy one


def summarize(path: Path, tag: str | None, *, verify: bool) -> Summary:
    """Summarizes a checkpoint.

    Args:
        path: The folder of checkpoints, or of one tag.
        tag: Name of the checkpoint; None for the newest.
        verify: Read every byte and compare checksums; otherwise only sizes are compared.

    Raises:
        CheckpointError: There is none.
    """
    kind = format_of(path) if tag is None else None
    if kind is not None:
        folder, name = path, path.name
    else:
        found = find(path, tag)
        if found is None:
            raise CheckpointError(f"{path}: {what_exists(path)}; correct the folder or the tag")
        folder, kind, name = found.folder, found.format, found.tag
    summary = Summary(folder, kind, {"tag": name, "format": kind.value})
    try:
        summary.source = open_source(folder)
    except CheckpointError as error:
        summary.problems.append(str(error))
        return summary
    _describe(summary)
    if isinstance(summary.source, CheckpointReader):
        _check(summary, summary.source, verify=verify)
    return summary


def _describe(summary: Summary) -> None:
    source, facts = summary.source, summary.facts
    assert source is not None
    if isinstance(source, CheckpointReader):
        known = source.manifest.facts
        versions = f"deepspeed {known.get('written_by')}, torch {known.get('torch')}"
        facts["written by"] = f"{versions}, {known.get('saved_at')}"
        facts["step"] = f"{known.get('global_steps')} ({known.get('skipped_steps')} skipped)"
        facts["samples"] = str(known.get("global_samples"))
        facts["topology"] = f"{known.get('world_size')} rank(s), ZeRO stage {known.get('zero_stage')}"
        facts["precision"] = str(known.get("precision"))
        facts["optimizer"] = str(known.get("optimizer") or "none")
        size = sum(entry.size for entry in source.manifest.files)
        facts["size"] = f"{_bytes(size)} in {len(source.manifest.files)} files"
    elif isinstance(source, UpstreamSource):
        state = source.state
        facts["written by"] = f"the original deepspeed {state.model_states.get('ds_version', '')}".rstrip()
        facts["step"] = f"{state.counters['global_steps']} ({state.counters['skipped_steps']} skipped)"
        facts["samples"] = str(state.counters["global_samples"])
        facts["topology"] = f"{state.world_size} rank(s)"
        files = [path for path in summary.folder.rglob("*") if path.is_file()]
        facts["size"] = f"{_bytes(sum(path.stat().st_size for path in files))} in {len(files)} files"
    parameters = source.parameters.values()
    frozen = [parameter for parameter in parameters if parameter.is_frozen]
    facts["parameters"] = (
        f"{len(source.parameters):,} with {sum(p.numel for p in parameters):,} elements, of them {len(frozen):,} "
        f"frozen with {sum(p.numel for p in frozen):,}"
    )
    cut = [len(p.tiles) for p in parameters if len(p.tiles) > 1]
    if cut:
        facts["cut"] = f"{len(cut):,} parameters into up to {max(cut)} tiles each"
    if source.left_out:
        facts["left out"] = f"{len(source.left_out):,} frozen parameters"
    facts["buffers"] = f"{len(source.buffers):,}"
    if source.aliases:
        facts["tied"] = ", ".join(f"{alias} = {name}" for alias, name in list(source.aliases.items())[:4])
    for parameter in parameters:
        for kind, dtype in parameter.kinds.items():
            _count(summary, kind, dtype, parameter.numel)
    for buffer in source.buffers.values():
        _count(summary, "buffers", buffer.dtype, torch.Size(buffer.shape).numel())


def _count(summary: Summary, kind: str, dtype: torch.dtype, numel: int) -> None:
    entry = summary.kinds[(kind, str(dtype).removeprefix("torch."))]
    entry.parameters += 1
    entry.numel += numel
    entry.nbytes += numel * dtype.itemsize


def _check(summary: Summary, reader: CheckpointReader, *, verify: bool) -> None:
    for record in reader.manifest.files:
        try:
            reader.open_file(record.name)
            if verify:
                reader.read_file(record.name)
        except CheckpointError as error:
            summary.problems.append(str(error))


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.2f} TB"


def show(summary: Summary, console: Console, *, parameters: bool, verified: bool) -> None:
    """Prints the tables."""
    facts = Table(show_header=False, box=None, title=escape(str(summary.folder)), title_justify="left")
    for name, text in summary.facts.items():
        facts.add_row(name, escape(text))
    health = (
        "damaged" if summary.problems else "every byte verified" if verified else "all files are there, sizes right"
    )
    if summary.format is not Format.OURS and not summary.problems:
        health = "complete; this format has no checksums"
    facts.add_row("health", f"[red]{health}[/]" if summary.problems else f"[green]{health}[/]")
    console.print(facts)
    kinds = Table("kind", "dtype", "tensors", "elements", "bytes")
    for column in kinds.columns[2:]:
        column.justify = "right"
    for (kind, dtype), entry in sorted(summary.kinds.items()):
        kinds.add_row(escape(kind), dtype, f"{entry.parameters:,}", f"{entry.numel:,}", f"{entry.nbytes:,}")
    if summary.kinds:
        console.print(kinds)
    if parameters and summary.source is not None:
        console.print(_parameter_table(summary.source))
    for problem in summary.problems:
        console.print(escape(problem), style="red", soft_wrap=True)


def _parameter_table(source: CheckpointSource) -> Table:
    table = Table("parameter", "shape", "saved as", "")
    for name, entry in source.parameters.items():
        kinds = ", ".join(f"{kind} {str(dtype).removeprefix('torch.')}" for kind, dtype in sorted(entry.kinds.items()))
        notes = [*(["frozen"] if entry.is_frozen else []), *([_tiles(entry)] if len(entry.tiles) > 1 else [])]
        table.add_row(escape(name), str(tuple(entry.shape)), escape(kinds), escape("; ".join(notes)))
    for name, buffer in source.buffers.items():
        dtype = str(buffer.dtype).removeprefix("torch.")
        table.add_row(escape(name), str(tuple(buffer.shape)), dtype, "buffer")
    return table


def _tiles(parameter: SavedParameter) -> str:
    shown = [
        f"{tile.shape}" + (f" of {len(tile.regions)} regions" if len(tile.regions) != 1 else "")
        for tile in parameter.tiles[:_SHOWN_TILES]
    ]
    more = ", ..." if len(parameter.tiles) > _SHOWN_TILES else ""
    return f"{len(parameter.tiles)} tiles: {', '.join(shown)}{more}"


def main(arguments: list[str] | None = None, prog: str = "ds_inspect") -> int:
    """Runs the command line; returns the exit code: 1 if there is no checkpoint or it is damaged."""
    parser = argparse.ArgumentParser(
        prog=prog, description="Shows the contents of a checkpoint, in this package's or upstream's format."
    )
    parser.add_argument("folder", metavar="DIR", help="folder of checkpoints, or of one tag")
    parser.add_argument(
        "-t", "--tag", default=None, help="name of the checkpoint (default: the one in the file 'latest')"
    )
    parser.add_argument("-p", "--parameters", action="store_true", help="list every parameter")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare checksums")
    given = parser.parse_args(arguments)
    console = Console()
    path = Path(given.folder)
    try:
        if given.tag is None and path.is_dir() and format_of(path) is None:
            there = list(tags(path))
            latest = read_pointer(path / LATEST) if (path / LATEST).is_file() else None
            if len(there) > 1:
                marked: list[Any] = [f"[bold]{escape(tag)}[/]" if tag == latest else escape(tag) for tag in there]
                console.print(f"checkpoints, oldest first ('{LATEST}' in bold): " + ", ".join(marked), soft_wrap=True)
        summary = summarize(path, given.tag, verify=given.verify)
    except CheckpointError as error:
        console.print(escape(str(error)), style="red", soft_wrap=True)
        return 1
    show(summary, console, parameters=given.parameters, verified=given.verify)
    return 1 if summary.problems else 0
