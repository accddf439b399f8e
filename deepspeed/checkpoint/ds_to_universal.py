"""``python -m deepspeed.checkpoint.ds_to_universal``: writes a checkpoint in a layout for other programs.

``--output_format`` chooses the layout: ``universal`` (the default) is upstream's universal layout, ``dcp`` that of
``torch.distributed.checkpoint``, and ``native`` this package's own, under another name. The input may be a checkpoint
of this package or of upstream. This package loads both without a conversion.
"""

from __future__ import annotations

import argparse
import datetime
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import disk, names, restricted
from deepspeed.checkpoint.checkpoint_engine import path_for_engine
from deepspeed.checkpoint.commit import SaveFolder
from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.dcp import write_dcp
from deepspeed.checkpoint.directory import LATEST_UNIVERSAL, Format, check_tag, format_of
from deepspeed.checkpoint.format import BUFFERS, MANIFEST, STORED_BY, Manifest, SavedFile
from deepspeed.checkpoint.load import read_training_state
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource, TrainingState, Wanted
from deepspeed.checkpoint.upstream import UpstreamSource
from deepspeed.checkpoint.upstream.universal import write_universal
from deepspeed.checkpoint.writer import BucketRun, FileWriter
from deepspeed.errors import CheckpointError
from deepspeed.release import VERSION
from deepspeed.zero.tiling.layout import BucketLayout, bucket_layout
from deepspeed.zero.tiling.tiles import Tile

_NO_OPTIMIZER = (
    "The optimizer states were left out: the checkpoint has none, or does not name them (stage 0). "
    "load_checkpoint on the original folder can restore them, because the model gives their names.\n"
)
FORMATS = ("universal", "native", "dcp")
"""The layouts that can be written."""


def convert_folder(source: Path, target: Path, output_format: str = "universal", zero_stage: int | None = None) -> None:
    """Writes the tag folder ``source`` as ``target`` and lets ``latest_universal`` beside it name it.

    Args:
        output_format: One of :data:`FORMATS`. ``latest_universal`` is not written for ``dcp``.
        zero_stage: The stage at which upstream will load the universal layout; None: the one that saved (0 becomes 1).

    Raises:
        CheckpointError: ``source`` is no whole checkpoint, or lacks what the layout needs.
        OSError: ``target`` cannot be written.
    """
    kind = format_of(source)
    if kind is None:
        raise CheckpointError(f"{source} is not a checkpoint; pass the folder of one tag, such as .../global_step10")
    root, tag = target.parent, check_tag(target.name)
    if kind is Format.OURS and output_format == "native":
        _link(source, root, tag)
    else:
        _export(open_source(source), root, tag, output_format, zero_stage)
    if output_format != "dcp":
        disk.replace_file(root / LATEST_UNIVERSAL, tag.encode())


def _export(source: CheckpointSource, root: Path, tag: str, output_format: str, zero_stage: int | None) -> None:
    if isinstance(source, CheckpointReader):
        state = read_training_state(source, -1, trust=False)
        saved_stage = int(source.manifest.facts.get("zero_stage") or 1)
    else:
        assert isinstance(source, UpstreamSource)
        state = source.state
        config = state.model_states.get("ds_config")
        zero = config.get("zero_optimization") if isinstance(config, dict) else None
        saved_stage = int((zero.get("stage") if isinstance(zero, dict) else None) or 1)
    if output_format == "native":
        if not state.scalars:
            sys.stdout.write(_NO_OPTIMIZER)
        convert(source, state, root, tag, VERSION)
        return
    folder = SaveFolder(root, tag, secrets.token_hex(8))
    folder.create()
    try:
        notes = []
        if output_format == "dcp":
            write_dcp(source, state, folder.folder)
        else:
            notes = write_universal(source, state, folder.folder, zero_stage or saved_stage)
        disk.sync_folder(folder.folder)
        folder.commit()
    except BaseException:
        folder.abandon()
        raise
    if state.withheld:
        notes.append(f"left out, because reading it would run code: {', '.join(state.withheld)}")
    sys.stdout.write("".join(f"{note}\n" for note in notes))


