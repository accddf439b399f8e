"""Upstream's import path for names of ``ops.onebit``."""

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.onebit import OneBitAdam as OnebitAdam
    from deepspeed.ops.onebit import OneBitLamb as OnebitLamb
    from deepspeed.ops.onebit import ZeroOneAdam
    from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam

    __all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "adam", "lamb", "zoadam"]
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
