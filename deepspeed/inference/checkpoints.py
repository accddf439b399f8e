"""Fills a model, allocated or on the meta device, from files of weights, tensor by tensor.

Transformers stores some tensors under other names, or in several pieces: files have experts one by one, which the model
has in one tensor. Its conversion rules for the kind of model are applied. Such a piece is read as a part of the model's
tensor, like the parts that tensor-parallel ranks write, so a rank still reads only its share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CheckpointError
from deepspeed.inference.weight_files import Stored, WeightFiles, find_files
from deepspeed.models.anatomy import base_prefix_of
from deepspeed.models.layers import initializer_of
from deepspeed.models.stored import stored_tensors_of
from deepspeed.parallel.pipe.transformers_models import pipeline_names
from deepspeed.zero.address import address_of, full_shape
from deepspeed.zero.construction.reading import SlicesFromFiles
from deepspeed.zero.tiling.parts import tile_of
from deepspeed.zero.tiling.tiles import Tile, TilePart, TileRegion


def fill(
    model: nn.Module,
    checkpoint: str | dict[str, Any],
    dtype: torch.dtype,
    *,
    base_dir: str = "",
    slices: SlicesFromFiles | None = None,
) -> None:
    """Loads every parameter and saved buffer of ``model`` from files.

    If the model is cut over tensor-parallel ranks, each rank reads only its parts.

    Args:
        checkpoint: A folder (of weights, or of ``save_checkpoint``), a file of weights, a JSON file, or the object of
            such a file: its ``checkpoints`` lists files of whole tensors, or has the lists ``non_tp`` and ``tp``.
        base_dir: Folder that relative names start from.
        slices: Makes parameters on the meta device slices, of which each rank reads its own; None: they become whole.

    Raises:
        CheckpointError: Files are missing, hold something else, or leave tensors of the model without a value.
    """
    files = find_files(checkpoint, Path(base_dir))
    _make_buffers(model)
    # Parts of tensor-parallel ranks may be cut within rows; then they are not contiguous in the whole tensor.
    targets = _ModelTensors(model, None if files.parts else slices)
    unknown: list[str] = []
    filled: set[str] = set()
    parts: Counter[str] = Counter()
    names = StoredNames(model, targets.shape_of)
    pipeline: dict[str, str] | None = None
    for raw in files.tensors():
        if files.training is not None and targets.name_of(raw.tile.name) is None:
            pipeline = pipeline_names(model) if pipeline is None else pipeline
            raw = _rename_by_prefix(raw, pipeline)
        stored = raw if targets.name_of(raw.tile.name) is not None else names.resolve(raw)
        if stored is None:
            continue
        name = targets.name_of(stored.tile.name)
        if name is None:
            unknown.append(stored.tile.name)
            continue
        targets.put(name, stored, dtype)
        filled.add(name)
        parts[stored.tile.name] += stored.is_part
    for stored in names.converted():
        targets.put(stored.tile.name, stored, dtype)
        filled.add(stored.tile.name)
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()
    written = Counter({name: count for name, count in parts.items() if not names.is_made_of_members(name)})
    _refuse_gaps(model, files, filled, written, unknown)


def _rename_by_prefix(stored: Stored, prefixes: dict[str, str]) -> Stored:
    name = stored.tile.name
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    if prefix is None:
        return stored
    return replace(stored, tile=replace(stored.tile, name=prefixes[prefix] + name.removeprefix(prefix)))


def _refuse_gaps(
    model: nn.Module, files: WeightFiles, filled: set[str], parts: Counter[str], unknown: list[str]
) -> None:
    for name, count in parts.items():
        if count not in (0, len(files.parts)):
            raise CheckpointError(
                f"init_inference: {name!r}: expected {len(files.parts)} parts in the files ({files}), found {count}; "
                "copy the files of all parts"
            )
    # By identity, so that a tied head counts as filled.
    state = dict(model.state_dict(keep_vars=True))
    have = {id(state[name]) for name in filled if name in state}
    missing = [name for name, tensor in state.items() if id(tensor) not in have]
    if missing:
        also = f"; {len(unknown)} tensors of the files are not in the model, such as {unknown[0]!r}" if unknown else ""
        if unknown and hasattr(model, "from_pretrained"):
            also += ". Transformers may store them in another form: from_pretrained reads it, without checkpoint="
        raise CheckpointError(
            f"init_inference: {len(missing)} tensors of {type(model).__name__} are in none of the {files}, such as "
            f"{missing[0]!r}{also}. Load files of this model, or build the model that the files belong to"
        )


class _ModelTensors:
    def __init__(self, model: nn.Module, slices: SlicesFromFiles | None = None) -> None:
        self._slices = slices
        self._model = model
        self._names = set(model.state_dict(keep_vars=True))
        self._prefix = f"{base_prefix_of(model)}."
        self._users: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for leaf, parameter in module._parameters.items():
                self._users.setdefault(id(parameter), []).append((module, leaf))

    def name_of(self, name: str) -> str | None:
        """Returns the model's name for a tensor in files, whose prefix may differ; None if the model has none."""
        candidates = (name, self._prefix + name, name.removeprefix(self._prefix), name.removeprefix("module."))
        return next((candidate for candidate in candidates if candidate in self._names), None)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the whole shape of the tensor with this name in files; None if there is none."""
        own_name = self.name_of(name)
        if own_name is None:
            return None
        parent, _, leaf = own_name.rpartition(".")
        tensor: torch.Tensor = getattr(self._model.get_submodule(parent), leaf)
        return tile_of(own_name, full_shape(tensor), -1, tensor).global_shape

    def put(self, name: str, stored: Stored, dtype: torch.dtype) -> None:
        """Sets a tensor, in ``dtype`` if it is floating, to a file's values; CheckpointError where shapes differ."""
        parent_name, _, leaf = name.rpartition(".")
        parent = self._model.get_submodule(parent_name)
        old: torch.Tensor = getattr(parent, leaf)
        tile = tile_of(name, full_shape(old), -1, old)
        if tile.global_shape != stored.tile.global_shape:
            raise CheckpointError(
                f"init_inference: {name!r} has shape {tile.global_shape} in the model and {stored.tile.global_shape} "
                "in the files; build the model with the configuration of these files"
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
            new_dtype = dtype if old.is_floating_point() else old.dtype
            if not old.is_meta and old.dtype == new_dtype:
                values = old.data
            else:
                values = torch.zeros(tile.shape, dtype=new_dtype, device=None if old.is_meta else old.device)
            stored.copy_into(values, tile.regions)
        if not old.is_meta:
            old.data = values.to(old.device)
        elif isinstance(old, nn.Parameter):
            self._replace(old, nn.Parameter(values, requires_grad=old.requires_grad and values.is_floating_point()))
        else:
            parent._buffers[leaf] = values

    def _replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Replaces a tensor in every module that has it, so that tied weights stay tied; copies its attributes."""
        new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in new.__dict__})
        users = self._users.pop(id(old))
        for module, leaf in users:
            module._parameters[leaf] = new
        self._users[id(new)] = users


def _make_buffers(model: nn.Module) -> None:
    """Computes buffers on meta that no file has by the model's own code; CheckpointError where it has none."""
    for name, module in model.named_modules():
        buffers = ((leaf, module._buffers.get(leaf)) for leaf in module._non_persistent_buffers_set)
        unsaved = [leaf for leaf, buffer in buffers if buffer is not None and buffer.is_meta]
        if not unsaved:
            continue
        for leaf in unsaved:
            buffer = module._buffers[leaf]
            assert buffer is not None
            module._buffers[leaf] = torch.full_like(buffer, float("nan"), device="cpu")
        initialize = initializer_of(model)
        if initialize is not None:
            with torch.no_grad():
                initialize(module)
        for leaf in unsaved:
            buffer = module._buffers[leaf]
            assert buffer is not None
            if bool(buffer.isnan().any()):
                raise CheckpointError(
                    f"init_inference: the buffer {name}.{leaf} is computed when the model is built, but the model was "
                    "built on the meta device; build it on the CPU"
                )


Shape = tuple[int, ...]


class StoredNames:
    """Maps tensors in files to those of a Transformers model (others keep their names), by the library's rules.

    ``shape_of`` returns the whole shape of the model's tensor for a name in files; None if the model has none.
    """

    def __init__(self, model: nn.Module, shape_of: Callable[[str], Shape | None]) -> None:
        self._shape_of = shape_of
        self._model = model
        self._members: list[tuple[re.Pattern[str], str, int, int]] = []  # pattern, target, index, count
        self._found: Counter[str] = Counter()  # elements read, by the model's tensor
        self._held_back: list[tuple[str, str, str, torch.Tensor]] = []  # target, name in files, pattern, values
        self._tensors = stored_tensors_of(model)
        for rule in self._tensors.rules if self._tensors is not None else ():
            self._add_rule(rule)

    def _add_rule(self, rule: Any) -> None:
        operations = [type(each).__name__ for each in getattr(rule, "operations", None) or ()]
        dims = [getattr(each, "dim", None) for each in getattr(rule, "operations", None) or ()]
        sources, targets = list(rule.source_patterns), list(rule.target_patterns)
        if len(targets) != 1:
            return
        if (operations, dims) in ((["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])):
            for index, source in enumerate(sources):
                pattern = re.compile(re.escape(source).replace(r"\*", r"(\d+)"))
                self._members.append((pattern, targets[0], index, len(sources)))

    def resolve(self, stored: Stored) -> Stored | None:
        """Returns the tensor under its name in the model: renamed, or as a part of a larger tensor.

        Returns None if the tensor can only be converted together with others; :meth:`converted` yields the results.

        Raises:
            CheckpointError: It is a part of the model's tensor, but has another shape than this part.
        """
        if self._tensors is None or stored.is_part:
            return stored
        name = self._tensors.renamed(stored.tile.name)
        for pattern, target, index, count in self._members:
            if (found := pattern.search(name)) is not None:
                stack = name[: found.start()] + target + name[found.end() :]
                if (shape := self._shape_of(stack)) is not None:
                    return self._member(stored, stack, shape, int(found.group(1)), index, count)
        reached = self._tensors.target(stored.tile.name)
        if reached is None or reached[1] is None:
            name = name if reached is None else reached[0]
            return stored if name == stored.tile.name else replace(stored, tile=replace(stored.tile, name=name))
        self._held_back.append((reached[0], stored.tile.name, reached[1], stored.read(()).clone()))
        return None

    def converted(self) -> Iterator[Stored]:
        """Yields the conversions of held-back tensors, after all files are read; CheckpointError where one fails."""
        tensors = self._tensors
        if tensors is None:
            return
        held_back, self._held_back = sorted(self._held_back, key=lambda each: tensors.order(each[1])), []
        conversions: dict[str, Any] = {}
        for target, key, pattern, values in held_back:
            conversion = conversions.setdefault(target, tensors.conversion(key, target, pattern))
            conversion.add_tensor(target, key, pattern, lambda values=values: values)
        del held_back
        model: Any = self._model
        for target in list(conversions):
            try:
                with torch.no_grad():
                    results = conversions.pop(target).convert(target, model=model, config=model.config)
            except (RuntimeError, ValueError, IndexError) as error:
                raise CheckpointError(
                    f"init_inference: the tensors in the files for {target!r} cannot be converted: {error}. Use the "
                    "configuration that the files were saved with"
                ) from error
            for name, value in results.items():
                tensor = value[0] if isinstance(value, list) else value
                yield Stored(Tile(name, tuple(tensor.shape)), False, tensor.__getitem__)

    def _member(self, stored: Stored, stack: str, shape: Shape, number: int, index: int, count: int) -> Stored:
        rows = shape[1] // count
        if number >= shape[0] or stored.tile.shape != (rows, *shape[2:]):
            raise CheckpointError(
                f"init_inference: {stored.tile.name!r}: expected shape {(rows, *shape[2:])} and a number below "
                f"{shape[0]}, as a part of {stack!r}, which has shape {shape} in the model; found shape "
                f"{stored.tile.shape}. Build the model with the configuration of these files"
            )
        extents = (1, *stored.tile.shape)
        region = TileRegion((number, index * rows, *[0] * (len(shape) - 2)), (0,) * len(shape), extents)
        self._found[stack] += region.numel
        tile = Tile(stack, extents, part=TilePart(stack, shape, (region,)))
        return Stored(tile, True, lambda where: stored.read(where[1:]).unsqueeze(0))

    def is_made_of_members(self, name: str) -> bool:
        """Returns whether :meth:`resolve` has found pieces of a tensor; CheckpointError where some are missing."""
        numel = self._found.get(name, 0)
        shape = self._shape_of(name) if numel else None
        if shape is None:
            return False
        total = prod(shape)
        if numel != total:
            raise CheckpointError(
                f"init_inference: the files hold {numel:,} of the {total:,} elements of {name!r}; "
                "copy the files that are missing"
            )
        return True
