"""Consolidating checkpoints in a chosen dtype; re-exports of :mod:`deepspeed.checkpoint.consolidate`."""

from __future__ import annotations

from deepspeed.checkpoint.consolidate import (
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
    main,
    to_torch_tensor,
)
from deepspeed.checkpoint.names import get_model_state_file, get_optim_files

__all__ = [
    "convert_zero_checkpoint_to_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "get_model_state_file",
    "get_optim_files",
    "load_state_dict_from_zero_checkpoint",
    "main",
    "to_torch_tensor",
]
