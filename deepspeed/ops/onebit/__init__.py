"""The 1-bit family: optimizers that exchange their momentum in one bit for each element."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "OneBitAdam": "deepspeed.ops.onebit.adam",
        "OneBitLamb": "deepspeed.ops.onebit.lamb",
        "ZeroOneAdam": "deepspeed.ops.onebit.zero_one",
    },
    submodules=["adam", "lamb", "phases", "zero_one"],
)
