"""The optimizers 1-bit Adam, 1-bit LAMB and 0/1 Adam, which exchange their momentum with one bit per element."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.ops.onebit.adam": "OneBitAdam",
        "deepspeed.ops.onebit.lamb": "OneBitLamb",
        "deepspeed.ops.onebit.zero_one": "ZeroOneAdam",
    },
    submodules="adam lamb phases zero_one",
)
