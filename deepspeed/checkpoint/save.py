"""Saves checkpoints: collects, writes, agrees, commits. In the calling thread, or in the background from a host copy.

It also writes ``zero_to_fp32.py``, a script that uses this package if it is installed and otherwise the reader that it
contains.

The script contains the source of the modules below unchanged, so that there is only one reader to maintain. They import
only each other, torch and the standard library; a test runs the script without the package.
"""

from __future__ import annotations

import datetime
import importlib.util
import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import disk, names, states
from deepspeed.checkpoint.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine, StateDictWriter
from deepspeed.checkpoint.collect import RankCheckpoint, collect
from deepspeed.checkpoint.commit import SaveFolder, point_latest, prune
from deepspeed.checkpoint.directory import SCRIPT_NAME, check_tag
from deepspeed.checkpoint.exchange import Exchange
from deepspeed.checkpoint.format import BUFFERS, FOLDERS, MANIFEST, PRIVATE, STORED_BY, Manifest, SavedFile
from deepspeed.checkpoint.param_groups import RankGroups, merge_groups
from deepspeed.checkpoint.private import private_tensors
from deepspeed.checkpoint.roster import Roster, roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.checkpoint.writer import FileWriter, SavePace, SaveProgress, lower_priority
from deepspeed.comm.job.axis import Axis
from deepspeed.errors import CheckpointError
from deepspeed.logging import log_dist, log_dist_once, logger
from deepspeed.offload.pinned import may_pin, page_buffer


@dataclass(frozen=True)
class SaveOptions:
    """Holds the arguments of one call of ``save_checkpoint``."""

    root: Path  # folder of checkpoints
    tag: str  # name of this one
    client_state: dict[str, Any]  # the caller's own state
    save_latest: bool  # let ``latest`` name it
    exclude_frozen: bool  # leave frozen parameters out
    in_background: bool  # write concurrently with training
    # the program's own checkpoint engine, which stores the tensors; None: they go to files
    engine: CheckpointEngine | None = None


@dataclass
class _Job:
    """Everything that the writing needs, so that it can run concurrently with training."""

    options: SaveOptions
    token: str
    rank: int
    apart_is_meant: bool  # whether the configuration states that not all ranks see one folder
    collected: RankCheckpoint
    shared: dict[str, bytes]  # on rank 0 the small files that are the same for all ranks, by name
    buffers: list[tuple[str, torch.Tensor]]  # the model's buffers that this rank writes for the others
    private: list[tuple[str, torch.Tensor]]  # this rank's private state, by name
    rank_state: bytes
    manifest: Callable[[tuple[SavedFile, ...], list[int]], Manifest]
    keep_last: int | None
    pace: SavePace | None = None  # limits a save in the background; None: it writes as fast as it can


