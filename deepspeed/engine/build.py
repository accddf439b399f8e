"""Puts an engine together: configuration, process group, optimizer, precision, ZeRO runtime, schedule."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host_allocator import keep_freed_memory
from deepspeed.comm.connect import shared_transport
from deepspeed.comm.job_mesh import JobMesh
from deepspeed.comm.mpu import Standing
from deepspeed.comm.transport import Transport
from deepspeed.config import ParsedConfig, parse
from deepspeed.config.compared import compared_values
from deepspeed.config.sections.root import Root
from deepspeed.engine.alike import model_lines
from deepspeed.engine.compiling import gathers_between_pieces, refuse_whole_graphs
from deepspeed.engine.efficiency import refuse_what_the_model_cannot
from deepspeed.engine.generation import refuse_what_cannot_generate
from deepspeed.engine.groups import create_groups, refuse_cut_tensors
from deepspeed.engine.optimizers import (
    choose_optimizer,
    group_indices,
    model_parameter_groups,
    move_to_runs,
    needs_whole_tensors,
)
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist, set_log_level_from_string
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.offload.homes import OffloadHomes, open_homes, placement_of
from deepspeed.ops.flat import supports_flat_update, why_not_flat
from deepspeed.parallel.expert.prepare import prepare_expert_layers
from deepspeed.parallel.sequence.tiled_models import tile_model
from deepspeed.parallel.sequence.ulysses import adopt_model, with_all_data_ranks
from deepspeed.parallel.tensor.cutting import cut_model
from deepspeed.parallel.tensor.request import merged
from deepspeed.precision.policy import PrecisionPolicy, create_loss_scaler, dtype_of_name
from deepspeed.schedulers import build_scheduler
from deepspeed.zero.access.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.zero.build import build_runtime
from deepspeed.zero.group import Groups
from deepspeed.zero.layout import Limits
from deepspeed.zero.leaf import mark_leaf_modules
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3
from deepspeed.zero.placement import Home, Placement
from deepspeed.zero.reduction_policy import ReductionPolicy
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.runtime_options import RuntimeOptions
from deepspeed.zero.schedule import GatherLimits
from deepspeed.zero.storage import distinct
from deepspeed.zero.update import state_itemsizes


@dataclass(frozen=True)
class Client:
    """What the caller of ``initialize`` handed in."""

    args: Any
    model: nn.Module
    optimizer: Any
    model_parameters: Any
    training_data: Any
    lr_scheduler: Any
    mpu: Any
    mesh_param: Any
    collate_fn: Any


@dataclass
class EngineParts:
    """Everything an engine drives, ready to be driven."""

    client: Client
    model: nn.Module
    parsed: ParsedConfig
    precision: PrecisionPolicy
    placement: Placement
    homes: OffloadHomes
    monitor: MonitorMaster
    runtime: ZeroRuntime
    torch_optimizer: torch.optim.Optimizer | None
    device: torch.device
    groups: Groups
    standing: Standing
    local_rank: int
    global_rank: int
    world_size: int

    def make_optimizer(
        self, backward: Callable[..., Any], before_update: Callable[[], None]
    ) -> DeepSpeedZeroOptimizer | None:
        """The ZeRO optimizer, or None without a torch optimizer."""
        if self.torch_optimizer is None:
            return None
        root = self.parsed.root
        kind = DeepSpeedZeroOptimizer_Stage3 if self.placement.shard_params else DeepSpeedZeroOptimizer
        assert self.runtime.reducer is not None
        return kind(
            self.torch_optimizer,
            self.runtime.masters,
            self.runtime.reducer,
            placement=self.placement,
            groups=self.groups,
            agreement=self.runtime.agreement,
            ledger=self.runtime.ledger,
            loss_scaler=create_loss_scaler(root, self.precision),
            clip_grad=root.gradient_clipping,
            max_skipped=root.max_consecutive_skipped_steps,
            skip_non_finite=self.precision.skip_non_finite,
            leave_backward=self.runtime.leave_backward,
            before_update=before_update,
            backward=backward,
            strategies=self.homes.strategies,
        )

    def public_optimizer(self, updater: DeepSpeedZeroOptimizer | None) -> Any:
        """What ``initialize`` returns as the optimizer; at stage 3 it leads to the machinery of sharded parameters."""
        if not self.placement.shard_params:
            return updater
        offload = DeepSpeedZeRoOffload.of(self.runtime)
        if updater is None:
            return offload
        updater.parameter_offload = offload
        return updater

    def make_scheduler(self) -> Any:
        """The schedule: the client's object, what its callable builds on the torch optimizer, the configured one."""
        given = self.client.lr_scheduler
        if given is not None:
            is_object = hasattr(given, "step") and not isinstance(given, type)
            return given if is_object or self.torch_optimizer is None else given(self.torch_optimizer)
        section = self.parsed.root.scheduler
        if section is None or section.type is None or self.torch_optimizer is None:
            return None
        return build_scheduler(section.type, dict(section.params), self.torch_optimizer)


