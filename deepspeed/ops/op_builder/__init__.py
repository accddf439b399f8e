"""Builders of operators, with upstream's names; nothing is compiled (see :mod:`deepspeed.ops.op_builder.builder`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names
from deepspeed.ops.op_builder.builder import BUILDERS

_HERE = "deepspeed.ops.op_builder"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(("OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", *BUILDERS), f"{_HERE}.builder"),
        "ALL_OPS": f"{_HERE}.all_ops",
    },
    submodules=["all_ops", "builder"],
)
