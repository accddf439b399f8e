"""The 1-bit family; re-exports only."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "OnebitAdam": "deepspeed.ops.onebit:OneBitAdam",
        "OnebitLamb": "deepspeed.ops.onebit:OneBitLamb",
        "ZeroOneAdam": "deepspeed.ops.onebit",
    },
    submodules=["adam", "lamb", "zoadam"],
)
