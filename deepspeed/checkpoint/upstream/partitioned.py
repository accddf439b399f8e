"""The layout with one file per rank: stages 0, 1, 2 and 3.

Experts have a file each for weights, and groups of their own in optimizer states.

Weights are named by an expert's global number. Optimizer states of stages 1 and 2 use local numbers: each rank calls
its first expert 0. Ranks that share experts are neighbors, so ranks with the same experts are *ep* apart.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.upstream.content import (
    CheckpointValues,
    Shapes,
    Values,
    is_element_state,
    stage_1_and_2,
    stage_3,
)
from deepspeed.checkpoint.upstream.files import Files, UnpickledDynamicLossScaler, find_files, load
from deepspeed.checkpoint.upstream.slices import INFO, join_slices
from deepspeed.checkpoint.upstream.stacks import by_place, put_together
from deepspeed.errors import CheckpointError

_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def read_partitioned(folder: Path, *, trust: bool, trained: Sequence[Sequence[str]] = ()) -> CheckpointValues:
    """Reads a tag folder of any stage. ``trained``: parameter names by param group, for stage 0."""
    read = [_read_rank(folder, files, trust, trained) for files in find_files(folder)]
    return join_slices([content for content, _ in read], read[0][1], str(folder))


def _read_rank(
    folder: Path, files: Files, trust: bool, trained: Sequence[Sequence[str]]
) -> tuple[CheckpointValues, Mapping[str, Any] | None]:
    model = [load(path, trust=trust) for path in files.model]
    optim = [load(path, trust=trust)["optimizer_state_dict"] for path in files.optim]
    if files.experts:
        model[0] = {**model[0], "module": {**model[0]["module"], **expert_weights(files.experts, trust=trust)}}
    content = CheckpointValues(training_state(model[0]))
    content.aliases.update(model[0].get("shared_params") or {})
    check_ranks(folder, files, optim)
    if files.shards_params:
        _stage_3(folder, content, model, optim)
    elif optim:
        take_partitions(folder, content, model[0], optim)
    else:
        _stage_0(content, model[0], trained)
    if _has_stacks(model[0]):
        put_together(content, model[0]["module"], str(folder))
    return content, model[0].get(INFO)


def _has_stacks(model: Mapping[str, Any]) -> bool:
    """Returns whether the experts of a Transformers model were taken apart."""
    return bool(model.get("ds_autoep_layers"))


def training_state(model: Mapping[str, Any]) -> TrainingState:
    """Returns counters, schedule and the caller's own state from a model-states file."""
    names = ("global_steps", "global_samples", "skipped_steps")
    counters = {name: int(model.get(name) or 0) for name in names}
    if not model.get("global_samples"):
        batch = (model.get("ds_config") or {}).get("train_batch_size")
        counters["global_samples"] = counters["global_steps"] * batch if isinstance(batch, int) else 0
    return TrainingState(
        counters=counters,
        world_size=int(model.get("dp_world_size") or 1),
        lr_scheduler=model.get("lr_scheduler"),
        model_states={key: value for key, value in model.items() if key != "module"},
    )


def check_ranks(folder: Path, files: Files, optim: list[dict[str, Any]]) -> None:
    """Raises CheckpointError if files of some ranks are missing."""
    if not optim:
        return
    counts = optim[0].get("partition_count") or len(optim)
    expected = max(counts) if isinstance(counts, (list, tuple)) else int(counts)
    if len(optim) != expected:
        raise CheckpointError(
            f"{folder}: {len(optim)} optimizer-states files of {expected} ranks are there; copy the others too"
        )
    if files.shards_params and len(files.model) != expected:
        raise CheckpointError(
            f"{folder}: {len(files.model)} model-states files of {expected} ranks are there; copy the others too"
        )


