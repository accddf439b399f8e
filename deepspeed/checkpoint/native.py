"""The small states of a checkpoint of this package."""

from __future__ import annotations

from typing import Any

from deepspeed.checkpoint import names, restricted
from deepspeed.checkpoint.reader import CheckpointReader
from deepspeed.checkpoint.source import TrainingState
from deepspeed.checkpoint.states import merge_objects
from deepspeed.errors import CheckpointError


def read_training_state(reader: CheckpointReader, rank: int, *, trust: bool) -> TrainingState:
    """Everything that is no large tensor.

    Args:
        reader: The open checkpoint.
        rank: Whose RNG and data position.
        trust: Also unpickle objects that were saved apart, which may run code.

    Raises:
        CheckpointError: A file is missing, damaged, or refused by the restricted loader.
    """
    facts = reader.manifest.facts
    training = _load(reader, names.TRAINING_STATE)
    top = _load(reader, names.model_states_file(int(facts.get("zero_stage", 0))))
    objects = reader.read_file(names.OBJECTS)
    withheld: list[str] = []
    if objects is not None:
        withheld = merge_objects(objects, f"{reader.folder / names.OBJECTS}", training, top, trust=trust)
    state = reader.read_file(names.rank_state_file(rank)) if rank < int(training["world_size"]) else None
    return TrainingState(
        counters=training["counters"],
        world_size=training["world_size"],
        optimizer=training["optimizer"],
        param_groups=training["param_groups"],
        scalars={name: values for members, values in training["scalars"] for name in members},
        loss_scaler=training["loss_scaler"],
        skipped_in_a_row=training["skipped_in_a_row"],
        lr_scheduler=training["lr_scheduler"],
        extra_state=training["extra_state"],
        model_states=top,
        rank_state=None if state is None else restricted.loads(state, names.rank_state_file(rank)),
        withheld=withheld,
    )


def _load(reader: CheckpointReader, name: str) -> dict[str, Any]:
    data = reader.read_file(name)
    if data is None:
        raise CheckpointError(f"{reader.folder}: {name} is missing; the checkpoint is damaged")
    value = restricted.loads(data, str(reader.folder / name))
    if not isinstance(value, dict):
        raise CheckpointError(f"{reader.folder / name} holds a {type(value).__name__}, expected a dict")
    return value
