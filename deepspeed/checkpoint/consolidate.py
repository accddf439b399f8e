"""Reads a checkpoint into full tensors, without a GPU, a process group or a configuration.

``zero_to_fp32.py``, which is saved next to every checkpoint, contains this module and its imports.
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.directory import Format, find, format_of, what_exists
from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import CheckpointSource, Wanted
from deepspeed.checkpoint.weights_file import TensorEntry, WeightsWriter, parse_size
from deepspeed.errors import CheckpointError

_PART_NUMEL = 1 << 22
_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


class FullTensor:
    """A tensor of a checkpoint that is read when it is requested."""

    def __init__(self, source: CheckpointSource, name: str, dtype: torch.dtype | None, kind: str | None = None) -> None:
        self._source = source
        self.name = name
        parameter = source.parameters.get(name)
        if parameter is not None:
            self._kind = kind or (MASTER if MASTER in parameter.kinds else COMPUTE)
            self.shape, stored = torch.Size(parameter.shape), parameter.kinds[self._kind]
        else:
            self._kind = ""
            self.shape, stored = torch.Size(source.buffers[name].shape), source.buffers[name].dtype
        self.dtype = dtype if dtype is not None and stored.is_floating_point else stored

    def numel(self) -> int:
        """Returns the number of elements."""
        return self.shape.numel()

    def parts(self) -> Iterator[torch.Tensor]:
        """Yields the flattened tensor in 1-D chunks. They share a buffer: use each one before requesting the next."""
        if not self._kind:
            yield self._source.read_buffer(self.name).to(self.dtype).reshape(-1)
            return
        self._source.check([Wanted(self._kind, self.name, 0, self.numel())])
        part = torch.empty(min(_PART_NUMEL, self.numel()), dtype=self.dtype)
        for start in range(0, self.numel(), _PART_NUMEL):
            stop = min(start + _PART_NUMEL, self.numel())
            self._source.read(Wanted(self._kind, self.name, start, stop), part[: stop - start])
            yield part[: stop - start]

    def contiguous(self) -> torch.Tensor:
        """Returns the whole tensor, with a storage of its own."""
        out = torch.empty(self.numel(), dtype=self.dtype)
        position = 0
        for part in self.parts():
            out[position : position + part.numel()].copy_(part)
            position += part.numel()
        return out.view(self.shape)

    def __repr__(self) -> str:
        return f"FullTensor({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def open_source(checkpoint_dir: str | Path, tag: str | None = None) -> CheckpointSource:
    """Opens a checkpoint of any format: a folder of one tag, or of checkpoints, there the newest by default.

    Raises:
        CheckpointError: There is none.
    """
    root = Path(checkpoint_dir)
    kind = format_of(root) if tag is None else None
    if kind is not None:
        folder = root
    else:
        found = find(root, tag)
        if found is None:
            raise CheckpointError(f"{root}: {what_exists(root)}; correct the folder or the tag")
        folder, kind = found.folder, found.format
    if kind is Format.OURS:
        return CheckpointReader(folder)
    try:
        from deepspeed.checkpoint.upstream import open_upstream
    except ImportError:  # in zero_to_fp32.py, which contains only the reader of this package's format
        raise CheckpointError(f"{folder}: to read checkpoints of another format, install deepspeed") from None
    return open_upstream(folder, kind)


def _entries(
    source: CheckpointSource, dtype: torch.dtype | None, exclude_frozen: bool
) -> list[tuple[TensorEntry, FullTensor]]:
    """Returns everything that a full state dict holds; tied tensors follow the one that holds their values."""
    names = [n for n, parameter in source.parameters.items() if not (exclude_frozen and parameter.is_frozen)]
    names += list(source.buffers)
    tied: dict[str, list[str]] = {}
    for alias, name in source.aliases.items():
        tied.setdefault(name, []).append(alias)
    found = []
    for name in names:
        full = FullTensor(source, name, dtype)
        found.append((TensorEntry(name, full.dtype, tuple(full.shape)), full))
        for alias in tied.get(name, ()):
            found.append((TensorEntry(alias, full.dtype, tuple(full.shape), same_as=name), full))
    return found


def full_tensors(source: CheckpointSource) -> dict[str, torch.Tensor]:
    """Returns the full state dict of an open checkpoint, in the best values that it has.

    Tied names share one tensor.
    """
    state: dict[str, torch.Tensor] = {}
    for entry, full in _entries(source, None, exclude_frozen=False):
        state[entry.name] = state[entry.same_as] if entry.same_as is not None else full.contiguous()
    return state


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> OrderedDict[str, Any]:
    """Returns the model's full state dict in fp32; integer buffers keep their dtype, tied names share one tensor.

    Args:
        tag: Name of the checkpoint; None for the one that ``latest`` names.
        lazy_mode: Return :class:`FullTensor` objects, which are read when ``contiguous()`` is called.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
    """
    source = open_source(checkpoint_dir, tag)
    state: OrderedDict[str, Any] = OrderedDict()
    for entry, full in _entries(source, torch.float32, exclude_frozen_parameters):
        if entry.same_as is not None:
            state[entry.name] = state[entry.same_as]
        else:
            state[entry.name] = full if lazy_mode else full.contiguous()
    return state


def to_torch_tensor(
    state_dict: Mapping[str, Any], return_empty_tensor: bool = False, dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """Reads the entries of a ``lazy_mode`` state dict; ``return_empty_tensor``: only allocates, to plan sizes."""
    made: dict[str, torch.Tensor] = {}
    by_entry: dict[int, torch.Tensor] = {}
    for name, value in state_dict.items():
        if id(value) not in by_entry:
            kept = dtype if dtype is not None and value.dtype.is_floating_point else value.dtype
            if return_empty_tensor:
                by_entry[id(value)] = torch.empty(tuple(value.shape), dtype=kept)
            else:
                by_entry[id(value)] = value.contiguous().to(kept)
        made[name] = by_entry[id(value)]
    return made


def convert_zero_checkpoint_to_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[str]:
    """Writes the model's full tensors as files that other programs read; returns paths of the files.

    Args:
        output_dir: A name ending in ``.bin`` or ``.safetensors`` is that one file; anything else is a folder, in which
            the files are called ``pytorch_model.bin`` or ``model.safetensors``, with an index if there are several.
        max_shard_size: Largest file in bytes or as a text such as ``5GB``; None for one file.
        safe_serialization: Write safetensors into the folder instead of torch files.
        tag: Name of the checkpoint; None for the one that ``latest`` names.

    Raises:
        CheckpointError: The checkpoint is missing or damaged; no file was changed.
    """
    output = Path(output_dir)
    if output.suffix in (".bin", ".safetensors") and not output.is_dir():
        folder, filename, limit = output.parent, output.name, None
    else:
        folder = output
        filename = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        limit = None if max_shard_size is None else parse_size(max_shard_size)
    entries = _entries(open_source(checkpoint_dir, tag), dtype, exclude_frozen_parameters)
    writer = WeightsWriter(folder, filename, [entry for entry, _ in entries], limit)
    try:
        for entry, full in entries:
            writer.add(entry, full.parts())
        return [str(folder / name) for name in writer.finish()]
    except BaseException:
        writer.abandon()
        raise


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> list[str]:
    """Does what :func:`convert_zero_checkpoint_to_state_dict` does, in fp32."""
    return convert_zero_checkpoint_to_state_dict(
        checkpoint_dir, output_dir, torch.float32, max_shard_size, safe_serialization, tag, exclude_frozen_parameters
    )


def load_state_dict_from_zero_checkpoint(
    model: torch.nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> torch.nn.Module:
    """Moves ``model`` to the CPU and fills it with the fp32 weights of a checkpoint.

    The model must not be an engine's; for that there is ``engine.load_checkpoint``.

    Args:
        tag: Name of the checkpoint; None for the one that ``latest`` names.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line of ``zero_to_fp32.py``; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes the full weights of a checkpoint as ordinary files.")
    parser.add_argument("checkpoint_dir", help="folder that contains the tag folder, such as path/checkpoint-12")
    parser.add_argument("output_dir", help="folder for the results, or one file ending in .bin or .safetensors")
    parser.add_argument("--max_shard_size", default="5GB", help="maximum size of a file, such as 5GB (the default)")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors instead of torch files")
    parser.add_argument(
        "-t", "--tag", default=None, help="name of the checkpoint (default: the one in the file 'latest')"
    )
    parser.add_argument("--exclude_frozen_parameters", action="store_true", help="leave frozen parameters out")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="fp32", help="dtype of the results (default fp32)")
    parser.add_argument("-d", "--debug", action="store_true", help="show the traceback of an error")
    given = parser.parse_args(arguments)
    try:
        written = convert_zero_checkpoint_to_state_dict(
            given.checkpoint_dir,
            given.output_dir,
            _DTYPES[given.dtype],
            given.max_shard_size,
            given.safe_serialization,
            given.tag,
            given.exclude_frozen_parameters,
        )
    except (CheckpointError, OSError, ValueError) as error:
        if given.debug:
            raise
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("".join(f"{path}\n" for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main())
