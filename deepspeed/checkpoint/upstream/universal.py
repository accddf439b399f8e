"""Writes a checkpoint in upstream's universal layout: torch files in one folder per parameter.

The layout has two forms, and upstream loads each at its own stages only, at any number of data-parallel ranks: that of
stages 1 and 2 (a dict with the tensor in its full shape) and that of stage 3 (the flat tensor alone). One model-states
file, which says that there is one model-parallel rank, serves any number of tensor-parallel ranks and pipeline stages.
"""

from __future__ import annotations

import pickle
import types
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed.checkpoint import disk, names, restricted
from deepspeed.checkpoint.consolidate import FullTensor
from deepspeed.checkpoint.format import COMPUTE, optimizer_kind, state_of_kind
from deepspeed.checkpoint.source import CheckpointSource, SavedParameter, TrainingState, Wanted
from deepspeed.checkpoint.states import RESERVED_KEYS, reserved_entries
from deepspeed.checkpoint.upstream.files import STAND_INS, UnpickledDynamicLossScaler, UnpickledLossScaler
from deepspeed.errors import CheckpointError
from deepspeed.release import VERSION

FOLDER = "zero"
"""The folder of the parameters in a tag folder."""


@dataclass(frozen=True)
class _Group:
    """One param group.

    Attributes:
        hyperparameters: Without ``params``.
        names: Its parameters, in the optimizer's order.
        states: Dtype by per-element state that any of them has.
        scalars: States that are no per-element tensors, one value for the group as upstream has it.
    """

    hyperparameters: dict[str, Any]
    names: tuple[str, ...]
    states: dict[str, torch.dtype]
    scalars: dict[str, Any]


def write_universal(source: CheckpointSource, state: TrainingState, folder: Path, stage: int) -> list[str]:
    """Writes the files for ``stage`` (1, 2 or 3); returns sentences on what upstream's layout cannot hold.

    Raises:
        CheckpointError: The source is damaged, or has no optimizer states.
        OSError: A file cannot be written.
    """
    groups = [_group(source, state, group) for group in state.param_groups if group["params"]]
    if not any(group.states for group in groups):
        raise CheckpointError(
            f"{source.label}: expected optimizer states, which the universal layout stores for each parameter, found "
            "none (saved before the first update) or none with names (upstream's stage 0). Export the weights alone by "
            "zero_to_fp32.py"
        )
    source.check([Wanted(k, n, 0, p.numel) for n, p in source.parameters.items() for k in p.kinds])
    for group in groups:
        for name in group.names:
            _write_parameter(source, group, name, folder, stage)
    if stage < 3:
        tied = {alias: name for alias, name in source.aliases.items() if name in source.parameters}
        others = [*_untrained(source, groups), *source.buffers, *tied]
        for name in others:
            value = FullTensor(source, tied.get(name, name), None).contiguous()
            _save(_folder_of(folder, name) / "fp32.pt", {"param": value.float()})
    _save(folder / FOLDER / "optimizer_state.pt", _optimizer_state(state, groups, stage))
    _save(folder / names.model_states_file(stage), _model_states(source, state, groups, stage))
    return _notes(source, state, groups)


def _group(source: CheckpointSource, state: TrainingState, saved: Mapping[str, Any]) -> _Group:
    states: dict[str, torch.dtype] = {}
    scalars: dict[str, Any] = {}
    for name in saved["params"]:
        for kind, dtype in source.parameters[name].kinds.items():
            if (key := state_of_kind(kind)) is not None:
                states[key] = dtype
        found = state.scalars.get(name, {})
        if not scalars or float(found.get("step", 0)) > float(scalars.get("step", 0)):
            scalars = dict(found)
    return _Group({k: v for k, v in saved.items() if k != "params"}, tuple(saved["params"]), states, scalars)


def _untrained(source: CheckpointSource, groups: list[_Group]) -> list[str]:
    trained = {name for group in groups for name in group.names}
    return [name for name in source.parameters if name not in trained]


