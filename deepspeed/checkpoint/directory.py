"""The folder of checkpoints: tags, ``latest``, and messages about missing ones. Reads only.

::

    <folder>/latest               text: the tag of the newest checkpoint
    <folder>/<tag>/               one checkpoint; nested folders if the tag has slashes
    <folder>/zero_to_fp32.py      consolidates without this package
    <folder>/.saving-*            a save in flight, or killed
    <folder>/.replaced-*/         the former content of a tag that is being saved again
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from urllib.parse import quote, unquote

from deepspeed.checkpoint.format import MANIFEST
from deepspeed.errors import CheckpointError

LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
SCRIPT_NAME = "zero_to_fp32.py"
SAVING = ".saving-"
REPLACED = ".replaced-"

_SHOWN_TAGS = 12
_DEEPEST_TAG = 4
_LONGEST_TAG = 200
_LONGEST_LATEST = 4096
_OUR_FILE = re.compile(r"rank\d+-.+")
_STATES = re.compile(r"(mp_rank_\d+|zero_pp_rank_\d+_mp_rank_\d+|layer_\d+-.*)_?model_states\.pt")
_OPTIM = re.compile(r"(bf16_)?(zero_pp_rank_\d+_mp_rank_\d+|expp_rank_\d+_mp_rank_\d+)_?optim_states\.pt")


class Format(Enum):
    """File layout of a tag folder: of this package, of the original one, or of the original's universal checkpoints."""

    OURS = "deepspeed"
    UPSTREAM = "upstream"
    UNIVERSAL = "upstream universal"


@dataclass(frozen=True)
class FoundCheckpoint:
    """An existing checkpoint."""

    tag: str  # its name
    folder: Path
    format: Format  # its format, which tells the program that wrote it


def check_tag(tag: object) -> str:
    """Returns the tag as text. Raises CheckpointError: it does not name a folder below the checkpoint folder."""
    text = str(tag)
    parts = PurePosixPath(text).parts
    outside = text.startswith(("/", "~")) or "\\" in text or "\0" in text or ".." in parts
    if not parts or outside or any(part.startswith((SAVING, REPLACED)) for part in parts):
        raise CheckpointError(
            f"tag {text!r} is not a name for a checkpoint; expected a folder name such as 'global_step10', or several "
            "joined by '/', without '..' and not starting at the root"
        )
    if str(PurePosixPath(text)) in (LATEST, LATEST_UNIVERSAL):
        raise CheckpointError(f"tag {text!r} is the name of the file that names the newest checkpoint; choose another")
    if len(quote(text, safe="")) > _LONGEST_TAG:
        raise CheckpointError(f"tag {text[:40]!r}... is longer than {_LONGEST_TAG} characters; choose a shorter one")
    return str(PurePosixPath(text))


def is_checkpoint_file(name: str) -> bool:
    """Returns whether a file of this name in a tag folder belongs to a checkpoint, ours or upstream's."""
    return name == MANIFEST or any(pattern.fullmatch(name) for pattern in (_OUR_FILE, _STATES, _OPTIM))


def replaced_folder(root: Path, tag: str) -> Path:
    """Returns the folder of the former content of ``tag`` while the tag is being saved again."""
    return root / (REPLACED + quote(tag, safe=""))


def tag_of_replaced(name: str) -> str:
    """Returns the tag of a folder that :func:`replaced_folder` names."""
    return unquote(name.removeprefix(REPLACED))


def format_of(folder: Path) -> Format | None:
    """Returns the format of ``folder``, or None. Raises CheckpointError: a checkpoint without its manifest."""
    if not folder.is_dir():
        return None
    if (folder / MANIFEST).is_file():
        return Format.OURS
    names = _entries(folder)
    if any(_OUR_FILE.fullmatch(name) for name in names):
        raise CheckpointError(
            f"{folder}: {MANIFEST} is missing although there is data; the checkpoint is damaged. Use another tag, or "
            "copy it again from where it was written"
        )
    if "zero" in names and (folder / "zero").is_dir():
        return Format.UNIVERSAL
    if any(_STATES.fullmatch(name) or _OPTIM.fullmatch(name) for name in names):
        return Format.UPSTREAM
    return None


