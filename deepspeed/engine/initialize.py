"""``deepspeed.initialize``: the steps from a model to its engine, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from deepspeed import comm
from deepspeed.engine.agreeing import AgreedSetup, agree, check_model_alike, choose_algorithms, start_ranks
from deepspeed.engine.arguments import checked_model, config_source, inner_optimizer
from deepspeed.engine.communication_compression import compressed, tables_of_rows
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.optimizers import check_optimizer, choose_optimizer, refuse_cut_tensors
from deepspeed.engine.parts import Client, EngineParts
from deepspeed.engine.zero_optimizer import DeepSpeedZeroOptimizer
from deepspeed.engine.zero_settings import (
    gathers_by_nodes,
    gradient_divisor,
    place_buffers,
    place_frozen,
    placement_for,
    precision_for,
    runtime_options,
    tiers_for,
)
from deepspeed.engine_feature import EngineSetup
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.construction.modules import suspended
from deepspeed.zero.group import Groups, create_groups
from deepspeed.zero.placement import Placement
from deepspeed.zero.runtime import build_runtime
from deepspeed.zero.update.driver import driver_of

_MOST_ROUNDING = 64
"""Ranks up to which NCCL's sums of 16-bit gradients, which round at every rank, are used by default."""


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
        optimizer: A torch optimizer, a callable that builds one from the parameters, or None for the configuration's.
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
    if isinstance(model_parameters, Iterator):  # can be read only once, and an engine may be built again
        model_parameters = list(model_parameters)
    given = (inner_optimizer(optimizer), model_parameters, training_data, lr_scheduler, mpu, mesh_param, collate_fn)
    client = Client(args, checked_model(model), *given)
    with suspended():  # an enclosing zero.Init
        parts = build_parts(client, config_source(args, config, config_params), distributed_port, dist_init_required)
        engine = parts.features.engine_class(parts.setup, DeepSpeedEngine)(parts)
        parts.features.finish(engine, training_data)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def build_parts(
    client: Client, config: Any, distributed_port: int = 29500, dist_init_required: bool | None = None
) -> EngineParts:
    """Builds everything below the engine. Every rank must call it."""
    choose_algorithms(config, is_started=comm.is_initialized())
    job = start_ranks(distributed_port, dist_init_required)
    agreed = agree(job, client, config)
    root, features, setup, model = agreed.parsed.root, agreed.features, agreed.setup, client.model
    monitor = _open_logs(agreed)
    training_group = features.divide(setup)
    setup = replace(setup, ranks=training_group.inside)
    precision, placement = precision_for(setup), placement_for(setup)
    exchanged, own_groups = features.reshape(setup)
    client = client.with_parameters(exchanged)
    optimizer = choose_optimizer(root, model, client.optimizer, client.model_parameters, placement)
    features.refuse_optimizer(setup, optimizer)
    check_model_alike(model, precision, optimizer, setup.ranks.zero_group)
    check_optimizer(setup, placement, optimizer)
    driver = training_group.driver_around(driver_of(optimizer))
    own_groups = {**own_groups, **tables_of_rows(setup, has_warm_up=driver.has_warm_up)}
    placement = place_frozen(placement, own_groups)
    groups = _make_groups(setup, placement, precision, own_groups, has_warm_up=driver.has_warm_up)
    refuse_cut_tensors(optimizer, model, groups, placement)
    tiers = tiers_for(setup, placement, optimizer, groups)
    options = runtime_options(setup, placement, precision, optimizer, tiers, driver)
    runtime = build_runtime(model, options, groups, optimizer)
    place_buffers(setup, precision, groups)
    return EngineParts(
        client=client,
        parsed=agreed.parsed,
        features=features,
        setup=setup,
        precision=precision,
        placement=placement,
        tiers=tiers,
        monitor=monitor,
        runtime=runtime,
        torch_optimizer=optimizer,
        driver=driver,
        groups=groups,
        training_group=training_group,
        claim=job.declared.claim(),
    )


def _open_logs(agreed: AgreedSetup) -> MonitorMaster:
    """Opens what the run writes to. Every rank must call it.

    Raises:
        DeepSpeedConfigError: The package of a monitor is not installed. So it is called before the model is changed.
    """
    if agreed.parsed.root.comms_logger.enabled:
        comm.configure(deepspeed_config=agreed.parsed)
    return MonitorMaster(agreed.parsed.root)


def _make_groups(
    setup: EngineSetup,
    placement: Placement,
    precision: PrecisionPolicy,
    own_groups: Mapping[str, bool],
    *,
    has_warm_up: bool,
) -> Groups:
    """Makes the groups of ranks over which the model's states are sharded. Every rank of the job must call it."""
    groups = create_groups(
        setup.job,
        placement,
        setup.ranks,
        setup.device,
        by_nodes=gathers_by_nodes(setup.root),
        divisor=gradient_divisor(setup.root, setup.ranks),
        copies=own_groups,
    )
    exact = setup.root.zero_optimization.exact_sums
    for group in groups:
        group.reduce.sums_exactly = group.reduce.size > _MOST_ROUNDING if exact == "auto" else exact
    return compressed(groups, setup, precision, has_warm_up=has_warm_up)
