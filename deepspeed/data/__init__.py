"""Loads data: a distributed loader, endless repetition, batches moved to the device, seeding."""

from __future__ import annotations

from deepspeed.data.loader import DeepSpeedDataLoader, RepeatingLoader, move_to_device
from deepspeed.data.seeding import set_random_seed

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader", "move_to_device", "set_random_seed"]