def build_parts(client: Client, config: Any, distributed_port: int, dist_init_required: bool | None) -> EngineParts:
    """Builds everything below the engine. Every rank must call it.

    Args:
        client: What the caller handed in.
        config: Dict, path or base64.
        distributed_port: Port of rank 0 if a process group must be started.
        dist_init_required: False: a process group must exist already.
    """
    if not isinstance(client.model, nn.Module):
        raise DeepSpeedConfigError(
            f"initialize(model=...): expected a torch.nn.Module, found {type(client.model).__name__}"
        )
    lazy = [name for name, parameter in client.model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise DeepSpeedConfigError(
            f"initialize(model=...): {', '.join(repr(name) for name in lazy[:5])} have no shape yet, as their modules "
            "are lazy; run one batch through the model before initialize"
        )
    if not comm.is_initialized():
        if dist_init_required is False:
            raise DeepSpeedConfigError(
                "initialize(dist_init_required=False): no process group exists; call deepspeed.init_distributed() "
                "first, or leave the argument out"
            )
        comm.init_distributed(distributed_port=distributed_port)
    job_mesh = JobMesh(client.mpu, client.mesh_param, client.model, comm.default_timeout())
    parsed = _parse_alike(with_all_data_ranks(config, client.mpu), job_mesh, client)
    root = parsed.root
    ranks = job_mesh.settle(root)
    if callable(take_config := getattr(client.model, "take_pipeline_config", None)):
        take_config(root.pipeline)
    if root.log_level:
        set_log_level_from_string(root.log_level)
    for notice in parsed.notices:
        log_dist(f"config: {notice}")
    refuse_what_the_model_cannot(root, client.model)
    refuse_what_cannot_generate(root, client.model)
    monitor = MonitorMaster(root)
    if root.comms_logger.enabled:
        comm.configure(deepspeed_config=parsed)

    local_rank = _local_rank(client.args)
    device = _device(local_rank)
    placement = placement_of(root.zero_optimization, ranks.zero_size)
    precision = PrecisionPolicy.from_config(root, get_accelerator(), client.model)
    _check_device_supports(precision)
    if ranks.sequence_size > 1 and precision.compute_dtype is not None and precision.communication_dtype is None:
        precision = replace(precision, communication_dtype=dtype_of_name(root.seq_parallel_communication_data_type))
    if gathers_between_pieces(placement, ranks.zero_size):
        refuse_whole_graphs(client.model)
    client = _spread_experts(root, client, ranks, device)
    tile_model(
        client.model,
        mlp=root.sequence_parallel.tiled_mlp,
        loss=root.sequence_parallel.tiled_loss,
        tokens=root.sequence_parallel.tile_tokens,
    )
    if ranks.sequence_size > 1 and job_mesh.is_ours:
        adopt_model(client.model, ranks.sequence_group, ranks.mesh, root.sequence_parallel.mode)
    prepare_expert_layers(client.model, device, data_first=root.use_data_before_expert_parallelism)
    tensor = cut_model(client.model, root.tensor_parallel, ranks.mesh, device)
    if callable(settle := getattr(client.model, "settle", None)):
        settle(device)
    torch_optimizer = choose_optimizer(
        root,
        client.model,
        client.optimizer,
        client.model_parameters,
        on_host=placement.master_home is not Home.DEVICE,
    )
    param_groups = group_indices(torch_optimizer)
    comm.check_same_model(model_lines(client.model, precision, torch_optimizer, param_groups), ranks.zero_group)
    _check_trains(placement, torch_optimizer)
    _check_updates_in_files(placement, torch_optimizer)
    groups = create_groups(
        placement,
        ranks,
        device,
        by_nodes=_gathers_by_nodes(root),
        divisor=_gradient_divisor(root, ranks),
        copies={} if tensor is None else tensor.counts,
    )
    placement = replace(placement, feeds_back=any(group.feeds_back for group in groups))
    refuse_cut_tensors(torch_optimizer, client.model, groups, placement)
    _mark_leaf_modules(root, client.model)
    _make_sparse(root, client.model)
    homes = open_homes(root, placement, device, rank=comm.get_rank(), state_itemsizes=state_itemsizes(torch_optimizer))
    runtime = build_runtime(
        client.model,
        _options(root, placement, precision, device, torch_optimizer, homes),
        groups,
        param_groups,
    )
    precision.cast_buffers(client.model, device)
    _spread_buffers(client.model, groups.peers)
    if torch_optimizer is not None:
        move_to_runs(torch_optimizer, runtime.masters, lambda parameter: torch_optimizer.state.pop(parameter, None))
    return EngineParts(
        client=client,
        model=client.model,
        parsed=parsed,
        precision=precision,
        placement=placement,
        homes=homes,
        monitor=monitor,
        runtime=runtime,
        torch_optimizer=torch_optimizer,
        device=device,
        groups=groups,
        standing=ranks,
        local_rank=local_rank,
        global_rank=comm.get_rank(),
        world_size=comm.get_world_size(),
    )


def _gradient_divisor(root: Root, ranks: Standing) -> int:
    """What makes a mean over samples of the sum of gradients over data and sequence ranks."""
    if ranks.sequence_size == 1 or root.sequence_parallel.loss == "own_share":
        return ranks.data_size
    if root.gradient_allreduce_op == "sum":
        raise DeepSpeedConfigError(
            f'gradient_allreduce_op "sum" with {ranks.sequence_size} ranks that share a sequence: each of them has the '
            'gradient of the whole loss, so that their sum is too large; set it to "mean", or sequence_parallel.loss '
            'to "own_share" if each rank back-propagates its share'
        )
    return ranks.data_size * ranks.sequence_size


def _parse_alike(config: Any, job_mesh: JobMesh, client: Client) -> ParsedConfig:
    """Reads the configuration, and sees to it that all ranks have the same one."""
    try:
        parsed = parse(config, dp_world_size=lambda root: job_mesh.data_size(merged(root, client.model, client.mpu)))
        parsed = replace(parsed, root=merged(parsed.root, client.model, client.mpu))
    except DeepSpeedConfigError as error:
        comm.check_same_config(error, job_mesh.decides_together)  # raises it here, and a word about it on the others
        raise
    comm.check_same_config(compared_values(parsed.root), job_mesh.decides_together)
    return parsed


def _spread_experts(root: Root, client: Client, ranks: Standing, device: torch.device) -> Client:
    """Spreads the experts of a model that knows nothing of it, if that is asked for."""
    section = root.expert_parallel
    if section is None or not section.enabled:
        return client
    from deepspeed.parallel.expert.auto import exchange_parameters, spread_experts

    peers = shared_transport(ranks.zero_group, device=device, timeout=comm.default_timeout())
    data_first = root.use_data_before_expert_parallelism
    exchanged = spread_experts(client.model, section, peers, device, data_first=data_first)
    return replace(
        client,
        optimizer=exchange_parameters(client.optimizer, exchanged),
        model_parameters=exchange_parameters(client.model_parameters, exchanged),
    )


def _make_sparse(root: Root, model: nn.Module) -> None:
    """Gives a Transformers model the attention of the ``sparse_attention`` section, if that is asked for."""
    section = root.sparse_attention
    if section is None or section.apply_to != "model":
        return
    from deepspeed.ops.sparse_attention import build, transformers_models

    heads = transformers_models.heads_of(model)
    transformers_models.use_sparse_attention(model, build.pattern_of(section, heads))
    log_dist(f"sparse_attention: every attention layer of {type(model).__name__} follows the pattern {section.mode}")


def _mark_leaf_modules(root: Root, model: nn.Module) -> None:
    section = root.zero_optimization.leaf_module
    missing = mark_leaf_modules(model, classes=section.classes, names=section.names, suffixes=section.name_suffixes)
    if missing:
        raise DeepSpeedConfigError(
            f"zero_optimization.leaf_module: no module fits {', '.join(missing)}; names and name_suffixes are compared "
            "with those that model.named_modules() gives"
        )


def _gathers_by_nodes(root: Root) -> bool:
    zero = root.zero_optimization
    return zero.stage == 3 and zero.mics_hierarchical_params_gather and zero.mics_shard_size > 1


@torch.no_grad()
def _spread_buffers(model: nn.Module, transport: Transport) -> None:
    """Gives all ranks the buffers of rank 0, as bytes: backends know neither all dtypes nor strides."""
    for buffer in model.buffers():
        values = distinct(buffer)
        dense = values.contiguous()
        transport.broadcast(dense.view(-1).view(torch.uint8), 0, label="the buffers of rank 0")
        if dense is not values:
            values.copy_(dense)


def _options(
    root: Root,
    placement: Placement,
    precision: PrecisionPolicy,
    device: torch.device,
    optimizer: torch.optim.Optimizer | None,
    homes: OffloadHomes,
) -> RuntimeOptions:
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
            max_live=zero.stage3_max_live_parameters,
            max_reuse_distance=zero.stage3_max_reuse_distance,
        ),
        reduction=None if optimizer is None else _reduction(root, placement, precision),
        granularity=max(zero.stage3_prefetch_bucket_size, zero.stage3_module_granularity_threshold),
        compute_dtype=precision.dtype_for,
        whole_tensors=optimizer is not None and needs_whole_tensors(optimizer, placement, root),
        device=device,
        param_memories=homes.param_memories,
        master_memories=homes.master_memories,
        landing=homes.landing,
        state_itemsizes=state_itemsizes(optimizer),
    )


