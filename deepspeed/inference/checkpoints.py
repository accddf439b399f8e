"""Filling a model from files of weights, tensor by tensor, whether it has memory already or is on the meta device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from deepspeed.errors import CheckpointError

_PATTERNS = ("*.safetensors", "pytorch_model*.bin", "*.pt")


def fill(model: nn.Module, checkpoint: str | dict[str, Any], dtype: torch.dtype, *, base_dir: str = "") -> None:
    """Gives every parameter and saved buffer of ``model`` its value from files.

    Args:
        model: Its tensors may be on the meta device; those are replaced.
        checkpoint: A folder, a file of weights, a JSON file, or what such a file holds: an object whose
            ``checkpoints`` lists files of whole tensors.
        dtype: Of floating tensors.
        base_dir: Folder that relative names start from.

    Raises:
        CheckpointError: Files are missing, hold something else, or leave tensors of the model without a value.
    """
    files = _files(checkpoint, Path(base_dir))
    _make_buffers(model)
    find = _finder(model)
    unknown: list[str] = []
    filled: set[str] = set()
    for name, values in _tensors(files):
        place = find(name)
        if place is None:
            unknown.append(name)
            continue
        _put(model, place, values, dtype)
        filled.add(place)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    # What is left: tensors without a value, by identity, so that a tied head counts as filled.
    state = dict(model.state_dict(keep_vars=True))
    have = {id(state[name]) for name in filled if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in have]
    if missing:
        also = f"; {len(unknown)} tensors of the files have no place, such as {unknown[0]!r}" if unknown else ""
        raise CheckpointError(
            f"init_inference: {len(missing)} tensors of {type(model).__name__} are in none of the {len(files)} files "
            f"({files[0]} ...), such as {missing[0]!r}{also}"
        )


def _files(checkpoint: str | dict[str, Any], base: Path) -> list[Path]:
    if isinstance(checkpoint, str):
        path = base / checkpoint
        if path.is_dir():
            for pattern in _PATTERNS:
                if found := sorted(path.glob(pattern)):
                    return found
            raise CheckpointError(f"init_inference: the folder {path} has no {' or '.join(_PATTERNS)}")
        if not path.is_file():
            raise CheckpointError(f"init_inference: checkpoint {path}: there is no such file or folder")
        if path.suffix != ".json":
            return [path]
        return _listed(json.loads(path.read_text()), path.parent)
    return _listed(checkpoint, base)


def _listed(description: dict[str, Any], base: Path) -> list[Path]:
    listed = description.get("checkpoints")
    base = Path(description.get("base_dir") or base)
    if isinstance(listed, str):
        return _files(listed, base)
    if not isinstance(listed, list) or int(description.get("tp_size") or description.get("mp_size") or 1) > 1:
        raise CheckpointError(
            "init_inference: checkpoint: expected an object whose 'checkpoints' lists files of whole tensors; files "
            "that are cut for several ranks are read by deepspeed.checkpoint, which writes whole ones"
        )
    found = [base / name for name in listed]
    for path in found:
        if not path.is_file():
            raise CheckpointError(f"init_inference: checkpoint: there is no file {path}")
    return found


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        try:
            yield from _tensors_of(path)
        except (SafetensorError, RuntimeError, EOFError, UnpicklingError) as error:
            raise CheckpointError(
                f"init_inference: {path} cannot be read ({error}); it is damaged or no file of weights. Write it "
                "again, or name another one"
            ) from error


def _tensors_of(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                yield name, opened.get_tensor(name)
        return
    found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    found = found.get("module", found)
    yield from ((name, values) for name, values in found.items() if isinstance(values, torch.Tensor))


def _finder(model: nn.Module) -> Callable[[str], str | None]:
    """The tensor of the model that a file means: files may have one prefix more or less than the model."""
    names = set(model.state_dict(keep_vars=True))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def find(name: str) -> str | None:
        for candidate in (name, prefix + name, name.removeprefix(prefix), name.removeprefix("module.")):
            if candidate in names:
                return candidate
        return None

    return find


def _put(model: nn.Module, name: str, values: torch.Tensor, dtype: torch.dtype) -> None:
    holder_name, _, leaf = name.rpartition(".")
    holder = model.get_submodule(holder_name)
    old = getattr(holder, leaf)
    if old.shape != values.shape:
        raise CheckpointError(
            f"init_inference: {name!r} has shape {tuple(old.shape)} in the model and {tuple(values.shape)} in the files"
        )
    values = values.to(dtype) if values.is_floating_point() else values
    if not old.is_meta:
        old.data = values.to(old.device)
    elif isinstance(old, nn.Parameter):
        setattr(holder, leaf, nn.Parameter(values, requires_grad=old.requires_grad and values.is_floating_point()))
    else:
        holder._buffers[leaf] = values


def _make_buffers(model: nn.Module) -> None:
    """Values for buffers on meta that no file has (angles of rotary positions): the model computes them again."""
    for name, module in model.named_modules():
        unsaved = [leaf for leaf in module._non_persistent_buffers_set if _is_meta(module._buffers.get(leaf))]
        if not unsaved:
            continue
        for leaf in unsaved:
            buffer = module._buffers[leaf]
            assert buffer is not None
            module._buffers[leaf] = torch.full_like(buffer, float("nan"), device="cpu")
        initialise = getattr(model, "_init_weights", None)
        if initialise is not None:
            with torch.no_grad():
                initialise(module)
        for leaf in unsaved:
            buffer = module._buffers[leaf]
            assert buffer is not None
            if bool(buffer.isnan().any()):
                raise CheckpointError(
                    f"init_inference: {name}.{leaf} is computed when the model is built, and it was built on the meta "
                    "device; build it on the CPU"
                )


def _is_meta(buffer: torch.Tensor | None) -> bool:
    return buffer is not None and buffer.is_meta
