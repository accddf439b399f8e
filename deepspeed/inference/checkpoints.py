"""Filling a model from files of weights, tensor by tensor, whether it has memory already or is on the meta device."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CheckpointError
from deepspeed.inference.stored_names import StoredNames
from deepspeed.inference.weight_files import Stored, WeightFiles, find_files
from deepspeed.models.anatomy import base_prefix_of
from deepspeed.models.layers import initialiser_of
from deepspeed.parallel.pipe.transformers_models import pipeline_names
from deepspeed.zero.address import address_of, full_shape
from deepspeed.zero.construction.reading import SlicesFromFiles
from deepspeed.zero.tiling.parts import tile_of


def fill(
    model: nn.Module,
    checkpoint: str | dict[str, Any],
    dtype: torch.dtype,
    *,
    base_dir: str = "",
    slices: SlicesFromFiles | None = None,
) -> None:
    """Gives every parameter and saved buffer of ``model`` its value from files.

    Of a model that is cut over ranks each rank reads its parts, and no more.

    Args:
        model: Its tensors may be on the meta device; those are replaced.
        checkpoint: A folder (of weights, or of ``save_checkpoint``), a file of weights, a JSON file, or what such a
            file holds: an object whose ``checkpoints`` lists files of whole tensors, or has the lists ``non_tp`` and
            ``tp``.
        dtype: Of floating tensors.
        base_dir: Folder that relative names start from.
        slices: Parameters on the meta device become slices, of which each rank reads its own; None: they become whole.

    Raises:
        CheckpointError: Files are missing, hold something else, or leave tensors of the model without a value.
    """
    files = find_files(checkpoint, Path(base_dir))
    _make_buffers(model)
    # Parts of tensor-parallel ranks may cut rows, so that no slice is a stretch of them.
    places = _Places(model, None if files.parts else slices)
    unknown: list[str] = []
    filled: set[str] = set()
    pieces: Counter[str] = Counter()
    names = StoredNames(model, places.shape_of)
    pipeline: dict[str, str] | None = None
    for raw in files.tensors():
        if files.training is not None and places.of(raw.tile.name) is None:
            pipeline = pipeline_names(model) if pipeline is None else pipeline
            raw = _renamed(raw, pipeline)
        stored = raw if places.of(raw.tile.name) is not None else names.resolve(raw)
        if stored is None:
            continue
        place = places.of(stored.tile.name)
        if place is None:
            unknown.append(stored.tile.name)
            continue
        places.put(place, stored, dtype)
        filled.add(place)
        pieces[stored.tile.name] += stored.is_part
    for stored in names.converted():
        places.put(stored.tile.name, stored, dtype)
        filled.add(stored.tile.name)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    written = Counter({name: count for name, count in pieces.items() if not names.is_made_of_pieces(name)})
    _refuse_gaps(model, files, filled, written, unknown)


def _renamed(stored: Stored, beginnings: dict[str, str]) -> Stored:
    """Returns a tensor of a pipeline's checkpoint under the name that it has in the model."""
    name = stored.tile.name
    begin = next((begin for begin in beginnings if name.startswith(begin)), None)
    if begin is None:
        return stored
    return replace(stored, tile=replace(stored.tile, name=beginnings[begin] + name.removeprefix(begin)))


def _refuse_gaps(
    model: nn.Module, files: WeightFiles, filled: set[str], pieces: Counter[str], unknown: list[str]
) -> None:
    for name, count in pieces.items():
        if count not in (0, len(files.parts)):
            raise CheckpointError(
                f"init_inference: {name!r}: expected {len(files.parts)} parts in the files ({files}), found {count}"
            )
    # What is left: tensors without a value, by identity, so that a tied head counts as filled.
    state = dict(model.state_dict(keep_vars=True))
    have = {id(state[name]) for name in filled if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in have]
    if missing:
        also = f"; {len(unknown)} tensors of the files have no place, such as {unknown[0]!r}" if unknown else ""
        if unknown and hasattr(model, "from_pretrained"):
            also += ". Transformers may store them in another form: from_pretrained reads it, without checkpoint="
        raise CheckpointError(
            f"init_inference: {len(missing)} tensors of {type(model).__name__} are in none of the {files}, such as "
            f"{missing[0]!r}{also}"
        )


class _Places:
    """The tensors of a model by the names that files have for them."""

    def __init__(self, model: nn.Module, slices: SlicesFromFiles | None = None) -> None:
        self._slices = slices
        self._model = model
        self._names = set(model.state_dict(keep_vars=True))
        self._prefix = f"{base_prefix_of(model)}."
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                self._users.setdefault(id(parameter), []).append((module, leaf))

    def of(self, name: str) -> str | None:
        """Files may have one prefix more or less than the model."""
        candidates = (name, self._prefix + name, name.removeprefix(self._prefix), name.removeprefix("module."))
        return next((candidate for candidate in candidates if candidate in self._names), None)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the whole shape of the tensor that files call so; None where there is none."""
        place = self.of(name)
        if place is None:
            return None
        parent, _, leaf = place.rpartition(".")
        tensor: torch.Tensor = getattr(self._model.get_submodule(parent), leaf)
        return tile_of(place, full_shape(tensor), -1, tensor).global_shape

    def put(self, name: str, stored: Stored, dtype: torch.dtype) -> None:
        """Gives a tensor of the model the values that a file has for it."""
        parent_name, _, leaf = name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        old: torch.Tensor = getattr(parent, leaf)
        tile = tile_of(name, full_shape(old), -1, old)
        if tile.global_shape != stored.tile.global_shape:
            raise CheckpointError(
                f"init_inference: {name!r} has shape {tile.global_shape} in the model and {stored.tile.global_shape} "
                "in the files"
            )
        if self._slices is not None and isinstance(old, nn.Parameter) and (old.is_meta or address_of(old) is not None):
            if old.is_meta:
                self._replace(old, self._slices.start(name, old))
            parameter: nn.Parameter = getattr(parent, leaf)
            self._slices.take(parameter, stored.offset_in_named(), prod(stored.tile.shape), stored.read_run)
            return
        if stored.is_whole and tile.part is None:
            values = stored.read(())
            values = values.to(dtype) if values.is_floating_point() else values
        else:
            kind = dtype if old.is_floating_point() else old.dtype
            ready = not old.is_meta and old.dtype == kind
            values = (
                old.data if ready else torch.zeros(tile.shape, dtype=kind, device=None if old.is_meta else old.device)
            )
            stored.copy_into(values, tile.boxes)
        if not old.is_meta:
            old.data = values.to(old.device)
        elif isinstance(old, nn.Parameter):
            self._replace(old, nn.Parameter(values, requires_grad=old.requires_grad and values.is_floating_point()))
        else:
            parent._buffers[leaf] = values

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """In every module that has it, so that tied weights stay tied; marks go along."""
        new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
        users = self._users.pop(id(old))
        for module, leaf in users:
            module._parameters[leaf] = new
        self._users[id(new)] = users


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
        initialise = initialiser_of(model)
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
