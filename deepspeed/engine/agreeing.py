"""The agreement of the ranks before anything is changed: the mesh, the configuration, and the requested features."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu import keep_freed_memory
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.job_mesh import JobMesh
from deepspeed.config import ParsedConfig, parse
from deepspeed.config.parsing import parse_section
from deepspeed.config.section import Section, facts_of
from deepspeed.config.sections.root import Root
from deepspeed.engine.arguments import device_rank
from deepspeed.engine.features import FeatureSet
from deepspeed.engine.from_accelerate import take_accelerate_sizes
from deepspeed.engine.parts import Client
from deepspeed.engine_feature import EngineSetup
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist, set_log_level_from_string
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.release import info_line
from deepspeed.zero.address import full_shape
from deepspeed.zero.update.masters import group_indices

VARIABLES = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment variables that fix the order of sums of NCCL and cuBLAS, which read them once."""


@dataclass(frozen=True)
class AgreedSetup:
    """Holds the configuration and the features on which the ranks have agreed."""

    parsed: ParsedConfig  # the configuration
    features: FeatureSet  # the features that it and the model request
    setup: EngineSetup  # what these features look at


def start_ranks(distributed_port: int, dist_init_required: bool | None) -> Job:
    """Returns the job of the process group, which is started if there is none. Every rank must call it.

    Raises:
        DeepSpeedConfigError: ``dist_init_required`` is False, and no process group exists.
    """
    if not comm.is_initialized():
        if dist_init_required is False:
            raise DeepSpeedConfigError(
                "initialize(dist_init_required=False): no process group exists; call deepspeed.init_distributed() "
                "first, or leave the argument out"
            )
        comm.init_distributed(distributed_port=distributed_port)
    log_dist(info_line())
    return Job.adopt()


def choose_algorithms(config: Any, *, is_started: bool) -> None:
    """Sets those of :data:`VARIABLES` that are not set, if the configuration asks for a deterministic run.

    Warns of them instead where ``is_started``: the process group exists, so they may have been read.
    """
    try:
        if not parse_section(config, "deterministic"):
            return
    except DeepSpeedConfigError:
        return  # reading the whole configuration raises for the same reason, on all ranks
    missing = [name for name in VARIABLES if name not in os.environ]
    if not is_started:
        os.environ.update({name: VARIABLES[name] for name in missing})
    elif missing:
        log_dist(
            f"deterministic: expected {', '.join(missing)} in the environment before the process group existed, found "
            "them not set; without them sums of NCCL and cuBLAS may differ from run to run. Start with "
            f"{' '.join(f'{name}={VARIABLES[name]}' for name in missing)}, or let initialize start the group",
            # They have an effect on NVIDIA's devices alone.
            level=logging.WARNING if get_accelerator().communication_backend_name() == "nccl" else logging.INFO,
        )


def agree(job: Job, client: Client, config: Any) -> AgreedSetup:
    """Reads the configuration, lays out the ranks, and checks what is requested. Every rank must call it.

    Raises:
        DeepSpeedConfigError: The configuration is wrong, differs between ranks, or requests what cannot be done.
    """
    features = FeatureSet()
    features.add_for_objects(client.model, client.mpu, client.optimizer)
    features.add_for_environment()
    job_mesh = JobMesh(client.mpu, client.mesh_param, client.model, comm.default_timeout())
    take_accelerate_sizes(config, is_cut=job_mesh.has_dtensors)
    parsed = _parse_alike(features.read_config(config, client.mpu), job_mesh, client, features)
    root = parsed.root
    _refuse_beside_elastic(root, job)
    ranks = job_mesh.settle(root)
    features.add_for_configuration(root, ranks.mesh, has_dtensors=job_mesh.has_dtensors)
    setup = EngineSetup(job, root, client.model, client.optimizer, ranks, _device(client.args), job_mesh.is_ours)
    if root.log_level:
        set_log_level_from_string(root.log_level)
    for notice in parsed.notices:
        log_dist(f"config: {notice}", level=logging.WARNING if notice in parsed.warnings else logging.INFO)
    features.refuse(setup)
    return AgreedSetup(parsed, features, setup)


def _refuse_beside_elastic(root: Root, job: Job) -> None:
    """Refuses an engine without elasticity.continue beside one with it, which ends the job when a rank is lost.

    Raises:
        DeepSpeedConfigError: This process has such an engine.
    """
    members = job.members
    continues = root.elasticity is not None and root.elasticity.continues
    if members is not None and members.is_in_use and not continues:
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
        comm.check_same_config(error, job_mesh.decides_together)  # raises on every rank
        raise
    comm.check_same_config(compared_values(parsed.root), job_mesh.decides_together)
    return parsed


def _device(args: Any) -> torch.device:
    device = local_device(device_rank(args))
    if device.type == "cpu":
        keep_freed_memory()
    return device


def compared_values(root: Root) -> dict[str, Any]:
    """Returns the values by dotted key, without those in which ranks may differ: ``per_rank``, or without effect."""
    flat: dict[str, Any] = {}
    _flatten("", root, flat)
    return flat


def _flatten(path: str, value: Any, flat: dict[str, Any]) -> None:
    if isinstance(value, Section):
        fields = type(value).model_fields
        facts = {name: facts_of(field) for name, field in fields.items()}
        value = {
            name: getattr(value, name) for name in fields if not facts[name].per_rank and facts[name].no_effect is None
        }
    elif isinstance(value, list) and value and isinstance(value[0], Section):
        value = dict(enumerate(value))
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            _flatten(f"{path}.{name}" if path else str(name), inner, flat)
    else:
        flat[path] = value


def check_model_alike(
    model: nn.Module, precision: PrecisionPolicy, optimizer: torch.optim.Optimizer | None, group: Any
) -> None:
    """Raises on all ranks of ``group`` if one of them has another model or other param groups. Every rank must call it.

    Args:
        model: The model; sharded parameters count with their full shapes.
    """
    comm.check_same_model(_model_lines(model, precision, optimizer, group_indices(optimizer)), group)


def _model_lines(
    model: nn.Module,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    group_indices: Mapping[int, int],
) -> list[str]:
    """Describes a model, a line for each parameter and buffer."""
    first_names: dict[int, str] = {}
    lines = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name:
            lines.append(f"{name}: the same parameter as {first}")
            continue
        dtype = str(precision.dtype_for(name, parameter)).removeprefix("torch.")
        trained = "trained" if parameter.requires_grad else "frozen"
        group = group_indices.get(id(parameter))
        member = "in no param group" if group is None else f"in param group {group}"
        lines.append(f"{name}: shape {tuple(full_shape(parameter))}, {dtype}, {trained}, {member}")
    for name, buffer in model.named_buffers():
        lines.append(f"{name}: a buffer of shape {tuple(buffer.shape)}, {str(buffer.dtype).removeprefix('torch.')}")
    lines.append(f"optimizer: {type(optimizer).__name__}")
    return lines
