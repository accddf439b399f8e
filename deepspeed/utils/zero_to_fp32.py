"""Consolidating checkpoints: re-exports of :mod:`deepspeed.checkpoint.consolidate` and of the files' names."""

from __future__ import annotations

from deepspeed.checkpoint.consolidate import (
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    to_torch_tensor,
)
from deepspeed.checkpoint.names import (
    get_checkpoint_files,
    get_model_state_file,
    get_model_state_files,
    get_optim_files,
)

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "convert_zero_checkpoint_to_state_dict",
    "get_checkpoint_files",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_model_state_files",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "to_torch_tensor",
]