class Saver:
    """The saves of one engine, one at a time.

    Args:
        axis: The ranks that save together.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._exchange: Exchange | None = None
        self._thread: threading.Thread | None = None
        self._pace = SavePace()
        self._failure: BaseException | None = None
        self._host = HostCopy()

    @property
    def exchange(self) -> Exchange:
        """The channel for the ranks' messages about checkpoints. Waits for a save in the background, which uses it.

        Made at the first use, when every rank must request it.
        """
        self._join()
        if self._exchange is None:
            self._exchange = Exchange.between(self._axis)
        return self._exchange

    def wait(self) -> None:
        """Waits for the save in the background. Raises CheckpointError: the save failed."""
        self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(f"the last save, in the background, failed: {failure}") from failure

    def _join(self) -> None:
        """Waits for the save in the background; its failure is raised by the next :meth:`wait`."""
        if self._thread is not None:
            self._pace.hurry()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Waits for a running save and frees the channel and the host memory. Another save allocates new ones.

        Raises:
            CheckpointError: The save in the background failed.
        """
        try:
            self.wait()
        finally:
            self._exchange = None
            self._host.free()

    def save(self, run_state: RunState, options: SaveOptions) -> None:
        """Saves a checkpoint. Every rank must call it.

        Raises:
            CheckpointError: It failed on some rank, now or in the background the last time; the same on all ranks. The
                former checkpoints are as they were.
        """
        self.wait()
        job = self._prepare(run_state, options)
        if not options.in_background:
            _run(job, self.exchange)
            return
        self._pace = job.pace = SavePace()
        self._thread = threading.Thread(target=self._run_in_background, args=(job, self.exchange), name="checkpoint")
        self._thread.start()

    def _run_in_background(self, job: _Job, exchange: Exchange) -> None:
        try:
            lower_priority()
            _run(job, exchange)
        except BaseException as error:
            self._failure = error
            log_dist(f"saving {job.options.tag} in the background failed: {error}", level=logging.ERROR)

    def _prepare(self, run_state: RunState, options: SaveOptions) -> _Job:
        exchange = self.exchange
        run_state.settle()
        token, tag, now = _agree_on_tag(exchange, options, run_state.settings.tag_validation)
        options = SaveOptions(**{**vars(options), "tag": tag})
        listed = roster(run_state, exchange)
        collected: RankCheckpoint | None = None
        schedule: dict[str, Any] | None = None
        has_own_groups = not run_state.is_one_part  # otherwise they equal rank 0's

        def mine() -> tuple[list[Any], RankGroups | None, dict[str, Any] | None]:
            nonlocal collected, schedule
            schedule = run_state.schedule_state()
            collected = collect(
                run_state.runtime, run_state.torch_optimizer, listed.numbers, exclude_frozen=options.exclude_frozen
            )
            groups = RankGroups.of(run_state.torch_optimizer, schedule) if has_own_groups else None
            return collected.scalars, groups, run_state.data_position()

        gathered_states = exchange.together("collecting what to save", mine)
        scalars = [entry for entries, _, _ in gathered_states for entry in entries]
        position = states.position_of_all([position for _, _, position in gathered_states])
        buffers = [(name, buffer) for name, buffer in run_state.buffers().items() if name in listed.buffers]

        def small() -> dict[str, bytes]:
            if exchange.rank != 0:
                return {}
            by_rank = [(rank, groups) for rank, (_, groups, _) in enumerate(gathered_states) if groups is not None]
            by_rank = by_rank or [(0, RankGroups.of(run_state.torch_optimizer, schedule))]
            named = [(g, listed.group_names(rank, len(g.hyperparameters))) for rank, g in by_rank]
            merged = merge_groups(named, schedule)
            return states.shared_files(run_state, listed, options.client_state, scalars, merged, position)

        made: list[_Job] = []

        def make_job() -> None:
            assert collected is not None
            job = _Job(
                options=options,
                token=token,
                rank=exchange.rank,
                apart_is_meant=run_state.settings.use_node_local_storage,
                collected=collected,
                shared=small(),
                buffers=buffers,
                private=private_tensors(run_state),
                rank_state=states.rank_file(run_state),
                manifest=_manifest_maker(run_state, options, listed, now),
                keep_last=run_state.settings.keep_last,
            )
            if options.in_background:
                _copy_to_host(job, self._host)
            made.append(job)

        exchange.together("collecting what to save", make_job)
        return made[0]


def _agree_on_tag(exchange: Exchange, options: SaveOptions, validation: str) -> tuple[str, str, str]:
    """Returns ``(a fresh token, the tag, the time)`` of rank 0, the same on all ranks."""
    doing = f"save_checkpoint({options.root}, tag={options.tag!r})"
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    given = exchange.gather((secrets.token_hex(8), str(options.tag), now), doing)
    tags = [entry[1] for entry in given]
    if len(set(tags)) > 1 and validation != "Ignore":
        text = (
            f"save_checkpoint: ranks gave different tags, expected one ("
            f"{', '.join(f'rank {rank}: {given!r}' for rank, given in enumerate(tags))})"
        )
        if validation == "Fail":
            raise CheckpointError(f"{text}. checkpoint.tag_validation: Warn saves under that of rank 0")
        log_dist(f"{text}; saving under {tags[0]!r}", level=30)
    return given[0][0], check_tag(tags[0]), given[0][2]