def find(root: Path, tag: str | None, *, prefer_universal: bool = False) -> FoundCheckpoint | None:
    """Returns the checkpoint that ``load_checkpoint(root, tag)`` means.

    Args:
        tag: Its name; None for the one that ``latest`` names.
        prefer_universal: Without a tag, follow ``latest_universal`` if that exists.

    Returns:
        What was found; None if no tag was requested and ``root`` holds no checkpoint at all.

    Raises:
        CheckpointError: The tag is not there, ``latest`` is missing or names nothing whole; lists what is there.
    """
    if tag is not None:
        name = check_tag(tag)
        found = _open(root, name)
        if found is None:
            raise CheckpointError(f"{root}: there is no checkpoint with the tag {name!r}; {what_exists(root)}")
        return found
    for pointer in (LATEST_UNIVERSAL, LATEST) if prefer_universal else (LATEST,):
        named = read_pointer(root / pointer)
        if named is None:
            continue
        found = _open(root, check_tag(named))
        if found is None:
            raise CheckpointError(
                f"{root / pointer} names {named!r}, which is not a complete checkpoint; {what_exists(root)}. "
                "Pass the tag of one of them"
            )
        return found
    there = list(tags(root))
    if not there:
        return None
    raise CheckpointError(
        f"{root}: there is no file '{LATEST}' that names the newest checkpoint; {what_exists(root)}. Pass the tag of "
        "one of them"
    )


def _open(root: Path, tag: str) -> FoundCheckpoint | None:
    for folder in (root / tag, replaced_folder(root, tag)):
        kind = format_of(folder)
        if kind is not None:
            return FoundCheckpoint(tag, folder, kind)
    return None


def read_pointer(path: Path) -> str | None:
    """Returns the tag in ``latest``, None without it. Raises CheckpointError: it is unreadable, or names no tag."""
    try:
        data = path.read_bytes()[:_LONGEST_LATEST]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); check the disk and the permissions"
        ) from error
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        text = ""
    if not text:
        raise CheckpointError(f"{path} names no checkpoint; it is damaged. Pass a tag; {what_exists(path.parent)}")
    return text


def tags(root: Path) -> Iterable[str]:
    """Returns every whole checkpoint below ``root``, oldest first."""
    found: list[tuple[float, str]] = []
    _collect(root, "", found, _DEEPEST_TAG)
    return [tag for _, tag in sorted(found)]


def _collect(folder: Path, prefix: str, found: list[tuple[float, str]], depth: int) -> None:
    for name in _entries(folder):
        if name.startswith("."):
            continue
        path = folder / name
        if not path.is_dir():
            continue
        try:
            kind = format_of(path)
        except CheckpointError:
            continue
        if kind is not None:
            marker = path / MANIFEST if kind is Format.OURS else path
            found.append((marker.stat().st_mtime, prefix + name))
        # a folder with its own `latest` belongs to another experiment
        elif depth > 1 and not (path / LATEST).is_file():
            _collect(path, f"{prefix}{name}/", found, depth - 1)


def what_exists(root: Path) -> str:
    """Returns a part of a sentence that lists what is there."""
    if not root.exists():
        return "the folder does not exist"
    if not root.is_dir():
        return "it is not a folder"
    there = list(tags(root))
    if not there:
        return "there is no complete checkpoint in this folder"
    shown = there[-_SHOWN_TAGS:]
    more = f" and {len(there) - len(shown)} older" if len(there) > len(shown) else ""
    latest = root / LATEST
    pointer = ""
    if latest.is_file():
        pointer = f" ('{LATEST}' names {latest.read_bytes()[:200].decode(errors='replace').strip()!r})"
    return f"there are {', '.join(repr(tag) for tag in shown)}{more}{pointer}"


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