def _link(source: Path, root: Path, tag: str) -> None:
    """Puts the files of a checkpoint under another tag: by links where the file system has them, else by copies."""
    manifest = Manifest.read(source)
    folder = SaveFolder(root, tag, os.urandom(8).hex())
    folder.create()
    try:
        for name in (*(_name_on_disk(source, manifest, entry) for entry in manifest.files), MANIFEST):
            try:
                os.link(source / name, folder.folder / name)
            except OSError:
                shutil.copyfile(source / name, folder.folder / name)
        disk.sync_folder(folder.folder)
        folder.commit()
    except BaseException:
        folder.abandon()
        raise


def _name_on_disk(source: Path, manifest: Manifest, entry: SavedFile) -> str:
    """Returns the name of a checkpoint's file, which may be written by a checkpoint engine of the program."""
    if STORED_BY not in manifest.facts or not (entry.runs or entry.tensors):
        return entry.name
    name = Path(path_for_engine(source / entry.name)).name
    if not (source / name).exists():
        raise CheckpointError(
            f"{source}: its tensors were stored by the checkpoint engine {manifest.facts[STORED_BY]!r}, expected "
            f"{name}, found no such file; leave the conversion out, load_checkpoint with the same checkpoint engine "
            "needs none"
        )
    return name


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the parsed command line; None stands for that of the process."""
    parser = argparse.ArgumentParser(prog="python -m deepspeed.checkpoint.ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", required=True, help="the folder of one tag")
    parser.add_argument("--output_folder", required=True, help="folder for the converted checkpoint")
    parser.add_argument("--output_format", choices=FORMATS, default="universal", help="layout (default: %(default)s)")
    parser.add_argument(
        "--zero_stage", type=int, choices=(1, 2, 3), help="stage at which upstream loads it (default: that which saved)"
    )
    without = "accepted, without effect"
    parser.add_argument("--num_extract_workers", type=int, default=4, help=without)
    parser.add_argument("--num_merge_workers", type=int, default=2, help=without)
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help=without)
    return parser.parse_args(arguments)


def main(arguments: list[str] | Any = None) -> int:
    """Runs the command line, or converts with settings that a program has made; returns the exit code.

    Args:
        arguments: The words of the command line; None stands for those of the process. Or an object with the attributes
            ``input_folder`` and ``output_folder``, such as :func:`parse_arguments` returns, and if wanted
            ``output_format`` and ``zero_stage``; others have no effect.

    Raises:
        CheckpointError: There is no whole checkpoint, and settings were given. The command line writes the message.
        OSError: The output cannot be written, likewise.
    """
    is_command = arguments is None or isinstance(arguments, list)
    given: Any = parse_arguments(arguments) if is_command else arguments
    options = getattr(given, "output_format", "universal"), getattr(given, "zero_stage", None)
    try:
        convert_folder(Path(given.input_folder), Path(given.output_folder), *options)
    except (CheckpointError, OSError) as error:
        if not is_command:
            raise
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"Written: {given.output_folder}\n")
    return 0


_PART_NUMEL = 1 << 22
_BUCKET_NUMEL = 500_000_000
# Of the model-states file: large, or about the files that are replaced.
_DROPPED = ("module", "frozen_param_fragments", "optimizer")


def _parts_of(source: CheckpointSource, wanted: Wanted, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yields the elements ``wanted`` in order, as 1-D contiguous tensors."""
    for first in range(wanted.start, wanted.stop, _PART_NUMEL):
        last = min(first + _PART_NUMEL, wanted.stop)
        part = torch.empty(last - first, dtype=dtype)
        source.read(wanted._replace(start=first, stop=last), part)
        yield part


