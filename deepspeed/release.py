"""The version of this package, for modules that must not import the root."""

from __future__ import annotations

VERSION = "1.0.0"