def _manifest_maker(
    run_state: RunState, options: SaveOptions, listed: Roster, saved_at: str
) -> Callable[[tuple[SavedFile, ...], list[int]], Manifest]:
    """Returns a function that makes the manifest from the files and the leader of each rank's folder."""
    optimizer = run_state.torch_optimizer
    facts = {
        "tag": options.tag,
        "written_by": run_state.version,
        "torch": torch.__version__,
        "saved_at": saved_at,
        "world_size": run_state.dp_world_size,
        "mesh": run_state.mesh,
        "zero_stage": run_state.stage,
        "precision": run_state.precision,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
        **run_state.counters,
    }
    left_out = frozenset(listed.idle() if options.exclude_frozen else ())

    def make(files: tuple[SavedFile, ...], leaders: list[int]) -> Manifest:
        return Manifest(
            buckets=listed.buckets,
            files=files,
            facts={**facts, FOLDERS: leaders} if any(leaders) else facts,
            aliases=listed.aliases,
            left_out=left_out,
            frozen=frozenset(listed.frozen()),
        )

    return make


def _copy_to_host(job: _Job, host: HostCopy) -> None:
    """Copies everything that training will change to the host."""
    parts = [part for runs in job.collected.runs.values() for s in runs for part in s.values]
    copies = iter(host.take([*parts, *(values for _, values in (*job.buffers, *job.private))]))
    for kind, runs in job.collected.runs.items():
        job.collected.runs[kind] = [replace(run, values=tuple(next(copies) for _ in run.values)) for run in runs]
    job.buffers = [(name, next(copies)) for name, _ in job.buffers]
    job.private = [(name, next(copies)) for name, _ in job.private]


def _run(job: _Job, exchange: Exchange) -> None:
    """Writes and commits. Every rank runs it; a barrier ends each phase, so that a failure is an error on all."""
    options = job.options
    if options.engine is not None:
        _run_through(options.engine, job, exchange)
        return
    folder = SaveFolder(options.root, options.tag, job.token)
    doing = f"save_checkpoint({options.root}, tag={options.tag!r})"
    try:
        leaders = make_folders(exchange, folder, doing)
        leads = leaders[exchange.rank] == exchange.rank
        buffers_file = names.buffers_file(exchange.rank)
        if any(leaders):
            _share(job, exchange, doing, leads=leads)
            buffers_file = names.buffers_file()
        written = exchange.together(f"{doing}: writing", lambda: _write_files(job, folder.folder, buffers_file))
        unique = {entry.name: entry for files in written for entry in files}
        manifest = job.manifest(tuple(unique.values()), leaders)
        exchange.together(f"{doing}: completing", lambda: _commit(job, folder, manifest) if leads else None)
    except BaseException:
        folder.abandon()
        raise
    if any(leaders) and not job.apart_is_meant:
        log_dist_once(
            f"save_checkpoint: ranks see different folders under this path, so each of {len(set(leaders))} "
            "folders has the files of its own ranks only. To load with another number of ranks, copy the "
            "content of all of them into one. checkpoint.use_node_local_storage: true declares that this is "
            "intended"
        )


def _run_through(engine: CheckpointEngine, job: _Job, exchange: Exchange) -> None:
    """Saves through a program's own checkpoint engine: tensors by its ``save``, small files and the manifest by ours.

    The manifest comes last, so a save that breaks off leaves a folder that is no checkpoint. What the engine stored
    cannot be exchanged at once as a folder can, so a tag that is a checkpoint already is refused.
    """
    options = job.options
    folder = options.root / options.tag
    kind = type(engine).__name__
    doing = f"save_checkpoint({options.root}, tag={options.tag!r}) through {kind}"
    info = CheckpointCommitInfo(options.tag, str(options.root), options.save_latest)

    def make() -> None:
        if exchange.rank != 0:
            return
        if (folder / MANIFEST).exists():
            raise CheckpointError(
                f"{folder} is a checkpoint already, and what {kind} stored there cannot be replaced at once; expected "
                "a new tag. Save under another tag, or remove the folder before"
            )
        disk.make_folder(folder)

    def begin() -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: expected a folder that all ranks see; this rank does not see it")
        engine.create(info)

    def commit() -> None:
        if not engine.commit(info):
            raise CheckpointError(
                f"{kind}.commit({options.tag!r}) returned False: not all files are stored; "
                "the tag is incomplete. Save again, and look into the log of that checkpoint engine"
            )

    def complete(manifest: Manifest) -> None:
        disk.replace_file(folder / MANIFEST, manifest.encode())
        if options.save_latest:
            point_latest(options.root, options.tag)

    exchange.together(f"{doing}: making the folder", make)
    exchange.together(f"{doing}: create", begin)
    buffers_file = names.buffers_file(exchange.rank)
    written = exchange.together(f"{doing}: save", lambda: _write_files(job, folder, buffers_file))
    exchange.together(f"{doing}: commit", commit)
    unique = {entry.name: entry for files in written for entry in files}
    manifest = job.manifest(tuple(unique.values()), [0] * exchange.size)
    manifest = replace(manifest, facts={**manifest.facts, STORED_BY: kind})
    exchange.together(f"{doing}: completing", lambda: complete(manifest) if exchange.rank == 0 else None)


