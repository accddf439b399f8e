"""Names of the files in a tag folder. Reads nothing."""

from __future__ import annotations

import os
import re
from pathlib import Path

from deepspeed.checkpoint.constants import MODEL_FILE_PREFIX, MODEL_FILE_SUFFIX, OPTIM_FILE_SUFFIX, ZERO_FILE_PREFIX
from deepspeed.checkpoint.format import BUFFERS, PRIVATE

_SAFE = re.compile(r"[A-Za-z0-9_.\-]{1,80}")

TRAINING_STATE = "rank00000-training.pt"
OBJECTS = "rank00000-objects.pt"


def data_file(rank: int, kind: str, number: int) -> str:
    """Returns the safetensors file of one rank and kind; ``number`` stands in for a kind that is no file name."""
    return f"rank{rank:05d}-{kind if _SAFE.fullmatch(kind) else f'kind{number}'}.safetensors"


def buffers_file(rank: int = 0) -> str:
    """Returns the safetensors file of the model's buffers that ``rank`` writes."""
    return data_file(rank, BUFFERS, 0)


def private_file(rank: int) -> str:
    """Returns the safetensors file of what one rank keeps for itself."""
    return data_file(rank, PRIVATE, 0)


def rank_state_file(rank: int) -> str:
    """Returns the name of the file with the random state and data position of one rank."""
    return f"rank{rank:05d}-state.pt"


def model_states_file(stage: int) -> str:
    """Returns the file with counters and the caller's state, where the ecosystem looks for it."""
    return "zero_pp_rank_0_mp_rank_00_model_states.pt" if stage >= 3 else "mp_rank_00_model_states.pt"


def optim_states_file(bf16: bool) -> str:
    """Returns the file in which the ecosystem looks for the ZeRO stage."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"


# -- finding them, as deepspeed.utils.zero_to_fp32 offers it ---------------------------------------------------------


def get_checkpoint_files(checkpoint_dir: str | Path, glob_pattern: str) -> list[str]:
    """Returns the paths in a tag folder that match ``glob_pattern``, numbers in their names sorted as numbers.

    Raises:
        FileNotFoundError: There is none.
    """
    found = sorted((str(path) for path in Path(checkpoint_dir).glob(glob_pattern)), key=_natural)
    if not found:
        raise FileNotFoundError(f"no file {glob_pattern!r} in {checkpoint_dir}; pass the folder of one tag")
    return found


def get_optim_files(checkpoint_dir: str | Path) -> list[str]:
    """Returns the optimizer-states files of a tag folder, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_optim_states.pt")


def get_model_state_files(checkpoint_dir: str | Path) -> list[str]:
    """Returns the model-states files of a tag folder, by rank."""
    return get_checkpoint_files(checkpoint_dir, "*_model_states.pt")


def get_model_state_file(checkpoint_dir: str | Path, zero_stage: int) -> str:
    """Returns the model-states file of rank 0. Raises FileNotFoundError: the folder has no such file."""
    path = Path(checkpoint_dir) / model_states_file(int(zero_stage))
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; pass the folder of one tag and the stage that saved it")
    return str(path)


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Returns the path of upstream's model-states file of a model-parallel rank, below stage 3."""
    return os.path.join(base_folder, f"{MODEL_FILE_PREFIX}{mp_rank_str}{MODEL_FILE_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Returns the path of upstream's optimizer-states file of a rank."""
    name = f"{ZERO_FILE_PREFIX}{dp_rank}_{MODEL_FILE_PREFIX}{mp_rank:02d}{OPTIM_FILE_SUFFIX}"
    return os.path.join(base_folder, name)


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Returns the path of upstream's file of a pipeline's layer; ``layer_id`` is as in ``"layer_03"``."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{MODEL_FILE_SUFFIX}")


def _natural(text: str) -> list[int | str]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text)]
