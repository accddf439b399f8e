"""Parameters that a program has cut itself and marked as Megatron-LM does.

``tensor_model_parallel`` (or ``model_parallel``) alone means that tensor ranks have different parts. The attributes
``partition_dim`` and ``partition_stride`` say which part: along that dimension the whole is ``stride`` equal
blocks, each divided evenly in the order of the ranks. With them, checkpoints, exports and accessors use whole
parameters.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.axes import TENSOR
from deepspeed.comm.job.job import Job, size_of
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.channel import connect
from deepspeed.zero.address import full_shape
from deepspeed.zero.tiling.describe import CUT, describe
from deepspeed.zero.tiling.parts import PartOwners, has_part, mark_owners, say_part
from deepspeed.zero.tiling.tiles import TilePart

_Mark = tuple[str, tuple[int, ...], int, int]
"""Name, local shape, dimension, stride."""


def read_marks(job: Job, model: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Records which part of a logical parameter each marked parameter is. Every rank of the job must call it.

    Raises:
        DeepSpeedConfigError: A mark does not fit its parameter, or ranks that share a layer have other marks. Nothing
            was changed.
    """
    if mesh.size(TENSOR) == 1 or mesh.world_size != size_of():
        return
    everybody = job.axis_of().transport("outside engines", device=device, timeout=comm.default_timeout())
    what = "the marks of parameters that the program has cut"
    marked, problem = _marked(model)
    has_cut = any(  # some parameter is marked as a part, by this package or by the program
        type(parameter).__name__ == "DTensor" or has_part(parameter) or describe(name, parameter).group == CUT
        for name, parameter in model.named_parameters()
    )
    reports = gather_objects(everybody, (bool(marked), problem, has_cut), label=what)
    if problems := [words for _, words, _ in reports if words]:
        raise DeepSpeedConfigError(problems[0])
    if not any(is_cut for _, _, is_cut in reports):
        log_dist(
            f"the {mesh} has {mesh.size(TENSOR)} ranks that share layers: expected tensor_parallel.autotp_size "
            f"{mesh.size(TENSOR)} or parameters that the program has cut and marked (tensor_model_parallel = True), "
            "found neither, so these ranks compute the same. Set the key, mark the parameters, or lay the ranks out "
            "without a tensor axis (num_mp 1)",
            level=logging.WARNING,
        )
    if not any(has_some for has_some, _, _ in reports):
        return
    channel = connect(job, mesh, device, comm.default_timeout())
    mine = [mark for mark, _ in marked]
    gathered = gather_objects(channel.transport, mine, label=what)
    if any(other != mine for other in gathered):
        raise DeepSpeedConfigError(_difference(gathered))
    for (name, shape, dim, stride), parameter in marked:
        whole = (*shape[:dim], shape[dim] * channel.size, *shape[dim + 1 :])
        intervals = [_intervals(whole[dim], stride, place, channel.size) for place in range(channel.size)]
        parts = [TilePart.cut(name, whole, dim, found) for found in intervals]
        say_part(parameter, parts[channel.rank])
        mark_owners(parameter, PartOwners(channel.transport, tuple(parts)))
    log_dist(
        f"the program's own tensor parallelism over {channel.size} ranks: partition_dim of {len(marked)} parameters "
        "states which part of the whole each rank has"
    )


def _marked(model: nn.Module) -> tuple[list[tuple[_Mark, nn.Parameter]], str]:
    """Returns the parameters with their marks, and what is wrong with one, or nothing."""
    marked: list[tuple[_Mark, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        dim: Any = getattr(parameter, "partition_dim", None)
        if not isinstance(dim, int) or dim < 0 or has_part(parameter) or describe(name, parameter).group != CUT:
            continue
        shape, stride = full_shape(parameter), getattr(parameter, "partition_stride", 1)
        if dim >= len(shape) or not isinstance(stride, int) or stride < 1 or shape[dim] % stride:
            return marked, (
                f"the parameter {name!r} of shape {shape} is marked with partition_dim {dim} and "
                f"partition_stride {stride}; expected one of its dimensions, and a number of equal blocks that "
                "divides its extent there"
            )
        marked.append(((name, shape, dim, stride), parameter))
    return marked, ""


def _intervals(extent: int, stride: int, place: int, size: int) -> list[tuple[int, int]]:
    each = extent // size // stride
    return [((turn * size + place) * each, (turn * size + place + 1) * each) for turn in range(stride)]


def _difference(gathered: list[list[_Mark]]) -> str:
    rank, number = next(
        (rank, number)
        for number in range(max(map(len, gathered)) + 1)
        for rank in range(1, len(gathered))
        if gathered[rank][number : number + 1] != gathered[0][number : number + 1]
    )
    first, other = (_shown(gathered[place], number) for place in (0, rank))
    return (
        f"ranks that share layers have marked them differently: tensor rank 0 {first}, tensor rank {rank} "
        f"{other}. Build the same layers on all of them, of equal size, with the same partition_dim and "
        "partition_stride; or mark which part a parameter is with deepspeed.zero.tiling.parts.say_part"
    )


def _shown(marks: list[_Mark], number: int) -> str:
    if number >= len(marks):
        return "has no more of them"
    name, shape, dim, stride = marks[number]
    return f"has {name!r} of shape {shape}, partition_dim {dim}, partition_stride {stride}"
