"""PEFT's adapters: the names under which they are saved."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError


def adapter_names(model: Any) -> dict[str, str]:
    """Maps the names of a PEFT model's trained parameters to those that its ``save_pretrained`` writes.

    Raises:
        DeepSpeedConfigError: The model is not wrapped by PEFT.
    """
    if not hasattr(model, "peft_config"):
        raise DeepSpeedConfigError(
            f"adapters: expected a model of peft.get_peft_model, found {type(model).__name__}; leave the argument out"
        )
    from peft import get_peft_model_state_dict

    state = {name: torch.empty(0) for name, _ in model.named_parameters(remove_duplicate=False)}
    own = {id(value): name for name, value in state.items()}
    saved = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    return {own[id(value)]: name for name, value in saved.items()}
