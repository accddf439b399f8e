"""The contract of accelerators by upstream's path; re-exports only."""

from __future__ import annotations

from deepspeed.accelerator.base import DeepSpeedAccelerator

__all__ = ["DeepSpeedAccelerator"]
