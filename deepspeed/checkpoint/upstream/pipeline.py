"""The layout of a pipeline: a file per layer with its weights, and for each stage the files of a world of its own.

Weights are named inside their layer; in the model, layer 3's are ``3.<name>`` and those of tied layers
``tied_modules.<key>.<name>``. Each stage with a tied layer has its masters and moments, which are equal.

Tensor-parallel ranks have files of their own for each layer and stage. The checkpoint describes how their slices fit
together (:mod:`deepspeed.checkpoint.upstream.slices`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.param_groups import join_groups
from deepspeed.checkpoint.upstream.content import CheckpointValues
from deepspeed.checkpoint.upstream.files import find_layers, find_stages, load
from deepspeed.checkpoint.upstream.partitioned import (
    check_ranks,
    take_module,
    take_partitions,
    take_unsharded,
    training_state,
)
from deepspeed.checkpoint.upstream.slices import INFO, join_slices
from deepspeed.errors import CheckpointError

_TIED = "tied_modules."


def read_pipeline(
    folder: Path, *, trust: bool, layer_names: Mapping[int, str], trained: Sequence[Sequence[str]] = ()
) -> CheckpointValues:
    """Reads a tag folder of ZeRO stage 0 or 1.

    Args:
        layer_names: With what the names of a layer begin in the model, where that is not its number; layers that are
            missing here are found by their shapes.
        trained: Parameter names of all stages by param group, in the order of the model: the optimizer's states of
            stage 0 have no names, and are left out where these do not fit.

    Raises:
        CheckpointError: Model-states files of tensor-parallel ranks are missing.
    """
    layers, stages = find_layers(folder), find_stages(folder)
    if len(stages) % len(layers):
        raise CheckpointError(
            f"{folder}: there are model-states files of {len(stages)} ranks, which {len(layers)} tensor-parallel ranks "
            "of each stage cannot have written; copy the others too"
        )
    read: list[CheckpointValues] = []
    described: list[Mapping[str, Any] | None] = []  # how each tensor-parallel rank describes its slices
    for rank, held in enumerate(layers):
        content: CheckpointValues | None = None
        buffers: set[str] = set()
        info: Mapping[str, Any] | None = None
        unsharded: list[Mapping[str, Any]] = []
        for files in stages[rank :: len(layers)]:
            model = load(files.model[0], trust=trust)
            info = info or model.get(INFO)
            optim = [load(path, trust=trust)["optimizer_state_dict"] for path in files.optim]
            stage = CheckpointValues(training_state(model))
            buffers.update(model.get("buffer_names") or ())
            if optim:
                check_ranks(folder, files, optim)
                take_partitions(folder, stage, {**model, "module": {}}, optim)
            elif model.get("optimizer"):
                unsharded.append(model["optimizer"])
            if content is None:
                content = stage
            else:
                _join(content, stage)
        assert content is not None
        content.state.model_states.pop("optimizer", None)
        updated, beginnings = set(content.shapes), dict(layer_names)
        for number, path in held.items():
            values = load(path, trust=trust)
            begins = beginnings.setdefault(number, _beginning(content, number, values))
            take_module(content, {begins + name: value for name, value in values.items()}, list(buffers))
        in_order = [begins for _, begins in sorted(beginnings.items())]  # tied layers have one file
        for state, names in zip(unsharded, _names_by_stage(unsharded, in_order, trained), strict=False):
            part = CheckpointValues(training_state({}), dict(content.shapes))
            take_unsharded(part, state, names)
            _join(content, part)
            updated.update(*names)
        content.frozen = set(content.shapes) - updated if updated else set()
        read.append(content)
        described.append(info)
    return join_slices(read, described[0], str(folder))


def _names_by_stage(
    optimizers: Sequence[Mapping[str, Any]], beginnings: Sequence[str], trained: Sequence[Sequence[str]]
) -> list[list[list[str]]]:
    """Returns the parameter names of each stage's optimizer, by param group; empty where they do not fit.

    The layers of a stage follow each other. Its tied modules come first, then the other layers.
    """
    found: list[list[list[str]]] = []
    waiting = deque(beginnings)
    for state in optimizers:
        groups = state.get("optimizer_state_dict", state)["param_groups"]
        counts = [len(group["params"]) for group in groups]
        held: list[str] = []
        named = _of_layers(held, trained)
        while waiting and sum(map(len, named)) < sum(counts):
            held.append(waiting.popleft())
            named = _of_layers(held, trained)
        fits = [len(names) for names in named[: len(counts)]] == counts and not any(named[len(counts) :])
        if not fits:
            return []
        found.append(named[: len(counts)])
    return found


def _of_layers(beginnings: Sequence[str], trained: Sequence[Sequence[str]]) -> list[list[str]]:
    in_order = sorted(dict.fromkeys(beginnings), key=lambda begins: not begins.startswith(_TIED))
    return [[name for begins in in_order for name in names if name.startswith(begins)] for names in trained]


def joined_states(folder: Path, *, trust: bool) -> list[dict[str, Any]]:
    """Returns all stages' model states as one model's, by tensor-parallel rank; empty if it is no pipeline.

    Raises:
        CheckpointError: Files of some ranks are missing.
    """
    first = folder / "mp_rank_00_model_states.pt"
    if not first.is_file() or load(first, trust=trust).get("module", {}) is not None:
        return []
    saved = [load(files.model[0], trust=trust) for files in find_stages(folder)]
    tensor_ranks = int((saved[0].get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1))
    if len(saved) % tensor_ranks:
        raise CheckpointError(
            f"{folder}: there are model-states files of {len(saved)} ranks, which {tensor_ranks} tensor-parallel ranks "
            "of each stage cannot have written; copy the others too"
        )
    return [_joined(saved[rank::tensor_ranks]) for rank in range(tensor_ranks)]


def _joined(stages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    groups: list[dict[str, Any]] = [{} for _ in range(max(len(stage.get("param_shapes") or []) for stage in stages))]
    for stage in stages:  # one with fewer groups has none of the last ones
        for known, shapes in zip(groups, stage.get("param_shapes") or [], strict=False):
            known.update(shapes)
    buffers = list(dict.fromkeys(name for stage in stages for name in stage.get("buffer_names") or ()))
    return {**stages[0], "module": {}, "param_shapes": groups, "buffer_names": buffers}


def _join(content: CheckpointValues, stage: CheckpointValues) -> None:
    content.shapes.update(stage.shapes)
    for kind, values in stage.values.items():
        content.values.setdefault(kind, {}).update(values)
    state, further = content.state, stage.state
    state.scalars.update(further.scalars)
    state.loss_scaler = state.loss_scaler or further.loss_scaler
    join_groups(state.param_groups, further.param_groups)


def _beginning(content: CheckpointValues, number: int, values: Mapping[str, Any]) -> str:
    """Returns the prefix of a layer's names: its number, unless only a tied layer has these names and shapes."""
    own = f"{number}."
    if not values or any(own + name in content.shapes for name in values):
        return own
    keys = dict.fromkeys(name.split(".")[1] for name in content.shapes if name.startswith(_TIED))
    fitting = [f"{_TIED}{key}." for key in keys if _fits(content, f"{_TIED}{key}.", values)]
    return fitting[0] if len(fitting) == 1 else own


def _fits(content: CheckpointValues, begins: str, values: Mapping[str, Any]) -> bool:
    """Returns whether a layer has every trained parameter whose name begins so, in its shape."""
    wanted = {name: shape for name, shape in content.shapes.items() if name.startswith(begins)}
    there = {begins + name: tuple(value.shape) for name, value in values.items() if isinstance(value, torch.Tensor)}
    return all(there.get(name) == tuple(shape) for name, shape in wanted.items())