def _share(job: _Job, exchange: Exchange, doing: str, *, leads: bool) -> None:
    """Sends the leader of every folder the shared files of ranks in other folders. Every rank must call it."""
    gathered = exchange.together(doing, lambda: (job.shared, [(name, t.detach().cpu()) for name, t in job.buffers]))
    job.shared = gathered[0][0] if leads else {}
    job.buffers = [entry for _, theirs in gathered for entry in theirs] if leads else []


def _write_files(job: _Job, folder: Path, buffers_file: str) -> list[SavedFile]:
    written = []
    runs_of = [run for runs in job.collected.runs.values() for run in runs]
    tensors = [tensor for _, tensor in (*job.buffers, *job.private)]
    total = sum((run.stop - run.start) * run.dtype.itemsize for run in runs_of) + sum(t.nbytes for t in tensors)
    progress = SaveProgress(job.options.tag, total) if job.rank == 0 else None

    def note(nbytes: int) -> None:
        if progress is not None:
            progress.add(nbytes)
        if job.pace is not None:
            job.pace.rest()

    engine = job.options.engine
    with FileWriter(folder, note) if engine is None else StateDictWriter(folder, engine, note) as writer:
        for number, (kind, runs) in enumerate(job.collected.runs.items()):
            name = names.data_file(job.rank, kind, number)
            written.append(writer.write_runs(name, kind, runs))
        written.append(writer.write_bytes(names.rank_state_file(job.rank), job.rank_state))
        if job.buffers:
            written.append(writer.write_tensors(buffers_file, BUFFERS, job.buffers))
        if job.private:
            written.append(writer.write_tensors(names.private_file(job.rank), PRIVATE, job.private))
        written += [writer.write_bytes(name, data) for name, data in job.shared.items()]
    return written


def _commit(job: _Job, folder: SaveFolder, manifest: Manifest) -> None:
    root, tag = job.options.root, job.options.tag
    folder.write_manifest(manifest)
    folder.commit()
    text = script().encode()
    path = root / SCRIPT_NAME
    if not path.is_file() or path.read_bytes() != text:
        disk.replace_file(path, text, executable=True)
    if job.options.save_latest:
        point_latest(root, tag)
    if job.keep_last is not None:
        removed = prune(root, job.keep_last, tag)
        if removed:
            logger.info("checkpoint.keep_last %d: removed %s", job.keep_last, ", ".join(removed))


_ALIGNMENT = 64  # bytes, so that every tensor begins on a cache line


