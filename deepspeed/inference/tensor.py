"""Layers shared by tensor-parallel ranks while generating: the same cuts as in training, from another configuration."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from deepspeed.comm import groups, init_distributed
from deepspeed.comm.mesh import DATA, TENSOR, Mesh
from deepspeed.comm.world import size_of
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.inference.config import InferenceSettings
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.cutting import cut_model
from deepspeed.parallel.tensor.rules import is_linear


def tensor_size(settings: InferenceSettings) -> int:
    """The ranks that share every layer."""
    section = settings.config.tensor_parallel
    return section.tp_size if section.enabled else 1


def job_mesh(settings: InferenceSettings) -> Mesh | None:
    """How the ranks are laid out; None where no layer is shared. Every rank must call it.

    Groups of ``tp_size`` ranks stand side by side, each with prompts of its own.

    Raises:
        DeepSpeedConfigError: ``tp_size`` does not divide the ranks.
    """
    size = tensor_size(settings)
    if size == 1:
        return None
    init_distributed()
    ranks = size_of()
    if ranks % size:
        raise DeepSpeedConfigError(
            f"init_inference: tensor_parallel.tp_size {size} does not divide the {ranks} ranks of the job; start a "
            f"multiple of {size}"
        )
    mesh = Mesh(((DATA, ranks // size), (TENSOR, size)))
    groups.set_mesh(mesh)
    if ranks > size:
        log_dist(
            f"init_inference: {ranks // size} groups of {size} ranks; ranks of a group must bring the same prompts, "
            "groups may bring different ones",
            ranks=[0],
        )
    return mesh


def cut(model: nn.Module, settings: InferenceSettings, mesh: Mesh, device: torch.device) -> None:
    """Cuts the model in place. Every rank must call it, with the same model.

    Raises:
        DeepSpeedConfigError: The model cannot be cut so.
    """
    read = settings.config
    section: dict[str, Any] = {"autotp_size": mesh.size(TENSOR)}
    if read.injection_policy is not None:
        section["partition_config"] = {"layer_specs": _specs(model, read.injection_policy)}
    cut_model(model, TensorParallel(**section), mesh, device)


def _specs(model: nn.Module, policy: dict[Any, Any]) -> list[dict[str, Any]]:
    """A policy ``{class of a block: ends of the names of layers whose outputs are summed}`` as rules for layers.

    Raises:
        DeepSpeedConfigError: There is no such block, or no such layer in it.
    """
    rows: list[str] = []
    columns: list[str] = []
    for kind, ends in policy.items():
        ends = (ends,) if isinstance(ends, str) else tuple(ends)
        blocks = [name for name, module in model.named_modules() if kind in (type(module), type(module).__name__)]
        layers = [
            f"{block}.{name}"
            for block in blocks
            for name, module in model.get_submodule(block).named_modules()
            if is_linear(module)
        ]
        for end in ends:
            if not any(layer.endswith(f".{end}") for layer in layers):
                raise DeepSpeedConfigError(
                    f"init_inference: injection_policy: no block {getattr(kind, '__name__', kind)} of the model has a "
                    f"linear layer {end!r}; its layers are {', '.join(sorted({n.rpartition('.')[2] for n in layers}))}"
                )
        for layer in layers:
            (rows if layer.endswith(tuple(f".{end}" for end in ends)) else columns).append(layer)
    found = (("row", rows), ("column", columns))
    return [
        {"patterns": [f"^{re.escape(name)}\\.weight$" for name in names], "partition_type": way}
        for way, names in found
        if names
    ]
