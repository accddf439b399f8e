"""What the ranks agree on before anything is changed: who there is, the configuration, and what it asks for."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed import comm
from deepspeed.accelerator.cpu import keep_freed_memory
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.comm.start.device import local_device
from deepspeed.config import ParsedConfig, parse
from deepspeed.config.compared import compared_values
from deepspeed.config.sections.root import Root
from deepspeed.engine.arguments import device_rank
from deepspeed.engine.features import FeatureSet
from deepspeed.engine.parts import Client
from deepspeed.engine_feature import EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist, set_log_level_from_string


@dataclass(frozen=True)
class AgreedSetup:
    """What the ranks have agreed on.

    Attributes:
        parsed: The configuration.
        features: The features that it and the model ask for.
        setup: What these features look at.
    """

    parsed: ParsedConfig
    features: FeatureSet
    setup: EngineSetup


def start_ranks(distributed_port: int, dist_init_required: bool | None) -> None:
    """Starts a process group if there is none. Every rank must call it.

    Args:
        distributed_port: Port of rank 0.
        dist_init_required: False: a process group must exist already.

    Raises:
        DeepSpeedConfigError: It must, and does not.
    """
    if comm.is_initialized():
        return
    if dist_init_required is False:
        raise DeepSpeedConfigError(
            "initialize(dist_init_required=False): no process group exists; call deepspeed.init_distributed() "
            "first, or leave the argument out"
        )
    comm.init_distributed(distributed_port=distributed_port)


def agree(client: Client, config: Any) -> AgreedSetup:
    """Reads the configuration, lays the ranks out, and raises what cannot be done. Every rank must call it.

    Args:
        client: What the caller of ``initialize`` handed in.
        config: Dict, path or base64.

    Raises:
        DeepSpeedConfigError: The configuration is wrong, differs between ranks, or asks for what cannot be done.
    """
    features = FeatureSet()
    features.ask_objects(client.model, client.mpu, client.optimizer)
    features.ask_environment()
    job_mesh = JobMesh(client.mpu, client.mesh_param, client.model, comm.default_timeout())
    parsed = _parse_alike(features.read_config(config, client.mpu), job_mesh, client, features)
    root = parsed.root
    _refuse_beside_elastic(root)
    ranks = job_mesh.settle(root)
    features.ask_configuration(root, ranks.mesh, has_dtensors=job_mesh.has_dtensors)
    setup = EngineSetup(root, client.model, client.optimizer, ranks, _device(client.args), job_mesh.is_ours)
    if root.log_level:
        set_log_level_from_string(root.log_level)
    for notice in parsed.notices:
        log_dist(f"config: {notice}", level=logging.WARNING if notice in parsed.warnings else logging.INFO)
    features.refuse(setup)
    return AgreedSetup(parsed, features, setup)


def _refuse_beside_elastic(root: Root) -> None:
    """Raises where another engine of this process ends the job when a rank is lost, and this one would not follow.

    Raises:
        DeepSpeedConfigError: It is so.
    """
    members = Job.current().members
    goes_on = root.elasticity is not None and root.elasticity.continues
    if members is not None and members.is_in_use and not goes_on:
        raise DeepSpeedConfigError(
            "initialize: an engine with elasticity.continue is in use in this process, and the one that is made now is "
            "without it: after a loss its process groups would be gone. Call engine.destroy() on the first, or use the "
            "second model as a plain module"
        )


def _parse_alike(config: Any, job_mesh: JobMesh, client: Client, features: FeatureSet) -> ParsedConfig:
    """Reads the configuration, and raises on every rank if some rank has another one."""

    def complete(root: Root) -> Root:
        return features.complete(root, client.model, client.mpu)

    try:
        parsed = parse(config, dp_world_size=lambda root: job_mesh.data_size(complete(root)))
        parsed = replace(parsed, root=complete(parsed.root))
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
