"""Models that the program has already cut, by torch's ``parallelize_module`` or Transformers' ``tp_plan``.

Their parameters are ``DTensor`` objects, which cannot lie in flat buffers. Each is replaced by an ordinary parameter
with the local tensor, whose placement states which part of the whole it is. While its module computes, it is seen as a
``DTensor`` again, so that the program's plan works unchanged, with torch's own collectives.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.axes import TENSOR
from deepspeed.comm.job.job import Job, rank_in
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.mesh_sources import TAKEN
from deepspeed.comm.job.trace_points import TracePoints
from deepspeed.engine_feature import mark
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import wrap_forward
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.batches import BatchCheck, same_random_states
from deepspeed.parallel.tensor.channel import connect
from deepspeed.parallel.tensor.cutting import CUT, CutModel
from deepspeed.parallel.tensor.layout import Layout
from deepspeed.parallel.tensor.making import sum_own_gradients
from deepspeed.parallel.tensor.rules import CutStyle, of_plan
from deepspeed.uncompiled import uncompiled
from deepspeed.zero.gather.hooks import tensors_in
from deepspeed.zero.tiling.parts import PartOwners, mark_owners, part_of_placements, say_part


@dataclass(frozen=True)
class _ParameterPlacement:
    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def place(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the local tensor as a ``DTensor``; the gradient of a replicated parameter is the whole gradient."""
        dtensor: Any = sys.modules["torch.distributed.tensor"].DTensor
        return dtensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def adopt_dtensors(job: Job, model: nn.Module, mesh: Mesh, device: torch.device) -> dict[int, nn.Parameter]:
    """Replaces the ``DTensor`` parameters of a model in place, and keeps their cut. All ranks of the job must call it.

    Returns the new parameters by the ``id`` of the old ones.

    Raises:
        DeepSpeedConfigError: They use other ranks than the mesh of the job; nothing was changed.
        NotYetSupportedError: A placement is neither ``Shard`` nor ``Replicate``.
    """
    found = {name: parameter for name, parameter in model.named_parameters() if is_dtensor(parameter)}
    if not found:
        return {}
    ranks = mesh.group(rank_in(), TENSOR)
    for name, parameter in found.items():
        given = parameter.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
        if given != ranks:
            raise DeepSpeedConfigError(
                f"the parameter {name!r} is a DTensor over the ranks {given}, but the ranks that share layers with "
                f"this one are {ranks}, by the mesh of the job. Give initialize the same mesh (mesh_param). Do not "
                "call fully_shard: ZeRO shards by itself"
            )
    parts = {name: _parts_of(name, parameter) for name, parameter in found.items()}
    channel = connect(job, mesh, device, comm.default_timeout())
    exchanged: dict[int, nn.Parameter] = {}
    for name, parameter in found.items():
        made = exchanged[id(parameter)] = _plain(parameter)
        if parts[name] is not None:
            say_part(made, parts[name][channel.rank])
            mark_owners(made, PartOwners(channel.transport, tuple(parts[name])))
            made.tensor_model_parallel = True  # type: ignore[attr-defined]
    trace_points = TracePoints(next(iter(found.values())).device_mesh.get_group())  # type: ignore[attr-defined]
    for name, module in model.named_modules():
        _exchange(name, module, exchanged, trace_points)
    model.register_forward_hook(functools.partial(_announce_backward, trace_points))
    for name, rule in of_plan(model).items() if getattr(model, "tp_size", None) else ():
        if rule.way is CutStyle.SUMMED:
            # Transformers sums it by a hook that the first forward puts on the parameter, after ZeRO has taken it.
            module = model.get_submodule(name)
            module.__dict__.pop("forward", None)
            sum_own_gradients(module, channel, name)
    cut = sum(part is not None for part in parts.values())
    log_dist(
        f"tensor parallelism over {channel.size} ranks: {cut} parameters were cut before (DTensor) and are taken as "
        "they are; torch's own collectives sum and gather between them"
    )
    same_random_states(channel)
    BatchCheck(channel).attach(model)
    setattr(model, TAKEN, tuple(ranks))
    setattr(model, CUT, CutModel(channel, Layout(channel.size)))
    mark(model, "deepspeed.parallel.tensor.feature")
    return exchanged


def is_dtensor(value: Any) -> bool:
    """Returns whether ``value`` is a ``DTensor``, without importing torch's module for them."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def _parts_of(name: str, parameter: Any) -> Any:
    """Returns the part of every rank of its mesh; None for a parameter that all of them have whole."""
    if all(placement.is_replicate() for placement in parameter.placements):
        return None
    size = parameter.device_mesh.size()
    return [part_of_placements(name, parameter.shape, [size], [place], parameter.placements) for place in range(size)]


def _plain(parameter: Any) -> nn.Parameter:
    local = parameter.detach().to_local().contiguous()
    made = nn.Parameter(local, requires_grad=parameter.requires_grad)
    made.__dict__.update({key: value for key, value in parameter.__dict__.items() if not key.startswith("_")})
    made.__dict__["_ds_placed"] = _ParameterPlacement(
        parameter.device_mesh, parameter.placements, parameter.shape, parameter.stride()
    )
    return made


def _exchange(name: str, module: nn.Module, exchanged: dict[int, nn.Parameter], trace_points: TracePoints) -> None:
    """Puts the new parameters into a module, whose forward sees them as ``DTensor`` objects."""
    placed: dict[str, _ParameterPlacement] = {}
    for key, value in module._parameters.items():
        made = exchanged.get(id(value))
        if made is not None:
            module._parameters[key] = made
            placed[key] = made.__dict__["_ds_placed"]
    if placed:
        wrap_forward(module, _placing(name, placed, trace_points))


@uncompiled
def _announce_backward(trace_points: TracePoints, _module: nn.Module, _args: Any, outputs: Any) -> None:
    """Declares one trace point for torch's collectives in a backward, as its layers have no hooks of their own."""
    for tensor in tensors_in(outputs):
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: trace_points.reach("a backward through layers of DTensors"))


def _placing(name: str, placed: dict[str, _ParameterPlacement], trace_points: TracePoints) -> Callable[..., Any]:
    place = f"the layer {name!r}, whose parameters are DTensors"

    def forward(module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own = module._parameters
        plain = {key: own[key] for key in placed}
        for key, value in plain.items():
            if value is not None:
                own[key] = placed[key].place(value)  # type: ignore[assignment]
        trace_points.reach(place)
        try:
            return original(*args, **kwargs)
        finally:
            own.update(plain)

    return forward
