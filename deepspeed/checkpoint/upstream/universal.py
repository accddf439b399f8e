"""The universal layout: a folder per parameter, with full tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.upstream.content import Content, Values
from deepspeed.checkpoint.upstream.files import find_files, load
from deepspeed.checkpoint.upstream.partitioned import hyperparameters, scaler_state, take_frozen, training_state
from deepspeed.checkpoint.upstream.pipeline import joined_states
from deepspeed.errors import CheckpointError


def read_universal(folder: Path, *, trust: bool) -> Content:
    """Reads a converted tag folder.

    Args:
        folder: The tag folder; its parameters lie below ``zero/``.
        trust: Unpickle objects of the caller, which may run code.
    """
    pipeline = joined_states(folder, trust=trust)
    files = find_files(folder) if pipeline is None else None
    model = [load(path, trust=trust) for path in files.model] if files is not None else [pipeline or {}]
    content = Content(training_state(model[0]))
    content.aliases.update(model[0].get("shared_params") or {})
    module = model[0]["module"] or {}
    buffer_names = set(model[0].get("buffer_names") or [])
    content.buffers = {name: module[name] for name in buffer_names if name in module}
    path = folder / "zero" / "optimizer_state.pt"
    rest: Mapping[str, Any] = load(path, trust=trust) if path.is_file() else {}
    common = _common_scalars(rest)
    shapes = list(model[0].get("param_shapes") or [])
    trained = {name: tuple(shape) for group in shapes for name, shape in group.items()}
    for name, shape in trained.items():
        _take_parameter(folder, content, name, shape, common, trust)
    if files is not None and files.shards_params:
        take_frozen(content, model, f"{folder}, frozen parameters")
    else:
        for name, tensor in module.items():
            if name not in trained and name not in buffer_names and name not in content.aliases:
                content.shapes[name] = tuple(tensor.shape)
                content.put(COMPUTE, name, Values.whole(tensor))
                content.frozen.add(name)
            elif name in trained and tensor.numel():
                content.put(COMPUTE, name, Values.whole(tensor))
    _take_groups(content, rest, shapes)
    content.state.loss_scaler = scaler_state(rest)
    return content


def _common_scalars(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars that stage 3 keeps once instead of per parameter."""
    state = (rest.get("optimizer_state_dict") or {}).get("state") or {}
    first = state.get(0) or {}
    return {key: value for key, value in first.items() if not isinstance(value, torch.Tensor) or value.dim() == 0}


def _take_parameter(
    folder: Path, content: Content, name: str, shape: tuple[int, ...], common: dict[str, Any], trust: bool
) -> None:
    parts = PurePosixPath(name).parts
    if not parts or ".." in parts or name.startswith("/") or "\0" in name:
        raise CheckpointError(
            f"{folder}: parameter name {name!r} leads out of the folder; the files were made to harm, or are damaged"
        )
    home = folder / "zero" / name
    if not home.is_dir():
        raise CheckpointError(f"{home} is missing; the checkpoint is not complete")
    content.shapes[name] = shape
    scalars = dict(common)
    for path in sorted(home.glob("*.pt")):
        value = load(path, trust=trust)
        value = value["param"] if isinstance(value, dict) else value
        if not isinstance(value, torch.Tensor) or (value.dim() == 0 and path.stem != "fp32"):
            scalars[path.stem] = value
        elif value.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"{path} has {value.numel()} elements, and parameter {name!r} {torch.Size(shape).numel()}; slices of "
                "several model-parallel ranks cannot be read"
            )
        elif path.stem == "fp32":
            content.put(MASTER, name, Values.whole(value))
        else:
            content.put_state(path.stem, name, Values.whole(value))
    if scalars:
        content.state.scalars[name] = scalars


def _take_groups(content: Content, rest: Mapping[str, Any], shapes: list[Mapping[str, Any]]) -> None:
    inner = rest.get("optimizer_state_dict")
    groups = (inner or rest).get("param_groups") or []
    for number, group in enumerate(groups):
        # At stage 3 a group lists its sub-groups, otherwise group and names go together.
        members = group["params"] if inner is not None else [number]
        names = [name for member in members if member < len(shapes) for name in shapes[member]]
        content.state.param_groups.append(hyperparameters(group, names))