def scaler_state(optim: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the position of a dynamic loss scaler, or None for a fixed scale."""
    scaler = optim.get("loss_scaler")
    if not isinstance(scaler, UnpickledDynamicLossScaler):
        return None
    return {key: getattr(scaler, key) for key in _SCALER_KEYS}


def hyperparameters(group: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Returns a param group with parameter names; ``step`` in a group is a leftover of fused optimizers."""
    return {**{key: value for key, value in group.items() if key not in ("params", "step")}, "params": names}


def take_module(content: CheckpointValues, module: Mapping[str, torch.Tensor], buffer_names: list[str]) -> None:
    """Adds parameters in compute precision, and buffers, in their full shapes to ``content``."""
    for name, tensor in module.items():
        if name in buffer_names:
            content.buffers[name] = tensor
        elif name not in content.aliases and isinstance(tensor, torch.Tensor):
            content.shapes.setdefault(name, tuple(tensor.shape))
            content.put(COMPUTE, name, Values.whole(tensor))


def _split_state(state: Mapping[str, Any], numel: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Splits one flat state into per-element tensors and scalars.

    A per-element tensor has at least ``numel`` elements.
    """
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() >= numel:
            tensors[key] = value
        else:
            scalars[key] = value
    return tensors, scalars


# -- stages 1 and 2 --------------------------------------------------------------------------------------------------


def take_partitions(
    folder: Path, content: CheckpointValues, model: Mapping[str, Any], optim: list[dict[str, Any]]
) -> None:
    """Masters and optimizer states of stages 1 and 2, and the weights of the model-states file.

    Raises:
        CheckpointError: Param groups with weights have no parameter names.
    """
    take_module(content, model["module"], list(model.get("buffer_names") or []))
    groups: list[Shapes] = model.get("param_shapes") or []
    partitions = [rank["single_partition_of_fp32_groups"] for rank in optim]
    if not groups or any(len(rank) != len(groups) for rank in partitions):
        raise CheckpointError(
            f"{folder}: {len(groups)} param groups have names, {len(partitions[0])} have weights; expected the "
            "same number. Copy the files again from where they were written"
        )
    gaps = optim[0].get("param_alignment_paddings")
    trained: set[str] = set()
    for number, shapes in enumerate(groups):
        gap = gaps[number] if gaps else None
        group = _group_state(optim, number)[2]
        names: list[str] = []
        shared = sharing_ranks(group, len(optim))
        for place in range(shared):
            named = shapes if shared == 1 else numbered_among_all(shapes, place)
            named = by_place(named, place) if _has_stacks(model) else named
            where, ranks = f"{folder}, param group {number}", optim[place::shared]
            tensors = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
            fragments = stage_1_and_2(named, [t.numel() for t in tensors], gap, where)
            for name, shape in named.items():
                content.shapes[name] = tuple(shape)
                content.put(MASTER, name, Values(tensors, fragments[name]))
            states, scalars, _ = _group_state(ranks, number)
            for state in states[0]:
                slices = [rank[state] for rank in states]
                held = stage_1_and_2(named, [p.numel() for p in slices], gap, where)
                for name in named:
                    content.put_state(state, name, Values(slices, held[name]))
            if states[0] or scalars:
                content.state.scalars.update({name: dict(scalars) for name in named})
            names += named
        trained |= set(names)
        content.state.param_groups.append(hyperparameters(group, names))
    content.frozen = set(content.shapes) - trained
    content.state.loss_scaler = scaler_state(optim[0])


def _group_state(
    optim: list[dict[str, Any]], number: int
) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any], dict[str, Any]]:
    """Returns, per rank, a group's per-element tensors, scalars and hyperparameters, from either form of the files."""
    states: list[dict[str, torch.Tensor]] = []
    scalars: dict[str, Any] = {}
    group: dict[str, Any] = {}
    for rank in optim:
        base = rank["base_optimizer_state"]
        shortest = rank["single_partition_of_fp32_groups"][number].numel()
        if isinstance(base, list):  # the elastic form
            tensors, scalars = _split_state(base[number], shortest)
            step = rank.get("base_optimizer_state_step")
            if "step" not in scalars and step is not None:
                scalars["step"] = step
        else:
            tensors, scalars = _split_state(base["state"].get(number, {}), shortest)
            group = base["param_groups"][number]
        states.append(tensors)
    return states, scalars, group


# -- stage 3 ---------------------------------------------------------------------------------------------------------


def _stage_3(folder: Path, content: CheckpointValues, model: list[dict[str, Any]], optim: list[dict[str, Any]]) -> None:
    first = model[0]
    buffer_names = list(first.get("buffer_names") or [])
    content.buffers = {name: first["module"][name] for name in buffer_names if name in first["module"]}
    if not optim:
        raise CheckpointError(
            f"{folder}: the optimizer-states files, which hold the weights at stage 3, are missing; copy them too"
        )
    sub_groups: list[Shapes] = first["param_shapes"]
    flat = [rank["fp32_flat_groups"] for rank in optim]
    if any(len(rank) != len(sub_groups) for rank in flat):
        raise CheckpointError(
            f"{folder}: {len(sub_groups)} sub-groups have names, {len(flat[0])} have weights; "
            "the file is damaged. Copy it again, or load another tag"
        )
    inner = [rank["optimizer_state_dict"] for rank in optim]
    names_of: dict[int, list[str]] = {}
    for number, shapes in enumerate(sub_groups):
        where = f"{folder}, sub-group {number}"
        for place, ranks in enumerate(_sharing(optim, number)):
            named = by_place(shapes, place) if _has_stacks(first) else shapes
            tensors = [flat[rank][number] for rank in ranks]
            states = [inner[rank]["state"].get(number, {}) for rank in ranks]
            _take_sub_group(content, named, tensors, states, where)
            names_of.setdefault(number, []).extend(named)
    for group in inner[0]["param_groups"]:
        names = [name for number in group["params"] for name in names_of[number]]
        content.state.param_groups.append(hyperparameters(group, names))
    take_frozen(content, model, f"{folder}, frozen parameters")
    content.state.loss_scaler = scaler_state(optim[0])


def _sharing(optim: list[dict[str, Any]], number: int) -> list[tuple[int, ...]]:
    with_groups = [rank["ds_zero_partition_groups"][number] for rank in optim if "ds_zero_partition_groups" in rank]
    if len(with_groups) < len(optim):
        return [tuple(range(len(optim)))]
    return sorted({tuple(rank["partition_ranks"]) for rank in with_groups})


def _take_sub_group(
    content: CheckpointValues, shapes: Shapes, tensors: list[torch.Tensor], states: list[dict[str, Any]], where: str
) -> None:
    """Masters and states of a sub-group that the ranks with these tensors share."""
    fragments = stage_3(shapes, [t.numel() for t in tensors], where)
    split = [_split_state(state, t.numel()) for state, t in zip(states, tensors, strict=True)]
    for name, shape in shapes.items():
        content.shapes[name] = tuple(shape)
        content.put(MASTER, name, Values(tensors, fragments[name]))
        for state in split[0][0]:
            content.put_state(state, name, Values([rank[0][state] for rank in split], fragments[name]))
        if split[0][0] or split[0][1]:
            content.state.scalars[name] = dict(split[0][1])


def take_frozen(content: CheckpointValues, model: list[dict[str, Any]], where: str) -> None:
    """Reads frozen parameters of stage 3, of which every rank has an equal slice."""
    shapes = model[0].get("frozen_param_shapes") or {}
    for name, shape in shapes.items():
        slices = [rank["frozen_param_fragments"][name].reshape(-1) for rank in model]
        fragments = stage_3({name: shape}, [part.numel() for part in slices], where)
        content.shapes[name] = tuple(shape)
        content.put(COMPUTE, name, Values(slices, fragments[name]))
    content.frozen |= set(shapes)


# -- stage 0 ---------------------------------------------------------------------------------------------------------


def _stage_0(content: CheckpointValues, model: Mapping[str, Any], trained: Sequence[Sequence[str]]) -> None:
    """Weights in training precision; the optimizer's state if ``trained`` maps its entries to parameters."""
    module = model["module"]
    # parameters that share their storage in the file are tied
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in module.items():
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
            if seen.setdefault(key, name) != name:
                content.aliases[name] = seen[key]
    take_module(content, module, list(model.get("buffer_names") or []))
    if state := model.get("optimizer"):
        take_unsharded(content, state, trained)


def take_unsharded(content: CheckpointValues, state: Mapping[str, Any], trained: Sequence[Sequence[str]]) -> None:
    """Reads the states (and masters beside 16-bit weights) of a whole optimizer; nothing where the names do not fit.

    Raises:
        CheckpointError: A param group lists its parameters in another order than the model.
    """
    inner = state.get("optimizer_state_dict", state)
    groups = inner["param_groups"]
    if [len(group["params"]) for group in groups] != [len(names) for names in trained]:
        return
    masters = state.get("fp32_groups")
    for number, (group, names) in enumerate(zip(groups, trained, strict=True)):
        for position, (index, name) in enumerate(zip(group["params"], names, strict=True)):
            if masters is not None and tuple(masters[number][position].shape) != content.shapes.get(name):
                raise CheckpointError(
                    f"param group {number} of the checkpoint does not list its parameters in the order of the model "
                    f"(at {name!r}); load with load_optimizer_states=False"
                )
            if masters is not None:
                content.put(MASTER, name, Values.whole(masters[number][position]))
            scalars: dict[str, Any] = {}
            for key, value in inner["state"].get(index, {}).items():
                if is_element_state(key, value, content.shapes.get(name)):
                    content.put_state(key, name, Values.whole(value))
                else:
                    # Beside unfused 16-bit masters, ``step`` is one higher than the updates made.
                    scalars[key] = value - 1 if key == "step" and masters is not None else value
            if scalars:
                content.state.scalars[name] = scalars
        content.state.param_groups.append(hyperparameters(group, list(names)))


_NUMBER = re.compile(r"(?<=deepspeed_experts\.)\d+(?=\.)")


def expert_weights(paths: Sequence[Path], *, trust: bool) -> dict[str, torch.Tensor]:
    """Returns the weights of all experts, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found.update(load(path, trust=trust))
    return found


def sharing_ranks(group: Mapping[str, Any], ranks: int) -> int:
    """Returns how many ranks share a group's experts (1: none). Raises CheckpointError: its name does not tell."""
    if not group.get("moe"):
        return 1
    name = str(group.get("name"))
    found = re.search(r"ep_size_(\d+)", name)
    if found is None or ranks % int(found[1]):
        raise CheckpointError(
            f"the optimizer group {name!r} holds experts, and its name does not contain how many of the {ranks} ranks "
            "share them (ep_size_<n>). Export the model in the program that saved it"
        )
    return int(found[1])


def numbered_among_all(shapes: Shapes, place: int) -> dict[str, tuple[int, ...]]:
    """Returns the shapes under the names that the experts of rank ``place`` among its group have among all."""
    numbers = [int(found[0]) for name in shapes if (found := _NUMBER.search(name))]
    local = max(numbers, default=-1) + 1
    return {
        _NUMBER.sub(lambda found: str(place * local + int(found[0])), name): tuple(shape)
        for name, shape in shapes.items()
    }