def _reduction(root: Root, placement: Placement, precision: PrecisionPolicy) -> ReductionPolicy:
    return ReductionPolicy(
        every_micro_batch=placement.shard_gradients,
        to_owner=placement.shard_master,
        reduce_dtype=precision.reduce_dtype,
        accumulate_dtype=precision.accumulate_dtype,
        sums_travel_as_gradients=precision.communication_dtype is not None,
        is_mean=root.gradient_allreduce_op != "sum",
        divides_first=root.prescale_gradients,
        predivide=root.gradient_predivide_factor,
        bucket_numel=max(root.zero_optimization.reduce_bucket_size, 1),
        overlap=root.zero_optimization.overlap_comm is not False,
        allow_unused=root.zero_optimization.ignore_unused_parameters,
    )


def _local_rank(args: Any) -> int:
    given = getattr(args, "device_rank", None)
    return int(given) if given is not None else int(os.environ.get("LOCAL_RANK", "0"))


def _device(local_rank: int) -> torch.device:
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        keep_freed_memory()
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def _check_device_supports(precision: PrecisionPolicy) -> None:
    accelerator = get_accelerator()
    for dtype, key, supported in (
        (torch.float16, "fp16.enabled", accelerator.is_fp16_supported),
        (torch.bfloat16, "bf16.enabled", accelerator.is_bf16_supported),
    ):
        if precision.compute_dtype is dtype and not supported():
            raise DeepSpeedConfigError(
                f"{key}: the device {accelerator.device_name()} does not support {dtype}; set {key} to false"
            )


def _check_updates_in_files(placement: Placement, optimizer: torch.optim.Optimizer | None) -> None:
    if placement.master_home is Home.FILE and optimizer is not None and not supports_flat_update(optimizer):
        raise DeepSpeedConfigError(
            f'zero_optimization.offload_optimizer.device "nvme" with the optimizer {type(optimizer).__name__}: files '
            f"pass through memory piece by piece, which its step cannot follow ({why_not_flat(optimizer)}). Use one of "
            'this package, or torch\'s Adam, AdamW, Adagrad or SGD without that, or device "cpu"'
        )


def _check_trains(placement: Placement, optimizer: torch.optim.Optimizer | None) -> None:
    if optimizer is None and placement.shard_master and not placement.shard_params:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage {placement.stage} shards optimizer states, but there is no optimizer; give "
            "initialize an optimizer or an `optimizer` section, or use stage 0, or stage 3 to shard the parameters"
        )


__all__ = ["Client", "EngineParts", "build_parts", "model_parameter_groups"]
