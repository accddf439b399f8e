"""The states of all random number generators of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from deepspeed.accelerator import get_accelerator


def random_state() -> dict[str, Any]:
    """States of Python's, numpy's, torch's and the present device's generators."""
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
