"""A checkpoint of the original package as a :class:`~deepspeed.checkpoint.source.CheckpointSource`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from deepspeed.checkpoint.directory import Format
from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.source import CheckpointSource, SavedBuffer, SavedParameter, Wanted, read_whole
from deepspeed.checkpoint.upstream.content import CheckpointValues, Values, is_element_state
from deepspeed.checkpoint.upstream.files import find_files, find_layers, load
from deepspeed.checkpoint.upstream.partitioned import (
    hyperparameters,
    read_partitioned,
    scaler_state,
    take_frozen,
    training_state,
)
from deepspeed.checkpoint.upstream.pipeline import joined_states, read_pipeline
from deepspeed.checkpoint.upstream.slices import INFO, join_slices, whole_of
from deepspeed.errors import CheckpointError


class UpstreamSource(CheckpointSource):
    """Reads a checkpoint in upstream's layout."""

    def __init__(self, folder: Path, content: CheckpointValues) -> None:
        self.label = str(folder)
        self._content = content
        self.state = content.state  # everything that is no large tensor
        self.aliases, self.left_out = content.aliases, frozenset()
        self.parameters = {name: self._parameter(name) for name in content.shapes}
        self.buffers = {
            name: SavedBuffer(name, tuple(tensor.shape), tensor.dtype) for name, tensor in content.buffers.items()
        }

    def _parameter(self, name: str) -> SavedParameter:
        kinds = {kind: held[name].dtype for kind, held in self._content.values.items() if name in held}
        if MASTER not in kinds and COMPUTE not in kinds:
            raise CheckpointError(
                f"{self.label}: there are no values of parameter {name!r}; the checkpoint is not complete"
            )
        compute = kinds.get(COMPUTE, torch.float32)
        return SavedParameter(name, self._content.shapes[name], kinds, name in self._content.frozen, compute)

    def check(self, wanted: Sequence[Wanted]) -> None:
        """Makes sure that the flat layout was understood: 16-bit weights are the rounded masters.

        Raises:
            CheckpointError: Saved 16-bit weights are not the rounded masters.
        """
        both = self._content.values.get(COMPUTE, {}).keys() & self._content.values.get(MASTER, {}).keys()
        for entry in wanted:
            if entry.kind == MASTER and entry.name in both:
                numel = entry.stop - entry.start
                master, compute = (
                    torch.empty(numel),
                    torch.empty(numel, dtype=self.parameters[entry.name].compute_dtype),
                )
                self.read(entry, master)
                self.read(entry._replace(kind=COMPUTE), compute)
                same = (master.to(compute.dtype) == compute) | compute.isnan()
                if not bool(same.all()):
                    raise CheckpointError(
                        f"{self.label}: the masters of {entry.name!r} do not round to the saved 16-bit weights; "
                        "the flat layout was not understood or the weights were changed apart from it; "
                        "zero_to_fp32.py of the package that wrote it may help"
                    )

    def covered(self, wanted: Wanted) -> list[tuple[int, int]]:
        """Returns nothing: where there is a master, the 16-bit weights are just its rounding (see :meth:`check`)."""
        return []

    def read(self, wanted: Wanted, out: torch.Tensor) -> None:
        """Copies ``wanted`` into ``out``: 1-D, of that length, any dtype and device."""
        values = self._content.values[wanted.kind][wanted.name]

        def read(start: int, stop: int, place: torch.Tensor) -> None:
            if not values.read(start, stop, place):
                raise CheckpointError(f"{self.label}: {wanted.kind} of {wanted.name!r} is not complete")

        read_whole(wanted, out, read)

    def read_buffer(self, name: str) -> torch.Tensor:
        """Returns the buffer ``name``."""
        return self._content.buffers[name].clone()


def open_upstream(
    folder: Path,
    kind: Format,
    *,
    trust: bool = False,
    trained: Sequence[Sequence[str]] = (),
    layer_names: Mapping[int, str] | None = None,
) -> UpstreamSource:
    """Opens a tag folder of the original package.

    Args:
        trust: Unpickle objects of the caller, which may run code.
        trained: Parameter names by param group, in the optimizer's order, of a pipeline those of all stages. Needed for
            optimizer states of stage 0 alone, whose files do not name them.
        layer_names: With what the names of a pipeline's layer begin in the model, where that is not its number.

    Raises:
        CheckpointError: The checkpoint is incomplete, or its layout is not understood.
    """
    try:
        if kind is Format.UNIVERSAL:
            return UpstreamSource(folder, read_universal(folder, trust=trust))
        if find_layers(folder):
            read = read_pipeline(folder, trust=trust, layer_names=layer_names or {}, trained=trained)
            return UpstreamSource(folder, read)
        return UpstreamSource(folder, read_partitioned(folder, trust=trust, trained=trained))
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise CheckpointError(
            f"{folder}: the layout is not understood ({type(error).__name__}: {error}); the files are damaged or of a "
            "version that this release cannot read"
        ) from error


