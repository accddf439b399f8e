"""Random layerwise token dropping; re-exports; the code is in :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.dropping.convert import convert_to_random_ltd, remove_random_ltd_state_dict, save_without_random_ltd

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]
