"""Derives ZeRO's settings from the configuration: dtypes, placement, divisor of gradients, memory and limits."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.base.environment import ranks_per_node
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.root import Root
from deepspeed.engine.communication_compression import steps_until_reset
from deepspeed.engine.compiling import gathers_between_graphs, refuse_whole_graphs
from deepspeed.engine.optimizers import needs_whole_tensors
from deepspeed.engine_feature import EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.offload.tiers import OffloadTiers, open_tiers
from deepspeed.precision.policy import (
    PrecisionPolicy,
    check_device,
    create_loss_scaler,
    dtype_of_name,
    has_narrow_masters,
)
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.group import Groups
from deepspeed.zero.model_states import RuntimeOptions, spread_buffers
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.tiling.describe import OFFLOADED
from deepspeed.zero.tiling.layout import Limits
from deepspeed.zero.update.driver import UpdateDriver
from deepspeed.zero.update.loop import state_itemsizes
from deepspeed.zero.update.updater import UpdateOptions


def precision_for(setup: EngineSetup) -> PrecisionPolicy:
    """Returns the dtypes of the configuration.

    Raises:
        DeepSpeedConfigError: The device does not have one of them.
    """
    root = setup.root
    precision = PrecisionPolicy.from_config(root, get_accelerator(), setup.model)
    check_device(precision)
    is_shared = setup.ranks.sequence_size > 1
    if is_shared and precision.compute_dtype is not None and precision.communication_dtype is None:
        return replace(precision, communication_dtype=dtype_of_name(root.seq_parallel_communication_data_type))
    return precision


def placement_for(setup: EngineSetup) -> Placement:
    """Returns the configured placement of the model states.

    Raises:
        DeepSpeedConfigError: The model was compiled into one graph, and parameters are gathered between its parts.
    """
    root = setup.root
    placement = replace(
        Placement.of_section(root.zero_optimization, setup.ranks.zero_size),
        narrow_masters=has_narrow_masters(root),
        narrow_states=has_narrow_masters(root) and root.bf16.enabled and root.bf16.bf16_optimizer_states,
    )
    if gathers_between_graphs(placement, setup.ranks.zero_size):
        refuse_whole_graphs(setup.model)
    return placement


def gradient_divisor(root: Root, ranks: RankCoordinates) -> int:
    """Returns the divisor that turns the sum of gradients over the ranks with the same part into a mean over samples.

    It is the number of these ranks along all axes. If ranks that share a sequence each have a part of one loss, it is
    the number of sequences.

    Raises:
        DeepSpeedConfigError: Gradients are to be summed, and each rank that shares a sequence has all of the loss.
    """
    if ranks.sequence_size == 1 or root.sequence_parallel.loss == "own_share":
        return ranks.zero_size // ranks.sequence_size
    if root.gradient_allreduce_op == "sum":
        raise DeepSpeedConfigError(
            f'gradient_allreduce_op "sum" with {ranks.sequence_size} ranks that share a sequence: each of them has the '
            'gradient of the whole loss, so that their sum is too large; set it to "mean", or sequence_parallel.loss '
            'to "own_share" if each rank back-propagates its share'
        )
    return ranks.zero_size


def gathers_by_nodes(root: Root) -> bool:
    """Returns whether MiCS gathers inside each node first, then between nodes."""
    zero = root.zero_optimization
    return zero.stage == 3 and zero.mics_hierarchical_params_gather and zero.mics_shard_size > 1


def place_frozen(placement: Placement, own_groups: Collection[str]) -> Placement:
    """Returns the placement with the memory of frozen bases."""
    return replace(placement, base_tier=Tier.HOST if OFFLOADED in own_groups else Tier.DEVICE)


def tiers_for(
    setup: EngineSetup, placement: Placement, optimizer: torch.optim.Optimizer | None, groups: Groups
) -> OffloadTiers:
    """Opens the host memory and files that offload uses. Every rank of the job must call it."""
    return open_tiers(
        setup.root,
        placement,
        setup.device,
        groups.job,
        rank=comm.get_rank(),
        ranks_here=ranks_per_node(os.environ, comm.get_world_size(), get_accelerator().device_count()),
        state_itemsizes=state_itemsizes(optimizer),
        is_trained=optimizer is not None,
    )


def runtime_options(
    setup: EngineSetup,
    placement: Placement,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    tiers: OffloadTiers,
    driver: UpdateDriver,
) -> RuntimeOptions:
    """Returns the settings of the runtime for this model and optimizer.

    Raises:
        DeepSpeedConfigError: The optimizer needs whole tensors, which the ZeRO stage cuts.
    """
    root = setup.root
    zero = root.zero_optimization
    # One layout serves both directions, so the smaller limit decides how large a bucket may be.
    most_at_once = max(min(zero.reduce_bucket_size, zero.allgather_bucket_size), 1)
    return RuntimeOptions(
        placement=placement,
        layout=Limits(
            persistence=zero.stage3_param_persistence_threshold,
            model_persistence=zero.stage3_model_persistence_threshold,
            joined=most_at_once,
            unit=most_at_once,
        ),
        gathers=GatherLimits(
            prefetch=zero.stage3_prefetch_bucket_size,
            max_live=zero.stage3_max_live_parameters if "stage3_max_live_parameters" in zero.model_fields_set else None,
            max_reuse_distance=zero.stage3_max_reuse_distance,
        ),
        agreement=zero.agreement,
        reduction=None if optimizer is None else _reduction(root, placement, precision),
        granularity=max(zero.stage3_prefetch_bucket_size, zero.stage3_module_granularity_threshold),
        compute_dtype=precision.dtype_for,
        whole_tensors=optimizer is not None and needs_whole_tensors(optimizer, placement, root),
        device=setup.device,
        param_memories=tiers.param_memories,
        master_memories=tiers.master_memories,
        destination=tiers.destination,
        state_itemsizes=state_itemsizes(optimizer),
        leaves=zero.leaf_module,
        update=None if optimizer is None else _update(root, precision, tiers, driver),
    )


def _update(root: Root, precision: PrecisionPolicy, tiers: OffloadTiers, driver: UpdateDriver) -> UpdateOptions:
    return UpdateOptions(
        strategies=tiers.strategies,
        driver=driver,
        loss_scaler=create_loss_scaler(root, precision),
        clip_grad=root.gradient_clipping,
        max_skipped=root.max_consecutive_skipped_steps,
        skip_non_finite=precision.skip_non_finite,
    )


def place_buffers(setup: EngineSetup, precision: PrecisionPolicy, groups: Groups) -> None:
    """Casts the model's buffers, moves them to the device, and gives them rank 0's values. Every rank must call it."""
    precision.cast_buffers(setup.model, setup.device)
    spread_buffers(setup.model, groups)


def _reduction(root: Root, placement: Placement, precision: PrecisionPolicy) -> ReductionPolicy:
    return ReductionPolicy(
        every_micro_batch=placement.shard_gradients,
        to_owner=placement.shard_master,
        reduce_dtype=precision.reduce_dtype,
        accumulate_dtype=precision.accumulate_dtype,
        narrows=placement.narrow_masters,
        reduces_sums_narrow=precision.communication_dtype is not None,
        is_mean=root.gradient_allreduce_op != "sum",
        divides_first=root.prescale_gradients,
        predivide=root.gradient_predivide_factor,
        bucket_numel=max(root.zero_optimization.reduce_bucket_size, 1),
        overlap=root.zero_optimization.overlap_comm is not False,
        allow_unused=root.zero_optimization.ignore_unused_parameters,
        may_skip=precision.may_skip,
        codes_from=root.communication_compression.start_step if root.communication_compression.gradients else 0,
        is_trial=root.communication_compression.gradients == "auto",
        forget_every=steps_until_reset(root.zero_optimization),
    )
