"""Upstream's import path of the modules below it."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper as partitioned_optimizer_swapper
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper as partitioned_param_swapper
    from deepspeed.runtime.swap_tensor import pipelined_optimizer_swapper as pipelined_optimizer_swapper

lazy_names(__name__)
