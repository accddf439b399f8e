"""Loads models by the names that trainers give them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def load_causal_model(
    path: str, shape: Any, dtype: torch.dtype, *, trust_remote_code: bool = False, recomputes: bool = False
) -> nn.Module:
    """Returns the causal language model of a folder or name.

    Args:
        shape: Its configuration; None: that of the folder.
        recomputes: Recompute the activations of each block in the backward.
    """
    from transformers import AutoModelForCausalLM

    more = {} if shape is None else {"config": shape}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=trust_remote_code, **more)
    if recomputes:
        model.gradient_checkpointing_enable()
    return model
