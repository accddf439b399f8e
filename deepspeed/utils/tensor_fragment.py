"""Access to fragments of parameters; re-exports from :mod:`deepspeed.utils`."""

from __future__ import annotations

from deepspeed.features import missing_names
from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {name: "deepspeed.utils" for name in missing_names("deepspeed.utils") if name.startswith("safe_")}
)
