"""The builders of operators under upstream's names, which compile nothing (:mod:`deepspeed.ops.op_builder.builder`)."""

from __future__ import annotations

from deepspeed.lazy import lazy_names
from deepspeed.ops.op_builder.builder import BUILDERS

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.ops.op_builder.builder": " ".join(("OpBuilder", "CUDAOpBuilder", "TorchCPUOpBuilder", *BUILDERS)),
        "deepspeed.ops.op_builder.all_ops": "ALL_OPS",
    },
    submodules="all_ops builder",
)
