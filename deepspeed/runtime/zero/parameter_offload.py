"""The parameter machinery of stage 3 by itself; re-exports from :mod:`deepspeed.zero`."""

from __future__ import annotations

from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload

__all__ = ["DeepSpeedZeRoOffload"]