class HostCopy:
    """Copies tensors into host memory.

    What is on a device goes into one page-locked buffer of the exact size, which is kept for the next copy of that
    size: torch's allocator would round every tensor up to a power of two and keep it for ever.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that are kept for the next copy."""
        return 0 if self._buffer is None else self._buffer.numel()

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns copies with the shapes and dtypes of ``tensors``; those of the last call are overwritten.

        Waits until the device has finished.
        """
        places: dict[int, int] = {}
        size = 0
        for number, tensor in enumerate(tensors):
            if tensor.device.type != "cpu" and tensor.numel():
                places[number] = size
                size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or self._buffer.numel() != size:
            self._buffer = None  # before the next one is taken
            self._buffer = page_buffer(size, pin=may_pin(True)) if size else None
        copies = []
        for number, tensor in enumerate(tensors):
            if number in places:
                assert self._buffer is not None
                start, nbytes = places[number], tensor.nbytes
                held = self._buffer[start : start + nbytes].view(tensor.dtype).view(tensor.shape)
            else:
                held = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies.append(held.copy_(tensor.detach(), non_blocking=True))
        get_accelerator().synchronize()
        return copies

    def free(self) -> None:
        """Frees the host buffer that the copies lie in."""
        self._buffer = None


def make_folders(exchange: Exchange, folder: SaveFolder, doing: str) -> list[int]:
    """Makes the folders of a save, and returns for each rank the rank that leads its folder. Every rank must call it.

    The ranks of one folder are those that see the same files. A node with a disk of its own has one, and so has each
    rank that a program gives a folder of its own (Ray Train does). The leader makes the folder and commits it.
    """
    what = f"{doing}: making the folder"

    exchange.together(what, lambda: folder.create() if exchange.rank == 0 else None)
    # None: sees the folder of rank 0. Otherwise ranks with equal keys share their folder.
    keys = exchange.together(what, lambda: None if folder.is_visible() else (socket.gethostname(), folder.real_path()))
    first: dict[tuple[str, str], int] = {}
    for rank, key in enumerate(keys):
        if key is not None:
            first.setdefault(key, rank)
    if not first:
        return [0] * exchange.size
    makers = sorted(first.values())

    def make() -> None:
        if exchange.rank in makers:
            folder.create()
            folder.mark(exchange.rank)

    exchange.together(what, make)

    def leader() -> int:
        if keys[exchange.rank] is None:
            return 0
        # Nodes may share a disk that rank 0 does not see: then several have made the same folder.
        found = next((maker for maker in makers if folder.is_marked(maker)), None)
        if found is None:
            raise CheckpointError(
                f"{folder.folder}: expected the folder that a rank of this machine has just made; found none. Give "
                "save_checkpoint a folder that all ranks of a machine see, or each rank one of its own"
            )
        return found

    return exchange.together(what, leader)


CARRIED = (
    "deepspeed.errors",
    "deepspeed.zero.tiling.tiles",
    "deepspeed.zero.tiling.layout",
    "deepspeed.checkpoint.format",
    "deepspeed.checkpoint.directory",
    "deepspeed.checkpoint.disk",
    "deepspeed.checkpoint.source",
    "deepspeed.checkpoint.reader",
    "deepspeed.checkpoint.weights_file",
    "deepspeed.checkpoint.consolidate",
)

_TEMPLATE = '''#!/usr/bin/env python
"""Writes the full weights of a checkpoint in this folder as ordinary files.

    python zero_to_fp32.py . output_folder [--safe_serialization] [--max_shard_size 5GB] [--dtype fp32] [-t TAG]
    python zero_to_fp32.py . pytorch_model.bin

It needs Python, torch and nothing else: no GPU, no configuration. Where deepspeed is installed that is used; otherwise
the sources below, which are deepspeed's own.
"""

import importlib.abc
import importlib.util
import sys

ENTRY = "deepspeed.checkpoint.consolidate"


class Carried(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules whose sources this file carries."""

    def find_spec(self, name, path=None, target=None):
        is_package = any(module.startswith(name + ".") for module in SOURCES)
        if is_package or name in SOURCES:
            return importlib.util.spec_from_loader(name, self, is_package=is_package)
        return None

    def exec_module(self, module):
        source = SOURCES.get(module.__name__, "")
        exec(compile(source, f"<{module.__name__} in {__file__}>", "exec"), module.__dict__)


def load():
    try:
        return importlib.import_module(ENTRY)
    except Exception:  # not installed, another package of that name, or one that does not work here
        for name in [name for name in sys.modules if name == "deepspeed" or name.startswith("deepspeed.")]:
            del sys.modules[name]
        sys.meta_path.insert(0, Carried())
        return importlib.import_module(ENTRY)


SOURCES = {
@SOURCES@}

if __name__ == "__main__":
    sys.exit(load().main())
'''


@cache
def script() -> str:
    """Returns the text of ``zero_to_fp32.py``."""
    parts = []
    for module in CARRIED:
        spec = importlib.util.find_spec(module)
        assert spec is not None and spec.origin is not None
        lines = Path(spec.origin).read_text(encoding="utf-8").splitlines(keepends=True)
        parts.append(f"    {module!r}: (\n" + "".join(f"        {line!r}\n" for line in lines) + "    ),\n")
    return _TEMPLATE.replace("@SOURCES@", "".join(parts))
