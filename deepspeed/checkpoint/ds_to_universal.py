"""``python -m deepspeed.checkpoint.ds_to_universal``: accepted as before, and no longer needed.

Every checkpoint of this package is read at any number of ranks and any stage, and so are those of the original one.
What the command still does: it writes the checkpoint under another name, in this package's format, and lets
``latest_universal`` name it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from deepspeed.checkpoint import disk
from deepspeed.checkpoint.commit import SaveFolder
from deepspeed.checkpoint.consolidate import open_source
from deepspeed.checkpoint.convert import convert
from deepspeed.checkpoint.directory import LATEST_UNIVERSAL, Format, check_tag, format_of
from deepspeed.checkpoint.format import MANIFEST, Manifest
from deepspeed.checkpoint.upstream import UpstreamSource
from deepspeed.errors import CheckpointError
from deepspeed.release import VERSION

_NOT_NEEDED = (
    "Conversion is no longer needed: load_checkpoint reads {input} directly, at any number of ranks and any "
    "ZeRO stage.\n"
)
_NO_OPTIMIZER = (
    "The optimizer states were left out: the checkpoint has none, or does not name them (stage 0). load_checkpoint on "
    "the original folder can take them, because there the model says which is which.\n"
)


def convert_folder(source: Path, target: Path) -> None:
    """Writes the tag folder ``source`` as ``target`` and lets ``latest_universal`` beside it name it.

    Raises:
        CheckpointError: ``source`` is no whole checkpoint.
        OSError: ``target`` cannot be written.
    """
    kind = format_of(source)
    if kind is None:
        raise CheckpointError(f"{source} is not a checkpoint; pass the folder of one tag, such as .../global_step10")
    root, tag = target.parent, check_tag(target.name)
    if kind is Format.OURS:
        _link(source, root, tag)
    else:
        opened = open_source(source)
        assert isinstance(opened, UpstreamSource)
        if not opened.state.scalars:
            sys.stdout.write(_NO_OPTIMIZER)
        convert(opened, opened.state, root, tag, VERSION)
    disk.replace_file(root / LATEST_UNIVERSAL, tag.encode())


def _link(source: Path, root: Path, tag: str) -> None:
    """The same files under another name: linked where the file system can, copied otherwise."""
    manifest = Manifest.read(source)
    folder = SaveFolder(root, tag, os.urandom(8).hex())
    folder.create()
    try:
        for name in (*(entry.name for entry in manifest.files), MANIFEST):
            try:
                os.link(source / name, folder.folder / name)
            except OSError:
                shutil.copyfile(source / name, folder.folder / name)
        disk.sync_folder(folder.folder)
        folder.commit()
    except BaseException:
        folder.abandon()
        raise


def main(arguments: list[str] | None = None) -> int:
    """The command line.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="python -m deepspeed.checkpoint.ds_to_universal", description=__doc__)
    parser.add_argument("--input_folder", required=True, help="the folder of one tag")
    parser.add_argument("--output_folder", required=True, help="where the converted checkpoint goes")
    without = "accepted; without effect"
    parser.add_argument("--num_extract_workers", type=int, default=4, help=without)
    parser.add_argument("--num_merge_workers", type=int, default=2, help=without)
    for name in ("--keep_temp_folder", "--no_strict", "--inject_missing_state"):
        parser.add_argument(name, action="store_true", help=without)
    given = parser.parse_args(arguments)
    sys.stdout.write(_NOT_NEEDED.format(input=given.input_folder))
    try:
        convert_folder(Path(given.input_folder), Path(given.output_folder))
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"Written: {given.output_folder}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