def read_universal(folder: Path, *, trust: bool) -> CheckpointValues:
    """Reads a converted tag folder."""
    pipeline = joined_states(folder, trust=trust)
    ranks = () if pipeline else find_files(folder)
    models = [[load(path, trust=trust) for path in files.model] for files in ranks]
    models = models or [[states] for states in pipeline] or [[{}]]
    first = models[0][0]
    content = CheckpointValues(training_state(first))
    content.aliases.update(first.get("shared_params") or {})
    module = first["module"] or {}
    buffer_names = set(first.get("buffer_names") or [])
    content.buffers = {name: module[name] for name in buffer_names if name in module}
    path = folder / "zero" / "optimizer_state.pt"
    rest: Mapping[str, Any] = load(path, trust=trust) if path.is_file() else {}
    common = _common_scalars(rest)
    shapes = list(first.get("param_shapes") or [])
    trained = _trained(models, str(folder))
    for name, shape in trained.items():
        _take_parameter(folder, content, name, shape, common, trust)
    others = []
    for model in models:
        held = CheckpointValues(content.state)
        if ranks and ranks[0].shards_params:
            take_frozen(held, model, f"{folder}, frozen parameters")
        else:
            for name, tensor in (model[0]["module"] or {}).items():
                is_trained = name in trained
                if name in buffer_names or name in content.aliases or (is_trained and not tensor.numel()):
                    continue
                if not is_trained:
                    held.frozen.add(name)
                elif len(models) > 1:
                    continue  # a slice of what lies whole beside it
                held.shapes[name] = tuple(tensor.shape)
                held.put(COMPUTE, name, Values.whole(tensor))
        others.append(held)
    whole = join_slices(others, first.get(INFO), str(folder))
    content.frozen |= whole.frozen
    content.shapes |= {name: whole.shapes[name] for name in whole.frozen}
    for name, values in whole.values.get(COMPUTE, {}).items():
        content.put(COMPUTE, name, values)
    inner = rest.get("optimizer_state_dict")
    groups = (inner or rest).get("param_groups") or []
    for number, group in enumerate(groups):
        # At stage 3 a group lists its sub-groups, otherwise group and names go together.
        members = group["params"] if inner is not None else [number]
        names = [name for member in members if member < len(shapes) for name in shapes[member]]
        content.state.param_groups.append(hyperparameters(group, names))
    content.state.loss_scaler = scaler_state(rest)
    return content


def _trained(models: list[list[Mapping[str, Any]]], where: str) -> dict[str, tuple[int, ...]]:
    """Returns the whole shapes of trained parameters; every model-parallel rank names those of its slices."""
    by_rank = [
        {name: tuple(shape) for group in model[0].get("param_shapes") or [] for name, shape in group.items()}
        for model in models
    ]
    info = models[0][0].get(INFO)
    if len(by_rank) == 1:
        return by_rank[0]
    if not info:
        raise CheckpointError(
            f"{where}: it does not describe how the slices of {len(models)} model-parallel ranks fit together; "
            "save it by a program that stores universal_checkpoint_info, as AutoTP and Megatron do"
        )
    return {name: whole_of(name, [shapes[name] for shapes in by_rank], info, where).shape for name in by_rank[0]}


def _common_scalars(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the scalars that stage 3 keeps once instead of per parameter."""
    state = (rest.get("optimizer_state_dict") or {}).get("state") or {}
    first = state.get(0) or {}
    return {key: value for key, value in first.items() if not isinstance(value, torch.Tensor) or value.dim() == 0}


def _take_parameter(
    folder: Path, content: CheckpointValues, name: str, shape: tuple[int, ...], common: dict[str, Any], trust: bool
) -> None:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise CheckpointError(
            f"{folder}: parameter name {name!r} points outside of the folder; the files are malicious or damaged"
        )
    directory = folder / "zero" / name
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is missing; copy it too")
    content.shapes[name] = shape
    scalars = dict(common)
    for path in sorted(directory.glob("*.pt")):
        value = load(path, trust=trust)
        value = value["param"] if isinstance(value, dict) else value
        is_single = not isinstance(value, torch.Tensor) or value.dim() == 0
        if is_single and path.stem != "fp32" and not is_element_state(path.stem, value, shape):
            scalars[path.stem] = value
        elif value.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"{path} has {value.numel()} elements, and parameter {name!r} {torch.Size(shape).numel()}; the layout "
                "is not understood"
            )
        elif path.stem == "fp32":
            content.put(MASTER, name, Values.whole(value))
        else:
            content.put_state(path.stem, name, Values.whole(value))
    if scalars:
        content.state.scalars[name] = scalars