def _write_parameter(source: CheckpointSource, group: _Group, name: str, folder: Path, stage: int) -> None:
    parameter, place = source.parameters[name], _folder_of(folder, name)
    values = {"fp32": FullTensor(source, name, torch.float32).contiguous()}
    for state, dtype in group.states.items():
        if (kind := optimizer_kind(state)) in parameter.kinds:
            values[state] = FullTensor(source, name, torch.float32, kind).contiguous()
        else:
            values[state] = torch.zeros(parameter.shape, dtype=torch.float32 if dtype.is_floating_point else dtype)
    about = _about(source, parameter)
    for state, tensor in values.items():
        _save(place / f"{state}.pt", {**about, "param": tensor} if stage < 3 else tensor.reshape(-1))
    if stage < 3:
        for key, value in group.scalars.items():
            _save(place / f"{key}.pt", value)


def _about(source: CheckpointSource, parameter: SavedParameter) -> dict[str, Any]:
    """Returns how tensor-parallel ranks divide a parameter, as far as the checkpoint shows it."""
    tiles = parameter.tiles
    axes = {
        axis
        for tile in tiles
        for region in tile.regions
        for axis, (part, whole) in enumerate(zip(region.shape, parameter.shape, strict=True))
        if part != whole
    }
    if len(axes) == 1:
        return {"cat_dim": axes.pop()}
    is_divided = any(len(other.tiles) > 1 for other in source.parameters.values())
    return {} if is_divided else {"cat_dim": 0}


def _folder_of(folder: Path, name: str) -> Path:
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise CheckpointError(
            f"parameter {name!r}: the universal layout names a folder after it; expected a name that is a folder name. "
            "Rename the parameter, or choose --output_format native"
        )
    place = folder / FOLDER / name
    place.mkdir(parents=True, exist_ok=True)
    return place


# -- small files -------------------------------------------------------------------------------------------------------


def _optimizer_state(state: TrainingState, groups: list[_Group], stage: int) -> dict[str, Any]:
    scaler = _loss_scaler(state)
    listed = [{**group.hyperparameters, "params": [number]} for number, group in enumerate(groups)]
    common = {
        "zero_stage": stage,
        "loss_scaler": scaler,
        "dynamic_loss_scale": scaler.dynamic,
        "overflow": False,
        "ds_version": VERSION,
        "param_groups": listed,
    }
    if stage == 3:
        inner = {"state": {number: group.scalars for number, group in enumerate(groups)}, "param_groups": listed}
        empty = [torch.empty(0) for _ in groups]  # the masters are beside the parameters
        return {**common, "partition_count": 1, "optimizer_state_dict": inner, "fp32_flat_groups": empty}
    return {
        **common,
        "clip_grad": _config(state).get("gradient_clipping", 0.0),
        "group_paddings": [0] * len(groups),
        "param_alignment_paddings": [[0] * len(group.names) for group in groups],
        "partition_count": [1] * len(groups),
    }


def _config(state: TrainingState) -> Mapping[str, Any]:
    config = state.model_states.get("ds_config")
    return config if isinstance(config, Mapping) else {}


def _loss_scaler(state: TrainingState) -> Any:
    """Returns the loss scaler as upstream pickles it; what only the configuration determines is taken from there."""
    fp16 = _config(state).get("fp16")
    options = fp16 if isinstance(fp16, Mapping) else {}
    if state.loss_scaler is None or "cur_iter" not in state.loss_scaler:
        scaler = UnpickledLossScaler.__new__(UnpickledLossScaler)
        scale = (state.loss_scaler or {}).get("cur_scale") or options.get("loss_scale") or 1.0
        scaler.__dict__.update(cur_scale=float(scale), dynamic=False)
        return scaler
    dynamic = UnpickledDynamicLossScaler.__new__(UnpickledDynamicLossScaler)
    dynamic.__dict__.update(
        state.loss_scaler,
        dynamic=True,
        dtype=torch.float16,
        scale_factor=2.0,
        scale_window=options.get("loss_scale_window", 1000),
        min_scale=options.get("min_loss_scale", 1),
        delayed_shift=options.get("hysteresis", 2),
        consecutive_hysteresis=options.get("consecutive_hysteresis", False),
        raise_error_at_min_scale=True,
    )
    return dynamic


