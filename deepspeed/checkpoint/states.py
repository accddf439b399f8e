"""The small files of a checkpoint: counters, schedule, scaler, the caller's state, and keys that other tools read."""

from __future__ import annotations

import logging
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import names, restricted
from deepspeed.checkpoint.param_groups import MergedGroups
from deepspeed.checkpoint.roster import Roster
from deepspeed.checkpoint.run_state import RunState
from deepspeed.config.sections.monitor import hide_secrets
from deepspeed.errors import CheckpointError
from deepspeed.logging import log_dist_once, logger

FEATURE_KEYS = ("random_ltd", "quantization_pace")
"""Keys of the model-states file for the states of features; None for a feature that the run does not have."""
ENGINE_KEYS = frozenset(
    {
        "module",
        "sparse_tensor_module_names",
        "csr_tensor_module_names",
        "skipped_steps",
        "global_steps",
        "dp_world_size",
        "mp_world_size",
        "data_sampler",
        "data_position",
        *FEATURE_KEYS,
    }
)
"""Keys of the model-states file that are the engine's own and never returned as client state."""
CLIENT_ENTRIES = "client_entries"
"""Key of the model-states file: the caller's entries whose keys are among those that only this package reserves."""
RESERVED_KEYS = frozenset({"data_position", "quantization_pace", CLIENT_ENTRIES})
"""Keys of the model-states file that only this package has."""

_CLIENT, _TRAINING = "client_state", "training"
_PICKLED_DATA = "data_pickled"


def shared_files(
    run_state: RunState,
    listed: Roster,
    client_state: dict[str, Any],
    scalars: Iterable[tuple[tuple[str, ...], dict[str, Any]]],
    merged: MergedGroups,
    position: dict[str, Any] | None,
) -> dict[str, bytes]:
    """Returns the content, by file name, of the small files that rank 0 writes for all."""
    entries = {key: value for key, value in client_state.items() if key in RESERVED_KEYS}
    others = {key: value for key, value in client_state.items() if key not in RESERVED_KEYS}
    top = {**_model_states(run_state, listed, merged), "data_position": position, **others}
    if entries:
        top[CLIENT_ENTRIES] = entries
    kept, refused = restricted.split(top)
    training, odd = restricted.split(_training(run_state, listed, scalars, merged))
    files = {
        names.model_states_file(run_state.stage): restricted.dumps(kept),
        names.TRAINING_STATE: restricted.dumps(training),
    }
    if run_state.stage >= 1:
        files[names.optim_states_file(run_state.precision == "bf16")] = restricted.dumps(
            {"optimizer_state_dict": {"zero_stage": run_state.stage}}
        )
    if refused or odd:
        files[names.OBJECTS] = _objects({_CLIENT: refused, _TRAINING: odd})
    return files


def reserved_entries(client_state: dict[str, Any]) -> dict[str, Any]:
    """Takes the entries of :data:`CLIENT_ENTRIES` out of a client state, and returns them under their own keys.

    A checkpoint of another release may have that key from the caller; it then stays.
    """
    found = client_state.get(CLIENT_ENTRIES)
    if not isinstance(found, dict) or not found.keys() <= RESERVED_KEYS:
        return {}
    del client_state[CLIENT_ENTRIES]
    return found


