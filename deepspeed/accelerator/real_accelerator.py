"""The choice of the accelerator by upstream's path; re-exports only."""

from __future__ import annotations

from deepspeed.accelerator.selection import get_accelerator, is_current_accelerator_supported, set_accelerator

__all__ = ["get_accelerator", "is_current_accelerator_supported", "set_accelerator"]