def _model_states(source: CheckpointSource, state: TrainingState, groups: list[_Group], stage: int) -> dict[str, Any]:
    frozen = _untrained(source, groups)
    shapes = {name: torch.Size(parameter.shape) for name, parameter in source.parameters.items()}
    values: dict[str, torch.Tensor] = {name: source.read_buffer(name) for name in source.buffers}
    fragments: OrderedDict[str, torch.Tensor] = OrderedDict()
    for name, parameter in source.parameters.items():
        absent = torch.empty(0, dtype=parameter.compute_dtype)
        values[name] = _compute_values(source, name) if stage < 3 or name in frozen else absent
        if name in frozen and stage > 1:
            fragments[name] = values[name] if stage < 3 else values[name].reshape(-1)
        if stage == 3:
            values[name] = absent
    values.update({alias: values[name] for alias, name in source.aliases.items()})
    top = dict(state.model_states)
    clients = reserved_entries(top)
    return {
        **{key: value for key, value in top.items() if key not in RESERVED_KEYS},
        **clients,
        "module": OrderedDict(values),
        "buffer_names": list(source.buffers),
        "optimizer": None,
        "param_shapes": [OrderedDict((name, shapes[name]) for name in group.names) for group in groups],
        "frozen_param_shapes": OrderedDict((n, shapes[n]) for n in frozen) if fragments else None,
        "frozen_param_fragments": fragments or None,
        "shared_params": {alias: name for alias, name in source.aliases.items() if name in source.parameters},
        "lr_scheduler": state.lr_scheduler,
        **{key: state.counters.get(key, 0) for key in ("skipped_steps", "global_steps", "global_samples")},
        "dp_world_size": state.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_version": VERSION,
    }


def _compute_values(source: CheckpointSource, name: str) -> torch.Tensor:
    """Returns a parameter in its compute dtype: the rounded master, with the values that were saved apart from it."""
    parameter = source.parameters[name]
    made = FullTensor(source, name, parameter.compute_dtype).contiguous().reshape(-1)
    for start, stop in source.covered(Wanted(COMPUTE, name, 0, parameter.numel)):
        source.read(Wanted(COMPUTE, name, start, stop), made[start:stop])
    return made.view(parameter.shape)


def _notes(source: CheckpointSource, state: TrainingState, groups: list[_Group]) -> list[str]:
    behind = [
        name
        for group in groups
        for name in group.names
        if source.parameters[name].numel
        and float(state.scalars.get(name, {}).get("step", 0)) != float(group.scalars.get("step", 0))
    ]
    notes = []
    if behind:
        shown = ", ".join(behind[:5]) + (" ..." if len(behind) > 5 else "")
        notes.append(
            f"{len(behind)} parameters made fewer optimizer steps than others of their group (moments that were never "
            f"made are zero); the layout has one number of steps per group, which is the greatest: {shown}"
        )
    if state.extra_state:
        notes.append(f"the layout has no extra state of modules, so it is left out: {', '.join(state.extra_state)}")
    return notes


# -- torch files with upstream's class names ---------------------------------------------------------------------------


class _Pickler(pickle._Pickler):
    """Writes the stand-ins of upstream's classes under the names of those classes.

    The pickler in C cannot: it compares each name with what this package has there.
    """

    def reducer_override(self, value: Any) -> Any:
        """Reduces containers as the restricted loader needs them."""
        return restricted.reduce_container(value)

    def save_global(self, obj: Any, name: str | None = None) -> None:
        """Writes a reference to a class or function."""
        full_name = next((full for stand_in, full in STAND_INS if stand_in is obj), None)
        if full_name is None:
            super().save_global(obj, name)  # type: ignore[misc]
            return
        module, _, qualified = full_name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())  # type: ignore[attr-defined]
        self.memoize(obj)  # type: ignore[attr-defined]


_PICKLE = types.ModuleType("upstream_pickle")
_PICKLE.__dict__.update(Pickler=_Pickler, dumps=pickle.dumps, dump=pickle.dump)


def _save(path: Path, value: Any) -> None:
    try:
        torch.save(value, path, pickle_module=_PICKLE)
    except RuntimeError as error:  # so torch reports a full disk
        reason = str(error).partition("\n")[0]
        raise OSError(f"{path}: torch cannot write it ({reason}); make room, or write to another disk") from error
    disk.sync_folder(path)  # a file is synced the same way
