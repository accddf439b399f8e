"""``deepspeed.initialize``: what happens to a model until its engine stands, from the top."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.host_allocator import keep_freed_memory
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.comm.start.device import local_device
from deepspeed.comm.start.environment import ranks_per_node
from deepspeed.config import ParsedConfig, parse
from deepspeed.config.compared import compared_values
from deepspeed.config.sections.root import Root
from deepspeed.engine.alike import model_lines
from deepspeed.engine.arguments import config_source, device_rank, local_rank_of
from deepspeed.engine.combinations import refuse_combinations
from deepspeed.engine.communication_compression import with_codecs
from deepspeed.engine.compiling import gathers_between_pieces, refuse_whole_graphs
from deepspeed.engine.efficiency import refuse_what_the_model_cannot
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.generation import generates, refuse_what_cannot_generate
from deepspeed.engine.groups import create_groups, refuse_cut_tensors
from deepspeed.engine.islands import settle_islands
from deepspeed.engine.model_compression import refuse_what_is_not_compressed
from deepspeed.engine.optimizers import choose_optimizer, group_indices, move_to_runs
from deepspeed.engine.parts import Client, EngineParts
from deepspeed.engine.refusals import (
    refuse_shards_of_nothing,
    refuse_state_before_cutting,
    refuse_updates_in_files,
    refuse_what_is_no_model,
    refuse_what_the_device_cannot,
    warn_of_emulation,
)
from deepspeed.engine.reshaping import (
    is_cut,
    make_sparse,
    mark_leaves,
    reshape_model,
    spread_buffers,
    spreads_experts,
)
from deepspeed.engine.rooms import SEQUENCE, TENSOR, is_loaded, is_pipeline
from deepspeed.engine.runtime_options import gathers_by_nodes, gradient_divisor, runtime_options
from deepspeed.engine.zero_plus_plus import use_zero_plus_plus
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist, set_log_level_from_string
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.offload.homes import open_homes, placement_of
from deepspeed.precision.policy import PrecisionPolicy, dtype_of_name
from deepspeed.zero.build import build_runtime
from deepspeed.zero.construction.modules import suspended
from deepspeed.zero.placement import Home
from deepspeed.zero.tiling.describe import OFFLOADED
from deepspeed.zero.update.drivers import driver_of
from deepspeed.zero.update.loop import state_itemsizes
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., Any] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, DeepSpeedZeroOptimizer | None, Any, Any]:
    """Wraps a model for training. Every rank must call it with the same model and configuration.

    The model's parameters take rank 0's values and move into flat buffers; the model itself is changed in place.

    Args:
        args: Command-line arguments; ``deepspeed_config`` and ``device_rank`` (the number of the device) are read.
        model: The model.
        optimizer: A torch optimizer on the model's parameters, a callable that builds one from them, or None for the
            configuration's.
        model_parameters: Parameters or group dicts to train; None means all that require gradients.
        training_data: Data set; the third member of the result is a loader over this rank's share.
        lr_scheduler: A scheduler, a callable that builds one on the torch optimizer, or None for the configuration's.
        distributed_port: Port of rank 0 where a process group must be started.
        mpu: Model-parallel unit with ``get_data_parallel_group()`` and the like.
        dist_init_required: False: a process group must exist already.
        collate_fn: For the loader.
        config: Dict, path of an Hjson file, or URL-safe base64 of JSON.
        mesh_param: How the ranks are laid out: the sizes ``(data, sequence)``, or a torch ``DeviceMesh`` whose
            dimensions have names.
        config_params: Old name of ``config``.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``; members that do not exist are None.

    Raises:
        DeepSpeedConfigError: Something given cannot be used; nothing was changed.
    """
    if model is None:
        raise DeepSpeedConfigError("initialize: model is missing; pass the torch.nn.Module to train as model=...")
    client = Client(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        mesh_param=mesh_param,
        collate_fn=collate_fn,
    )
    with suspended():  # an enclosing zero.Init
        parts = _build_parts(client, config_source(args, config, config_params), distributed_port, dist_init_required)
        engine = _engine_class(model, parts.parsed.root)(parts)
        if training_data is not None and batches_by_tokens(engine):
            _batch_by_tokens(engine, training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _build_parts(client: Client, config: Any, distributed_port: int, dist_init_required: bool | None) -> EngineParts:
    """Builds everything below the engine. Every rank must call it.

    Args:
        client: What the caller handed in.
        config: Dict, path or base64.
        distributed_port: Port of rank 0 if a process group must be started.
        dist_init_required: False: a process group must exist already.
    """
    refuse_what_is_no_model(client.model)
    if not comm.is_initialized():
        if dist_init_required is False:
            raise DeepSpeedConfigError(
                "initialize(dist_init_required=False): no process group exists; call deepspeed.init_distributed() "
                "first, or leave the argument out"
            )
        comm.init_distributed(distributed_port=distributed_port)
    job_mesh = JobMesh(client.mpu, client.mesh_param, client.model, comm.default_timeout())
    parsed = _parse_alike(_with_all_data_ranks(config, client.mpu), job_mesh, client)
    root = parsed.root
    if not is_cut(client.model):
        size = max(root.tensor_parallel.autotp_size, job_mesh.cut_over)
        refuse_state_before_cutting(client.optimizer, size, "tensor_parallel.autotp_size")
    refuse_state_before_cutting(client.optimizer, spreads_experts(root, client.model), "expert_parallel.autoep_size")
    ranks = job_mesh.settle(root)
    refuse_combinations(root, ranks)
    if callable(take_config := getattr(client.model, "take_pipeline_config", None)):
        take_config(root.pipeline)
    elif root.pipeline.model_fields_set:
        log_dist(
            f"pipeline ({', '.join(sorted(root.pipeline.model_fields_set))}) has no effect: expected a "
            f"deepspeed.pipe.PipelineModule, found {type(client.model).__name__}. Build one from its layers "
            "(PipelineModule.from_transformers for a Transformers model), or leave the section out",
            level=logging.WARNING,
        )
    if root.log_level:
        set_log_level_from_string(root.log_level)
    for notice in parsed.notices:
        log_dist(f"config: {notice}", level=logging.WARNING if notice in parsed.warnings else logging.INFO)
    refuse_what_the_model_cannot(root, client.model)
    refuse_what_cannot_generate(root, client.model)
    refuse_what_is_not_compressed(root, client.model)
    monitor = MonitorMaster(root)
    if root.comms_logger.enabled:
        comm.configure(deepspeed_config=parsed)

    local_rank = local_rank_of(client.args)
    device = _device(client.args)
    islands = settle_islands(root, ranks, client.model, device)
    data = {"data_group": ranks.data_group, "data_size": ranks.data_size, "data_rank": ranks.data_rank}
    ranks = ranks if islands is None else islands.inside
    placement = placement_of(root.zero_optimization, ranks.zero_size)
    precision = PrecisionPolicy.from_config(root, get_accelerator(), client.model)
    refuse_what_the_device_cannot(precision)
    warn_of_emulation(precision)
    if ranks.sequence_size > 1 and precision.compute_dtype is not None and precision.communication_dtype is None:
        precision = replace(precision, communication_dtype=dtype_of_name(root.seq_parallel_communication_data_type))
    if gathers_between_pieces(placement, ranks.zero_size):
        refuse_whole_graphs(client.model)
    client, copies = reshape_model(root, client, ranks, device, mesh_is_ours=job_mesh.is_ours)
    torch_optimizer = choose_optimizer(
        root,
        client.model,
        client.optimizer,
        client.model_parameters,
        on_host=placement.master_home is not Home.DEVICE,
    )
    param_groups = group_indices(torch_optimizer)
    comm.check_same_model(model_lines(client.model, precision, torch_optimizer, param_groups), ranks.zero_group)
    refuse_shards_of_nothing(placement, torch_optimizer)
    refuse_updates_in_files(placement, torch_optimizer)
    driver = driver_of(torch_optimizer) if islands is None else islands.driver_around(driver_of(torch_optimizer))
    driver.refuse(root, placement)
    groups = create_groups(
        placement,
        ranks,
        device,
        by_nodes=gathers_by_nodes(root),
        divisor=gradient_divisor(root, ranks),
        copies=copies,
    )
    groups = with_codecs(groups, root, precision, device, has_warm_up=driver.has_warm_up)
    groups = use_zero_plus_plus(groups, root.zero_optimization)
    placement = replace(placement, base_home=Home.HOST if OFFLOADED in copies else Home.DEVICE)
    refuse_cut_tensors(torch_optimizer, client.model, groups, placement)
    mark_leaves(root, client.model)
    make_sparse(root, client.model)
    homes = open_homes(
        root,
        placement,
        device,
        rank=comm.get_rank(),
        ranks_here=ranks_per_node(os.environ, comm.get_world_size(), get_accelerator().device_count()),
        state_itemsizes=state_itemsizes(torch_optimizer),
        is_trained=torch_optimizer is not None,
    )
    runtime = build_runtime(
        client.model,
        runtime_options(root, placement, precision, device, torch_optimizer, homes),
        groups,
        param_groups,
    )
    precision.cast_buffers(client.model, device)
    spread_buffers(client.model, groups.peers)
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
        driver=driver,
        device=device,
        groups=groups,
        claim=Job.current().declared.claim(),
        standing=replace(ranks, **data),  # samples are dealt out over all islands
        islands=islands,
        local_rank=local_rank,
        global_rank=comm.get_rank(),
        world_size=comm.get_world_size(),
    )


def _parse_alike(config: Any, job_mesh: JobMesh, client: Client) -> ParsedConfig:
    """Reads the configuration, and sees to it that all ranks have the same one."""
    try:
        parsed = parse(config, dp_world_size=lambda root: job_mesh.data_size(_merged(root, client)))
        parsed = replace(parsed, root=_merged(parsed.root, client))
    except DeepSpeedConfigError as error:
        comm.check_same_config(error, job_mesh.decides_together)  # raises it here, and a word about it on the others
        raise
    comm.check_same_config(compared_values(parsed.root), job_mesh.decides_together)
    return parsed


def _device(args: Any) -> torch.device:
    device = local_device(device_rank(args))
    if device.type == "cpu":
        keep_freed_memory()
    return device


def _with_all_data_ranks(config: Any, mpu: Any) -> Any:
    """The configuration as it is meant where the mpu is that of ``deepspeed.sequence``."""
    if mpu is None or not is_loaded(SEQUENCE):
        return config
    from deepspeed.parallel.sequence.ulysses import with_all_data_ranks

    return with_all_data_ranks(config, mpu)


def _merged(root: Root, client: Client) -> Root:
    """The configuration together with what ``tp_model_init`` was told about the model."""
    if not is_loaded(TENSOR):
        return root
    from deepspeed.parallel.tensor.request import merged

    return merged(root, client.model, client.mpu)


def _engine_class(model: torch.nn.Module, root: Root) -> type[DeepSpeedEngine]:
    if is_pipeline(model):
        from deepspeed.engine.pipeline import PipelineEngine

        return cast("type[DeepSpeedEngine]", PipelineEngine)  # registered there as one of its subclasses
    if generates(root):
        from deepspeed.engine.hybrid import DeepSpeedHybridEngine

        return DeepSpeedHybridEngine
    return DeepSpeedEngine


def _batch_by_tokens(engine: DeepSpeedEngine, training_data: Any) -> None:
    """Gives the engine the loader of batches of about as many tokens each, and the rates that go with their sizes."""
    from deepspeed.data.batching.loading import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
    from deepspeed.engine.pipeline import PipelineEngine

    loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(training_data, engine)
    engine.training_dataloader, engine.lr_scheduler = loader, scheduler
    if isinstance(engine, PipelineEngine):
        engine.set_dataloader(loader)


def batches_by_tokens(engine: DeepSpeedEngine) -> bool:
    """Whether ``data_efficiency.data_sampling.dynamic_batching`` makes the batches."""
    return engine.data_sampling_enabled() and engine.data_sampling_config().dynamic_batching.enabled
