"""Puts a model's parameters into the buffers of the ZeRO runtime, and its optimizer onto their masters."""

from __future__ import annotations

import os

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.start.environment import ranks_per_node
from deepspeed.comm.transports.transport import Transport
from deepspeed.engine.optimizers import group_indices, move_to_runs
from deepspeed.engine.runtime_options import runtime_options
from deepspeed.engine_feature import EngineSetup
from deepspeed.offload.tiers import OffloadTiers, open_tiers
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.gather.units import mark_configured_leaves
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement
from deepspeed.zero.runtime import ZeroRuntime, build_runtime
from deepspeed.zero.storage import distinct
from deepspeed.zero.update.loop import state_itemsizes


def place_model(
    setup: EngineSetup,
    placement: Placement,
    precision: PrecisionPolicy,
    groups: Groups,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[OffloadTiers, ZeroRuntime]:
    """Gives parameters, buffers and masters of a model their places. Every rank of the job must call it.

    Args:
        setup: What was asked for.
        placement: Where model states live.
        precision: Their dtypes.
        groups: Who shares them.
        optimizer: The torch optimizer, whose parameters become this rank's parts of the masters; or None.

    Returns:
        The memory away from the device, and the runtime.

    Raises:
        DeepSpeedConfigError: A leaf module does not exist, or the optimizer cannot update what it would get.
    """
    root, model, device = setup.root, setup.model, setup.device
    mark_configured_leaves(model, root.zero_optimization.leaf_module)
    tiers = open_tiers(
        root,
        placement,
        device,
        rank=comm.get_rank(),
        ranks_here=ranks_per_node(os.environ, comm.get_world_size(), get_accelerator().device_count()),
        state_itemsizes=state_itemsizes(optimizer),
        is_trained=optimizer is not None,
    )
    options = runtime_options(root, placement, precision, device, optimizer, tiers)
    runtime = build_runtime(model, options, groups, group_indices(optimizer))
    precision.cast_buffers(model, device)
    _spread_buffers(model, groups.peers)
    if optimizer is not None:
        move_to_runs(optimizer, runtime.masters, lambda parameter: optimizer.state.pop(parameter, None))
    return tiers, runtime


@torch.no_grad()
def _spread_buffers(model: nn.Module, transport: Transport) -> None:
    """Gives all ranks the buffers of rank 0, as bytes: backends know neither all dtypes nor strides."""
    for buffer in model.buffers():
        values = distinct(buffer)
        dense = values.contiguous()
        transport.broadcast(dense.view(-1).view(torch.uint8), 0, label="the buffers of rank 0")
        if dense is not values:
            values.copy_(dense)
