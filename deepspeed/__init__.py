"""DeepSpeed: train models far larger than one device holds."""

from __future__ import annotations

__version__ = "1.0.0"
