"""Makes a save visible atomically: by a rename, after all its files are on the disk.

A save is written into ``.saving-<random>/`` beside the tags. Its lock is held by the writing process, so that a later
save recognizes what a killed one left and removes it. A tag that exists already is first renamed to
``.replaced-<tag>``, where readers still find it (:func:`deepspeed.checkpoint.directory.find`), and removed only after
the new one is in place. ``latest`` moves last.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.directory import (
    LATEST,
    LATEST_UNIVERSAL,
    REPLACED,
    SAVING,
    SCRIPT_NAME,
    Format,
    format_of,
    is_checkpoint_file,
    replaced_folder,
    tag_of_replaced,
    tags,
)
from deepspeed.checkpoint.format import MANIFEST, Manifest
from deepspeed.errors import CheckpointError
from deepspeed.logging import logger

_LOCK = ".lock"
_MARKER = ".made-by-"
_LOCKLESS_AGE = 24 * 3600.0  # seconds after which a left-over without a working lock is removed
_WRITTEN_BY_SAVES = {SAVING + name for name in (LATEST, LATEST_UNIVERSAL, SCRIPT_NAME)}


class SaveFolder:
    """The folder of one save until it is committed. One process owns it; all that write use the same ``token``."""

    def __init__(self, root: Path, tag: str, token: str) -> None:
        self._root = root
        self._tag = tag
        self.folder = root / f"{SAVING}{token}"  # the folder of the files
        self._lock = disk.FolderLock(Path(f"{self.folder}{_LOCK}"))
        self._is_made = False

    def create(self) -> None:
        """Makes the folder, after removing leftovers of killed saves."""
        self._is_made = True
        tag = self._root / self._tag
        if tag.is_file():
            raise CheckpointError(f"{tag}: expected a folder or nothing, found a file; save under another tag")
        disk.make_folder(self._root)
        clean(self._root)
        self._lock.take()
        disk.make_folder(self.folder)

    def is_visible(self) -> bool:
        """Returns whether the folder is there for this process."""
        return self.folder.is_dir()

    def real_path(self) -> str:
        """Returns the folder's path on this machine, without links."""
        return os.path.realpath(self.folder)

    def mark(self, rank: int) -> None:
        """Writes a marker that ``rank`` has made this folder."""
        self._marker(rank).touch()

    def is_marked(self, rank: int) -> bool:
        """Returns whether ``rank`` has made this folder."""
        return self._marker(rank).exists()

    def _marker(self, rank: int) -> Path:
        return self.folder / f"{_MARKER}{rank}"

    def write_manifest(self, manifest: Manifest) -> None:
        """Writes the last file of a checkpoint. A folder without it is no checkpoint."""
        for marker in self.folder.glob(f"{_MARKER}*"):
            marker.unlink()
        with disk.new_file(self.folder / MANIFEST) as descriptor:
            disk.write_all(descriptor, memoryview(manifest.encode()))
        disk.sync_folder(self.folder)

    def commit(self) -> Path:
        """Renames the folder to its tag; returns the tag folder."""
        final, replaced = self._root / self._tag, replaced_folder(self._root, self._tag)
        disk.make_folder(final.parent)
        stands_aside = os.path.lexists(final)
        if stands_aside:
            disk.remove_folder(replaced)
            disk.rename(final, replaced)
        try:
            disk.rename(self.folder, final)
        except BaseException:
            if stands_aside and not final.exists():
                os.rename(replaced, final)
            raise
        if os.path.lexists(replaced):
            _keep_foreign_files(replaced, final)
            disk.remove_folder(replaced)
        self._drop_lock()
        return final

    def abandon(self) -> None:
        """Removes the folder, if this process made it."""
        if not self._is_made:
            return
        with contextlib.suppress(OSError):
            disk.remove_folder(self.folder)
        self._drop_lock()

    def _drop_lock(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._lock.path)
        self._lock.release()


def _keep_foreign_files(old: Path, new: Path) -> None:
    """Moves files of other programs from the former tag folder into the new one, unless that was a link to another."""
    if old.is_symlink():
        return
    for name in os.listdir(old):
        if not is_checkpoint_file(name) and not (new / name).exists():
            os.rename(old / name, new / name)


def clean(root: Path) -> None:
    """Removes leftovers of killed saves in ``root``, and completes interrupted replacements."""
    names = os.listdir(root)
    in_use = False
    for name in names:
        path = root / name
        if name.startswith(SAVING) and name.endswith(_LOCK):
            in_use |= not _remove_if_abandoned(root / name.removesuffix(_LOCK), path)
        elif name.startswith(SAVING) and path.is_dir() and not Path(f"{path}{_LOCK}").exists():
            in_use |= not _remove_if_abandoned(path, Path(f"{path}{_LOCK}"))
    for name in [] if in_use else names:
        path = root / name
        if name.startswith(REPLACED) and (path.is_dir() or path.is_symlink()):
            final = root / tag_of_replaced(name)
            if final.exists():
                _keep_foreign_files(path, final)
                disk.remove_folder(path)
            else:
                disk.make_folder(final.parent)
                disk.rename(path, final)
                logger.warning("%s: a save of this tag was interrupted; the tag has its former content again", final)
        elif name.startswith(SAVING) and path.is_file() and _is_left_over(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)  # a file that was about to replace another


def _is_left_over(file: Path) -> bool:
    """Returns whether no process writes a hidden file any more. Exports may write theirs into the same folder."""
    if file.name in _WRITTEN_BY_SAVES:
        return True
    with contextlib.suppress(FileNotFoundError):
        return time.time() - file.stat().st_mtime >= _LOCKLESS_AGE
    return False


def _remove_if_abandoned(folder: Path, lock_file: Path) -> bool:
    """Deletes ``folder`` if no process works in it; returns whether it did."""
    lock = disk.FolderLock(lock_file)
    try:
        if not lock.take():
            return False
        if not lock.is_held and folder.exists() and time.time() - folder.stat().st_mtime < _LOCKLESS_AGE:
            return False
        disk.remove_folder(folder)
        os.unlink(lock_file)
    except FileNotFoundError:
        return True  # another process cleans up as well
    finally:
        lock.release()
    return True


def point_latest(root: Path, tag: str) -> None:
    """Makes ``latest`` name ``tag``."""
    disk.replace_file(root / LATEST, tag.encode())


def prune(root: Path, keep: int, newest: str) -> list[str]:
    """Removes the oldest checkpoints of this format, never the tag ``newest``; returns the tags that were removed."""
    ours = []
    for tag in tags(root):
        try:
            if format_of(root / tag) is Format.OURS and Manifest.read(root / tag).facts.get("tag") == tag:
                ours.append(tag)
        except CheckpointError:
            continue  # damaged checkpoints are kept for inspection
    candidates = [tag for tag in ours if tag != newest]
    removed = candidates[: max(len(candidates) - (keep - 1), 0)]
    for tag in removed:
        # Renamed before it is deleted, so that no reader sees half a checkpoint.
        aside = root / f"{SAVING}{secrets.token_hex(8)}"
        disk.rename(root / tag, aside)
        disk.remove_folder(aside)
    return removed
