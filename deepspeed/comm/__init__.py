"""Communication between the ranks: ``import deepspeed.comm as dist``.

The functions take the arguments of their namesakes in :mod:`torch.distributed` and act on torch's process groups, so
the two may be mixed freely. ``collectives`` has them; ``recorder`` and ``summary`` are the communication log. The
rest is in subpackages: ``start`` (how a process joins its job), ``job`` (meshes and process groups), ``transports``
(how buffers are sent), ``watch`` (the watchdog), ``codecs`` (compression), and ``host`` (fast transfers on one CPU
host).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepspeed.lazy import lazy_names

if TYPE_CHECKING:
    from torch.distributed import P2POp as P2POp
    from torch.distributed import ProcessGroup as ProcessGroup

    from deepspeed.comm.base.recorder import comms_logger as comms_logger
    from deepspeed.comm.base.timeout import default_timeout as default_timeout
    from deepspeed.comm.collectives import ReduceOp as ReduceOp
    from deepspeed.comm.collectives import all_gather as all_gather
    from deepspeed.comm.collectives import all_gather_coalesced as all_gather_coalesced
    from deepspeed.comm.collectives import all_gather_into_tensor as all_gather_into_tensor
    from deepspeed.comm.collectives import all_gather_object as all_gather_object
    from deepspeed.comm.collectives import all_reduce as all_reduce
    from deepspeed.comm.collectives import all_reduce_coalesced as all_reduce_coalesced
    from deepspeed.comm.collectives import all_to_all as all_to_all
    from deepspeed.comm.collectives import all_to_all_single as all_to_all_single
    from deepspeed.comm.collectives import allgather_fn as allgather_fn
    from deepspeed.comm.collectives import barrier as barrier
    from deepspeed.comm.collectives import batch_isend_irecv as batch_isend_irecv
    from deepspeed.comm.collectives import broadcast as broadcast
    from deepspeed.comm.collectives import broadcast_object_list as broadcast_object_list
    from deepspeed.comm.collectives import gather as gather
    from deepspeed.comm.collectives import inference_all_reduce as inference_all_reduce
    from deepspeed.comm.collectives import irecv as irecv
    from deepspeed.comm.collectives import isend as isend
    from deepspeed.comm.collectives import monitored_barrier as monitored_barrier
    from deepspeed.comm.collectives import recv as recv
    from deepspeed.comm.collectives import reduce as reduce
    from deepspeed.comm.collectives import reduce_scatter as reduce_scatter
    from deepspeed.comm.collectives import reduce_scatter_fn as reduce_scatter_fn
    from deepspeed.comm.collectives import reduce_scatter_tensor as reduce_scatter_tensor
    from deepspeed.comm.collectives import scatter as scatter
    from deepspeed.comm.collectives import send as send
    from deepspeed.comm.job.job import define_group as define_group
    from deepspeed.comm.start.process_group import CCL_BACKEND as CCL_BACKEND
    from deepspeed.comm.start.process_group import GLOO_BACKEND as GLOO_BACKEND
    from deepspeed.comm.start.process_group import HCCL_BACKEND as HCCL_BACKEND
    from deepspeed.comm.start.process_group import MPI_BACKEND as MPI_BACKEND
    from deepspeed.comm.start.process_group import NCCL_BACKEND as NCCL_BACKEND
    from deepspeed.comm.start.process_group import SCCL_BACKEND as SCCL_BACKEND
    from deepspeed.comm.start.process_group import check_same_config as check_same_config
    from deepspeed.comm.start.process_group import check_same_model as check_same_model
    from deepspeed.comm.start.process_group import destroy_process_group as destroy_process_group
    from deepspeed.comm.start.process_group import get_all_ranks_from_group as get_all_ranks_from_group
    from deepspeed.comm.start.process_group import get_backend as get_backend
    from deepspeed.comm.start.process_group import get_global_rank as get_global_rank
    from deepspeed.comm.start.process_group import get_local_rank as get_local_rank
    from deepspeed.comm.start.process_group import get_rank as get_rank
    from deepspeed.comm.start.process_group import get_world_group as get_world_group
    from deepspeed.comm.start.process_group import get_world_size as get_world_size
    from deepspeed.comm.start.process_group import has_all_gather_into_tensor as has_all_gather_into_tensor
    from deepspeed.comm.start.process_group import has_all_reduce_coalesced as has_all_reduce_coalesced
    from deepspeed.comm.start.process_group import has_coalescing_manager as has_coalescing_manager
    from deepspeed.comm.start.process_group import has_reduce_scatter_tensor as has_reduce_scatter_tensor
    from deepspeed.comm.start.process_group import init_distributed as init_distributed
    from deepspeed.comm.start.process_group import initialize_mesh_device as initialize_mesh_device
    from deepspeed.comm.start.process_group import is_available as is_available
    from deepspeed.comm.start.process_group import is_initialized as is_initialized
    from deepspeed.comm.start.process_group import mpi_discovery as mpi_discovery
    from deepspeed.comm.start.process_group import new_group as new_group
    from deepspeed.comm.summary import configure as configure
    from deepspeed.comm.summary import get_comm_operation_count as get_comm_operation_count
    from deepspeed.comm.summary import get_logged_comm_ops as get_logged_comm_ops
    from deepspeed.comm.summary import has_comm_data as has_comm_data
    from deepspeed.comm.summary import log_summary as log_summary
    from deepspeed.comm.summary import reset_log as reset_log
    from deepspeed.comm.torch_backend import TorchBackend as TorchBackend

lazy_names(__name__)