def position_of_all(positions: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Returns the position in the data for any number of ranks, out of those of all ranks; None if there is none.

    If the samplers of two ranks order the samples differently, the checksum of the order becomes None, which no order
    has.
    """
    first = positions[0]
    if first is None or "order" not in first:
        return first
    is_shared = all(other is None or other.get("order") == first["order"] for other in positions)
    return first if is_shared else {**first, "order": {**first["order"], "checksum": None}}


def rank_file(run_state: RunState) -> bytes:
    """Returns the content of this rank's own small file.

    A loader's state that only code can restore is in it as bytes, see :func:`restore_loader_state`.
    """
    state: dict[str, Any] = {"random": random_state()}
    position = getattr(run_state.dataloader, "state_dict", None)
    if callable(position):
        # Imported here, since only runs with a loader need them.
        from deepspeed.data.loader import epoch_sampler_of
        from deepspeed.data.positions import is_counted_without_its_sampler, passed_before

        state["data"] = position()
        if restricted.split({"data": state["data"]})[1]:
            state[_PICKLED_DATA] = restricted.dumps(state.pop("data"))
            log_dist_once(
                "save_checkpoint: the state of the data loader holds objects that only code can restore; "
                "load_checkpoint(..., allow_pickled_objects=True) restores it",
                level=logging.WARNING,
            )
        state["data_passed"] = passed_before(run_state.dataloader)
        state["data_is_rest"] = is_counted_without_its_sampler(run_state.dataloader)
        # Loaders of other libraries save the number of used batches, but not their order.
        epoch = getattr(epoch_sampler_of(run_state.dataloader), "epoch", None)
        if isinstance(epoch, int):
            state["data_epoch"] = epoch
    return restricted.dumps(state)


def restore_loader_state(state: dict[str, Any], *, trust: bool) -> list[str]:
    """Restores a rank's pickled loader state if ``trust``, as it may run code; returns names of what was withheld."""
    pickled = state.pop(_PICKLED_DATA, None)
    if pickled is None:
        return []
    if not trust:
        return ["the state of the data loader"]
    state["data"] = restricted.loads_trusting(pickled)
    return []


def _objects(refused: dict[str, dict[restricted.Path, Any]]) -> bytes:
    """Collects objects that only an unrestricted loader restores and warns of them; unpicklable ones are an error."""
    data: dict[str, list[tuple[restricted.Path, bytes]]] = {}
    for part, entries in refused.items():
        data[part] = []
        for path, value in entries.items():
            name = restricted.describe(path)
            try:
                found = value if isinstance(value, restricted.PickledObject) else restricted.PickledObject.of(value)
            except CheckpointError as error:
                raise CheckpointError(f"{part}: {name}: {error}") from error
            data[part].append((path, found.data))
            logger.warning(
                "save_checkpoint: %s %s (%s) is saved in a separate file, because restoring it runs code; "
                "load_checkpoint(..., allow_pickled_objects=True) restores it",
                part,
                name,
                found.kind,
            )
    return restricted.dumps(data)


def merge_objects(data: bytes, what: str, training: dict[str, Any], top: dict[str, Any], *, trust: bool) -> list[str]:
    """Restores the objects in the separate file, if the caller trusts it; returns names of what was withheld.

    Args:
        training: Content of the training-state file; completed in place.
        top: Content of the model-states file; completed in place.
        trust: Whether the objects may be unpickled, which may run code.

    Raises:
        CheckpointError: The file does not hold objects that were saved apart.
    """
    withheld = []
    content = restricted.loads(data, what)
    try:
        listed = [(part, tuple(path), value) for part in (_CLIENT, _TRAINING) for path, value in content[part]]
        named = [(part, path, restricted.describe(path), bytes(value)) for part, path, value in listed]
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(
            f"{what} does not hold objects that were saved apart ({error!r}); it was altered"
        ) from None
    for part, path, name, value in named:
        if trust:
            restricted.merge(training if part == _TRAINING else top, {path: restricted.loads_trusting(value)})
        else:
            withheld.append(name)
    return withheld


def _model_states(run_state: RunState, listed: Roster, merged: MergedGroups) -> dict[str, Any]:
    """Returns what the ecosystem expects at the top level of the model-states file."""
    shapes = {name: torch.Size(shape) for name, shape in listed.shapes().items()}
    groups = [OrderedDict((name, shapes[name]) for name in group["params"]) for group in merged.groups]
    frozen = OrderedDict((name, shapes[name]) for name in listed.frozen())
    buffers = run_state.buffers()
    # The configuration has no secrets here, and the text of functions and other objects that are no data.
    kept, others = restricted.split({"ds_config": hide_secrets(_as_dicts(run_state.config))})
    restricted.merge(kept, {path: str(value) for path, value in others.items()})
    return {
        "module": None,
        "buffer_names": list(buffers),
        "optimizer": None,
        "param_shapes": groups,
        "frozen_param_shapes": frozen or None,
        "frozen_param_fragments": None,
        "shared_params": {alias: name for alias, name in listed.aliases.items() if name not in buffers},
        "lr_scheduler": merged.schedule,
        "data_sampler": run_state.sampler_state(),
        **{key: run_state.states[key].state_dict() if key in run_state.states else None for key in FEATURE_KEYS},
        "skipped_steps": run_state.counters["skipped_steps"],
        "global_steps": run_state.counters["global_steps"],
        "global_samples": run_state.counters["global_samples"],
        "dp_world_size": run_state.dp_world_size,
        "mp_world_size": run_state.model_size,
        "ds_config": kept["ds_config"],
        "ds_version": run_state.version,
    }


def _as_dicts(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _as_dicts(item) for name, item in value.items()}
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, bytes, tuple))
    return [_as_dicts(item) for item in value] if is_list else value


def _training(
    run_state: RunState,
    listed: Roster,
    scalars: Iterable[tuple[tuple[str, ...], dict[str, Any]]],
    merged: MergedGroups,
) -> dict[str, Any]:
    updater, optimizer = run_state.updater, run_state.torch_optimizer
    return {
        "counters": dict(run_state.counters),
        "world_size": run_state.dp_world_size,
        "mesh": run_state.mesh,
        "optimizer": type(optimizer).__name__ if optimizer is not None else None,
        "param_groups": merged.groups,
        "scalars": [[list(members), values] for members, values in scalars],
        "loss_scaler": updater.loss_scaler.state_dict()
        if updater is not None and updater.loss_scaler is not None
        else None,
        "skipped_in_a_row": updater.skipped_in_a_row if updater is not None else 0,
        "lr_scheduler": merged.schedule,
        "extra_state": {**listed.extra_state, **run_state.extra_state()},
    }


def random_state() -> dict[str, Any]:
    """Returns the states of Python's, numpy's, torch's and the present device's generators."""
    accelerator = get_accelerator()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if accelerator.device_name() != "cpu":
        state["device"] = accelerator.get_rng_state()
        state["device_name"] = accelerator.device_name()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Restores :func:`random_state`; a state of another kind of device is left aside."""
    accelerator = get_accelerator()
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "device" in state and state["device_name"] == accelerator.device_name() != "cpu":
        accelerator.set_rng_state(state["device"])