def convert(source: CheckpointSource, state: TrainingState, root: Path, tag: str, version: str) -> Path:
    """Converts a checkpoint of any supported layout to this package's; returns the tag folder.

    Raises:
        CheckpointError: The source is damaged or not complete.
        OSError: The new checkpoint cannot be written.
    """
    source.check([Wanted(k, n, 0, p.numel) for n, p in source.parameters.items() for k in p.kinds])
    buckets = _layout(source, state)
    folder = SaveFolder(root, tag, secrets.token_hex(8))
    folder.create()
    try:
        files = _write(source, state, folder.folder, buckets)
        facts = {
            "tag": tag,
            "written_by": version,
            "converted_from": os.path.basename(source.label),
            "torch": torch.__version__,
            "saved_at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "world_size": state.world_size,
            "zero_stage": 0,
            "precision": _precision(source),
            "optimizer": state.optimizer,
            **state.counters,
        }
        frozen = frozenset(name for name, parameter in source.parameters.items() if parameter.is_frozen)
        folder.write_manifest(Manifest(buckets, tuple(files), facts, dict(source.aliases), frozenset(), frozen))
        return folder.commit()
    except BaseException:
        folder.abandon()
        raise


def _precision(source: CheckpointSource) -> str:
    dtypes = {parameter.compute_dtype for parameter in source.parameters.values()}
    return "bf16" if torch.bfloat16 in dtypes else "fp16" if torch.float16 in dtypes else "fp32"


def _layout(source: CheckpointSource, state: TrainingState) -> tuple[BucketLayout, ...]:
    """Returns the parameters of one dtype side by side, as many as fit a bucket."""
    group_of = {name: number for number, group in enumerate(state.param_groups) for name in group["params"]}
    waiting: dict[tuple[str, bool], list[Tile]] = {}
    buckets: list[BucketLayout] = []

    def close(kind: tuple[str, bool]) -> None:
        tiles = waiting.pop(kind)
        buckets.append(bucket_layout(len(buckets), tiles, dtype=kind[0], trainable=kind[1], num_slices=1))

    for name, parameter in source.parameters.items():
        kind = (str(parameter.compute_dtype).removeprefix("torch."), name in group_of)
        if kind in waiting and sum(tile.numel for tile in waiting[kind]) + parameter.numel > _BUCKET_NUMEL:
            close(kind)
        waiting.setdefault(kind, []).append(Tile(name, tuple(parameter.shape), group_of.get(name, -1)))
    for kind in list(waiting):
        close(kind)
    return tuple(buckets)


def _write(
    source: CheckpointSource, state: TrainingState, folder: Path, buckets: tuple[BucketLayout, ...]
) -> list[SavedFile]:
    by_kind: dict[str, list[BucketRun]] = {}
    for bucket in buckets:
        for tile, start in zip(bucket.tiles, bucket.starts, strict=True):
            for kind, dtype in source.parameters[tile.name].kinds.items():
                if tile.numel:
                    parts = _parts_of(source, Wanted(kind, tile.name, 0, tile.numel), dtype)
                    run = BucketRun(bucket.index, start, start + tile.numel, parts, dtype)
                    by_kind.setdefault(kind, []).append(run)
    with FileWriter(folder) as writer:
        files = [
            writer.write_runs(names.data_file(0, kind, number), kind, entries)
            for number, (kind, entries) in enumerate(by_kind.items())
        ]
        if source.buffers:
            tensors = [(name, source.read_buffer(name)) for name in source.buffers]
            files.append(writer.write_tensors(names.buffers_file(), BUFFERS, tensors))
        kept = {key: value for key, value in state.model_states.items() if key not in _DROPPED}
        for name, value in (
            (names.TRAINING_STATE, _training(state)),
            (names.model_states_file(0), {"module": None, "optimizer": None, **kept}),
        ):
            files.append(writer.write_bytes(name, restricted.dumps(value)))
    return files


def _training(state: TrainingState) -> dict[str, Any]:
    return {
        "counters": state.counters,
        "world_size": state.world_size,
        "optimizer": state.optimizer,
        "param_groups": state.param_groups,
        "scalars": [[[name], values] for name, values in state.scalars.items()],
        "loss_scaler": state.loss_scaler,
        "skipped_in_a_row": state.skipped_in_a_row,
        "lr_scheduler": state.lr_scheduler,
        "extra_state": state.extra_state,
    }


if __name__ == "__main__":
    sys.exit(main())
