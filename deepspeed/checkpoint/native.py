"""The small states of a checkpoint of this package."""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint import names, restricted
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.states import merge_objects
from deepspeed.errors import CheckpointError


def read_training_state(reader: CheckpointReader, rank: int, *, trust: bool) -> TrainingState:
    """Returns everything that is no large tensor.

    Args:
        reader: The open checkpoint.
        rank: Whose RNG and data position.
        trust: Also unpickle objects that were saved apart, which may run code.

    Raises:
        CheckpointError: A file is missing, damaged, or refused by the restricted loader.
    """
    where = str(reader.folder / names.TRAINING_STATE)
    stage = reader.manifest.facts.get("zero_stage")
    top = _load(reader, names.model_states_file(stage if isinstance(stage, int) else 0))
    training = _load(reader, names.TRAINING_STATE)
    objects = reader.read_file(names.OBJECTS)
    withheld: list[str] = []
    if objects is not None:
        withheld = merge_objects(objects, str(reader.folder / names.OBJECTS), training, top, trust=trust)
    try:
        state = TrainingState(
            counters={str(key): int(value) for key, value in training["counters"].items()},
            world_size=int(training["world_size"]),
            mesh=_mesh(training),
            optimizer=training["optimizer"],
            param_groups=[{**group, "params": list(group["params"])} for group in training["param_groups"]],
            scalars={name: dict(values) for members, values in training["scalars"] for name in members},
            loss_scaler=training["loss_scaler"],
            skipped_in_a_row=int(training["skipped_in_a_row"]),
            lr_scheduler=training["lr_scheduler"],
            extra_state=dict(training["extra_state"]),
            model_states=top,
            withheld=withheld,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{where} does not hold a training state ({error!r}); the checkpoint was altered"
        ) from None
    # A converted checkpoint has no states of ranks.
    if rank >= 0 and reader.manifest.file(names.rank_state_file(rank)) is not None:
        state.rank_state = _load(reader, names.rank_state_file(rank))
    return state


def _mesh(training: dict[str, Any]) -> dict[str, int]:
    mesh = training.get("mesh", {"data": training["world_size"], "model": 1})  # version 1 knew no other axis
    return {str(name): int(size) for name, size in mesh.items()}


def _load(reader: CheckpointReader, name: str) -> dict[str, Any]:
    data = reader.read_file(name)
    if data is None:
        raise CheckpointError(f"{reader.folder}: {name} is missing; the checkpoint is damaged")
    value = restricted.loads(data, str(reader.folder / name))
    if not isinstance(value, dict):
        raise CheckpointError(f"{reader.folder / name} holds a {type(value).__name__}, expected a dict")
    return value
