"""``deepspeed.initialize`` and ``deepspeed.add_config_arguments``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from deepspeed.config.sections.root import Root
from deepspeed.data.batching.loading import get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed
from deepspeed.engine.build import Client, build_parts
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.generation import generates
from deepspeed.engine.hybrid import DeepSpeedHybridEngine
from deepspeed.engine.pipeline import DualPipeVEngine, PipelineEngine
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.pipe.dualpipev import DualPipeVModule
from deepspeed.parallel.pipe.module import PipelineModule
from deepspeed.zero.construction.modules import suspended
from deepspeed.zero.optimizer import DeepSpeedZeroOptimizer


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
        args: Command-line arguments; ``deepspeed_config`` and ``device_rank`` are read.
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
        parts = build_parts(client, _config_source(args, config, config_params), distributed_port, dist_init_required)
        engine = _engine_class(model, parts.parsed.root)(parts)
        if training_data is not None and batches_by_tokens(engine):
            loader, scheduler, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
                training_data, engine
            )
            engine.training_dataloader, engine.lr_scheduler = loader, scheduler
            if isinstance(engine, PipelineEngine):
                engine.set_dataloader(loader)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _engine_class(model: torch.nn.Module, root: Root) -> type[DeepSpeedEngine]:
    if isinstance(model, DualPipeVModule):
        return DualPipeVEngine
    if isinstance(model, PipelineModule):
        return PipelineEngine
    return DeepSpeedHybridEngine if generates(root) else DeepSpeedEngine


def batches_by_tokens(engine: DeepSpeedEngine) -> bool:
    """Whether ``data_efficiency.data_sampling.dynamic_batching`` makes the batches."""
    return engine.data_sampling_enabled() and engine.data_sampling_config().dynamic_batching.enabled


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    """The one configuration among those that can be given."""
    given = {
        "initialize(config=...)": config,
        "initialize(config_params=...)": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        raise DeepSpeedConfigError(
            "initialize: there is no configuration; pass config=<dict or path>, or start the script with "
            "--deepspeed_config FILE and hand its arguments over as args"
        )
    raise DeepSpeedConfigError(f"initialize: the configuration is given more than once ({', '.join(found)}); keep one")


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds ``--deepspeed`` and ``--deepspeed_config`` to a parser and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="Enable DeepSpeed (for the script's use)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed configuration file")
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
