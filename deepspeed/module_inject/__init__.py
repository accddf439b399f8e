"""Upstream's import path for names of ``parallel.tensor.linear`` and ``parallel.tensor.request``."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.module_inject import auto_tp, layers, replace_module, replace_policy, tp_shard
    from deepspeed.parallel.tensor.linear import ColumnLinear as LinearLayer
    from deepspeed.parallel.tensor.linear import RowLinear as LinearAllreduce
    from deepspeed.parallel.tensor.request import set_autotp_mode

    __all__ = [
        "LinearAllreduce",
        "LinearLayer",
        "auto_tp",
        "layers",
        "replace_module",
        "replace_policy",
        "set_autotp_mode",
        "tp_shard",
    ]

lazy_names(__name__)
