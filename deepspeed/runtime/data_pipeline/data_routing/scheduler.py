"""How many tokens are kept; re-exports; the code is in :mod:`deepspeed.dropping`."""

from __future__ import annotations

from deepspeed.dropping.token_schedule import RandomLTDScheduler

__all__ = ["RandomLTDScheduler"]
