"""The module :mod:`deepspeed.comm.job.groups` under upstream's import path."""

import sys

from deepspeed.comm.job.groups import *  # noqa: F403  # for type checkers
from deepspeed.comm.job.groups import _get_broadcast_src_rank as _get_broadcast_src_rank
from deepspeed.comm.job.groups import _get_data_parallel_group as _get_data_parallel_group
from deepspeed.comm.job.groups import _get_data_parallel_rank as _get_data_parallel_rank
from deepspeed.comm.job.groups import _get_data_parallel_world_size as _get_data_parallel_world_size
from deepspeed.comm.job.groups import _get_expert_broadcast_src_rank as _get_expert_broadcast_src_rank
from deepspeed.comm.job.groups import _get_expert_data_parallel_group as _get_expert_data_parallel_group
from deepspeed.comm.job.groups import _get_expert_data_parallel_group_dict as _get_expert_data_parallel_group_dict
from deepspeed.comm.job.groups import _get_expert_data_parallel_group_ranks as _get_expert_data_parallel_group_ranks
from deepspeed.comm.job.groups import _get_expert_data_parallel_rank as _get_expert_data_parallel_rank
from deepspeed.comm.job.groups import _get_expert_data_parallel_world_size as _get_expert_data_parallel_world_size
from deepspeed.comm.job.groups import _get_expert_parallel_group as _get_expert_parallel_group
from deepspeed.comm.job.groups import _get_expert_parallel_group_dict as _get_expert_parallel_group_dict
from deepspeed.comm.job.groups import _get_expert_parallel_group_ranks as _get_expert_parallel_group_ranks
from deepspeed.comm.job.groups import _get_expert_parallel_rank as _get_expert_parallel_rank
from deepspeed.comm.job.groups import _get_expert_parallel_ranks as _get_expert_parallel_ranks
from deepspeed.comm.job.groups import _get_expert_parallel_src_rank as _get_expert_parallel_src_rank
from deepspeed.comm.job.groups import _get_expert_parallel_world_size as _get_expert_parallel_world_size
from deepspeed.comm.job.groups import _get_max_expert_parallel_group as _get_max_expert_parallel_group
from deepspeed.comm.job.groups import _get_max_expert_size as _get_max_expert_size
from deepspeed.comm.job.groups import _get_max_expert_size_name as _get_max_expert_size_name
from deepspeed.comm.job.groups import _get_model_parallel_group as _get_model_parallel_group
from deepspeed.comm.job.groups import _get_model_parallel_rank as _get_model_parallel_rank
from deepspeed.comm.job.groups import _get_model_parallel_world_size as _get_model_parallel_world_size
from deepspeed.comm.job.groups import _get_sequence_data_parallel_group as _get_sequence_data_parallel_group
from deepspeed.comm.job.groups import _get_sequence_data_parallel_rank as _get_sequence_data_parallel_rank
from deepspeed.comm.job.groups import _get_sequence_data_parallel_world_size as _get_sequence_data_parallel_world_size
from deepspeed.comm.job.groups import _get_sequence_parallel_group as _get_sequence_parallel_group
from deepspeed.comm.job.groups import _get_sequence_parallel_rank as _get_sequence_parallel_rank
from deepspeed.comm.job.groups import _get_sequence_parallel_world_size as _get_sequence_parallel_world_size

sys.modules[__name__] = sys.modules["deepspeed.comm.job.groups"]
