"""Tensors that Transformers stores under other names, and cut into pieces: experts, which files have one by one.

What is stored how is asked of Transformers itself, which knows it for each kind of model. A piece is then a part of the
tensor that the model has, like the parts that tensor-parallel ranks write, so a rank still reads its share alone.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from deepspeed.errors import CheckpointError
from deepspeed.inference.weight_files import Stored
from deepspeed.models.stored import stored_tensors_of
from deepspeed.zero.tiling.tiles import Box, Tile, TilePart

Shape = tuple[int, ...]


class StoredNames:
    """What the files of a model of Transformers call its tensors.

    Args:
        model: Any module; of others than Transformers' nothing is known.
        shape_of: The whole shape of the tensor that a name in files stands for; None where the model has none.
    """

    def __init__(self, model: nn.Module, shape_of: Callable[[str], Shape | None]) -> None:
        self._shape_of = shape_of
        self._model = model
        self._pieces: list[tuple[re.Pattern[str], str, int, int]] = []  # pattern, target, place, places
        self._found: Counter[str] = Counter()  # elements of pieces, by the name of the whole
        self._kept: list[tuple[str, str, str, torch.Tensor]] = []  # target, name in files, pattern, values
        self._tensors = stored_tensors_of(model)
        for rule in self._tensors.rules if self._tensors is not None else ():
            self._take(rule)

    def _take(self, rule: Any) -> None:
        operations = [type(each).__name__ for each in getattr(rule, "operations", None) or ()]
        dims = [getattr(each, "dim", None) for each in getattr(rule, "operations", None) or ()]
        sources, targets = list(rule.source_patterns), list(rule.target_patterns)
        if len(targets) != 1:
            return
        if (operations, dims) in ((["MergeModulelist"], [0]), (["MergeModulelist", "Concatenate"], [0, 1])):
            for place, source in enumerate(sources):
                pattern = re.compile(re.escape(source).replace(r"\*", r"(\d+)"))
                self._pieces.append((pattern, targets[0], place, len(sources)))

    def resolve(self, stored: Stored) -> Stored | None:
        """Returns the tensor under the name that the model may have for it: renamed, or as a part of a larger one.

        Returns:
            None: the tensor becomes another one only together with others. It was read, and :meth:`converted` gives
            what they become.

        Raises:
            CheckpointError: It is a piece, but not of the shape that the model's tensor has room for.
        """
        if self._tensors is None or stored.is_part:
            return stored
        name = self._tensors.renamed(stored.tile.name)
        for pattern, target, place, places in self._pieces:
            if (found := pattern.search(name)) is not None:
                whole = name[: found.start()] + target + name[found.end() :]
                if (shape := self._shape_of(whole)) is not None:
                    return self._piece(stored, whole, shape, int(found.group(1)), place, places)
        reached = self._tensors.target(stored.tile.name)
        if reached is None or reached[1] is None:
            name = name if reached is None else reached[0]
            return stored if name == stored.tile.name else replace(stored, tile=replace(stored.tile, name=name))
        self._kept.append((reached[0], stored.tile.name, reached[1], stored.read(()).clone()))
        return None

    def converted(self) -> Iterator[Stored]:
        """Gives what the tensors become that were kept; call it when all files were read.

        Raises:
            CheckpointError: They cannot be converted.
        """
        tensors = self._tensors
        if tensors is None:
            return
        kept, self._kept = sorted(self._kept, key=lambda each: tensors.order(each[1])), []
        conversions: dict[str, Any] = {}
        for target, key, pattern, values in kept:
            conversion = conversions.setdefault(target, tensors.conversion(key, target, pattern))
            conversion.add_tensor(target, key, pattern, lambda values=values: values)
        del kept
        model: Any = self._model
        for target in list(conversions):
            try:
                with torch.no_grad():
                    made = conversions.pop(target).convert(target, model=model, config=model.config)
            except (RuntimeError, ValueError, IndexError) as error:
                raise CheckpointError(
                    f"init_inference: the tensors in the files for {target!r} cannot be converted: {error}. Take the "
                    "configuration that the files were saved with"
                ) from error
            for name, value in made.items():
                whole = value[0] if isinstance(value, list) else value
                yield Stored(Tile(name, tuple(whole.shape)), False, functools.partial(_part_of, whole))

    def _piece(self, stored: Stored, whole: str, shape: Shape, number: int, place: int, places: int) -> Stored:
        rows = shape[1] // places
        if number >= shape[0] or stored.tile.shape != (rows, *shape[2:]):
            raise CheckpointError(
                f"init_inference: {stored.tile.name!r} has shape {stored.tile.shape} in the files; as a piece of "
                f"{whole!r}, which has shape {shape} in the model, it would have {(rows, *shape[2:])}, with a number "
                f"below {shape[0]}"
            )
        extents = (1, *stored.tile.shape)
        box = Box((number, place * rows, *[0] * (len(shape) - 2)), (0,) * len(shape), extents)
        self._found[whole] += box.numel
        tile = Tile(whole, extents, part=TilePart(whole, shape, (box,)))
        return Stored(tile, True, lambda where: stored.read(where[1:]).unsqueeze(0))

    def is_made_of_pieces(self, name: str) -> bool:
        """Returns whether pieces of a tensor were found.

        Raises:
            CheckpointError: Some were, and others not.
        """
        numel = self._found.get(name, 0)
        shape = self._shape_of(name) if numel else None
        if shape is None:
            return False
        total = 1
        for extent in shape:
            total *= extent
        if numel != total:
            raise CheckpointError(
                f"init_inference: of {name!r} pieces with {numel:,} of its {total:,} elements are in the files"
            )
        return True


def _part_of(values: torch.Tensor, where: tuple[slice, ...]) -> torch.Tensor:
    return values[where] if where else values
