"""Upstream's import path for names of ``ops.onebit``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.onebit import OneBitAdam as OnebitAdam
    from deepspeed.ops.onebit import OneBitLamb as OnebitLamb
    from deepspeed.ops.onebit import ZeroOneAdam
    from deepspeed.runtime.fp16.onebit import adam, lamb, zoadam

    __all__ = ["OnebitAdam", "OnebitLamb", "ZeroOneAdam", "adam", "lamb", "zoadam"]

lazy_names(__name__)
