"""The files that other pipeline programs keep layers in: ``layer_03-model_states.pt``, one per layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from deepspeed.errors import CheckpointError
from deepspeed.zero.access.gathered import GatheredParameters


def prefix(_module: Any, checkpoints_path: str, tag: str) -> str:
    """Returns the beginning of the names of all files of a checkpoint."""
    return str(Path(checkpoints_path) / str(tag))


def layer_path(module: Any, ckpt_dir: str, local_layer_idx: int) -> str:
    """Returns the file, in the folder ``ckpt_dir``, of this rank's layer number ``local_layer_idx``."""
    number = module._numbers[local_layer_idx]
    place = module._topo.get_rank_repr(rank=module.global_rank)
    return str(Path(ckpt_dir) / f"layer_{number:02d}{'-' + place if place else ''}-model_states.pt")


def layer_path_list(module: Any, ckpt_dir: str, local_layer_idx: int) -> list[str]:
    """Returns the files of a layer, one for each tensor-parallel rank that wrote one."""
    number = module._numbers[local_layer_idx]
    return sorted(str(path) for path in Path(ckpt_dir).glob(f"layer_{number:02d}-*model_states.pt"))


def _layers(module: Any) -> list[tuple[int, nn.Module]]:
    """Returns this rank's layers that have files: modules, not functions of tied ones."""
    return [(place, func) for place, func in enumerate(module.forward_funcs) if isinstance(func, nn.Module)]


def save_state_dict(module: Any, save_dir: str, checkpoint_engine: Any, exclude_frozen_params: bool = False) -> None:
    """Writes the files of this rank's layers. Every data-parallel rank must call it; the first one writes.

    ``checkpoint_engine`` has ``save(state_dict, path)``.
    """
    for place, layer in _layers(module):
        with GatheredParameters(list(layer.parameters())):
            if module.mpu().get_data_parallel_rank() > 0:
                continue
            frozen = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
            left_out = frozen if exclude_frozen_params else set()
            state = {name: value.clone() for name, value in layer.state_dict().items() if name not in left_out}
            checkpoint_engine.save(state, layer_path(module, save_dir, place))


def load_state_dir(module: Any, load_dir: str, checkpoint_engine: Any, strict: bool = True) -> None:
    """Reads this rank's layers from their files, which any stages may have written. Every rank must call it.

    ``checkpoint_engine`` has ``load(path, map_location=None)``; where ``strict`` every parameter must be there.

    Raises:
        CheckpointError: A layer has no file, or more than one: layers that were cut over tensor-parallel ranks.
    """
    for place, layer in _layers(module):
        files = layer_path_list(module, load_dir, place)
        if len(files) != 1:
            raise CheckpointError(
                f"load_state_dir({load_dir!r}): layer {module._numbers[place]} has {len(files)} files; expected one "
                "(layer_NN-model_states.pt). Several are parts of tensor-parallel ranks; convert the checkpoint to a "
                "universal one and load that"
            )
        state = checkpoint_engine.load(files[0], map_location="cpu")
        with GatheredParameters(list(layer.parameters()), modifier_rank=0):
            layer.load_state_dict(state, strict=strict)
