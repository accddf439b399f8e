"""Upstream's import path for names of 6 modules."""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.data import move_to_device as move_to_device
    from deepspeed.data import set_random_seed as set_random_seed
    from deepspeed.git_version_info import required_torch_version as required_torch_version
    from deepspeed.parallel.partition import partition_balanced as partition_balanced
    from deepspeed.parallel.partition import partition_uniform as partition_uniform
    from deepspeed.parallel.partition import prefix_sum_inc as prefix_sum_inc
    from deepspeed.parallel.partitioned_tensor import PartitionedTensor as PartitionedTensor
    from deepspeed.parallel.partitioned_tensor import all_gather_dp_groups as all_gather_dp_groups
    from deepspeed.parallel.partitioned_tensor import is_model_parallel_parameter as is_model_parallel_parameter
    from deepspeed.precision.clipping import clip_grad_norm_ as clip_grad_norm_
    from deepspeed.precision.clipping import get_global_norm as get_global_norm
    from deepspeed.profiling.timer import see_memory_usage as see_memory_usage

lazy_names(__name__)
