"""Layers computed chunk by chunk; see :mod:`deepspeed.parallel.sequence.fpdt`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_HOME = "deepspeed.parallel.sequence.fpdt"
__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "FPDT_Attention": _HOME,
        "FPDT_FFN": _HOME,
        "FPDT_InputConstruct": _HOME,
        "FPDT_LogitsLoss": _HOME,
    },
)
