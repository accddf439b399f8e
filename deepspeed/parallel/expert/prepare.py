"""Prepares the expert layers of a model in ``initialize``, before ZeRO shards its parameters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from deepspeed.axes import EXPERT
from deepspeed.comm.job.expert_groups import group_name
from deepspeed.comm.job.groups import declare_expert_groups
from deepspeed.comm.job.job import Job, define_group, rank_in
from deepspeed.parallel.expert.layer import MOELayer
from deepspeed.parallel.stages import gather_from_stages
from deepspeed.zero.address import full_shape
from deepspeed.zero.tiling.describe import cut_experts
from deepspeed.zero.tiling.parts import say_part, set_logical_name
from deepspeed.zero.tiling.tiles import TilePart


def prepare_expert_layers(
    job: Job, model: nn.Module, device: torch.device, *, data_first: bool = False, timed: bool = False
) -> None:
    """Makes the groups of the expert layers of ``model``, and numbers the experts.

    Every rank of the job must call it, with the same model; one without such layers is left alone. Where ``timed``
    layers time themselves.

    Raises:
        DeepSpeedConfigError: The number of ranks cannot be divided as a layer requires.
    """
    layers = dict(expert_layers(model))
    parameters = [parameter for layer in layers.values() for parameter in layer.experts.parameters()]
    marks = ("tensor_model_parallel", "model_parallel")  # of a program that has cut them over tensor-parallel ranks
    is_cut = any(getattr(parameter, mark, False) for parameter in parameters for mark in marks)
    own = [(layer.ep_size, is_cut, layer.ep_group is None) for layer in layers.values() if layer.ep_size > 1]
    gathered = gather_from_stages(job, model, device, own, label="the expert layers of the stages")
    wanted = {tuple(entry) for entries in gathered for entry in entries}
    for ep_size in sorted({size for size, _, _ in wanted}):
        declare_expert_groups(ep_size, data_first or None)
        if any(size == ep_size and is_cut for size, is_cut, _ in wanted):
            define_group(cut_experts(group_name(ep_size)), job.experts.declare(ep_size).same, lasts=False)
        job.experts.make_groups(ep_size)
        if any(size == ep_size and is_ours for size, _, is_ours in wanted):
            # Stages without such a layer must take part in creating the groups; the layers below reuse them.
            job.axis(EXPERT, size=ep_size, device=device).transport("layers")
    for module in model.modules():
        connect = getattr(module, "set_deepspeed_parallelism", None)
        if callable(connect):
            connect(data_first)
    for name, layer in layers.items():
        layer.connect(device)
        if timed:
            layer.wall_clock_breakdown = layer.gate.wall_clock_breakdown = True
        _name_experts(job, name, layer)


def expert_layers(model: nn.Module) -> Iterator[tuple[str, MOELayer]]:
    """Returns ``(qualified name, layer)`` of every expert layer, in the order of the model."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, MOELayer))


def _name_experts(job: Job, name: str, layer: MOELayer) -> None:
    """Names every expert and its parameters by its number among all experts; modules count from 0 on every rank."""
    if layer.ep_size == 1:
        return
    sharing, _ = job.experts.ranks_of(layer.ep_size)
    first = sharing.index(rank_in()) * layer.num_local_experts
    prefix = f"{name}.experts.deepspeed_experts" if name else "experts.deepspeed_experts"
    for number, expert in enumerate(layer.experts.deepspeed_experts):
        set_logical_name(expert, f"{prefix}.{first + number}")
        for own, parameter in expert.named_parameters():
            shape = tuple(full_shape(parameter))
            say_part(parameter, TilePart.all_of(f"{prefix}.{first + number}.{own}", shape))
