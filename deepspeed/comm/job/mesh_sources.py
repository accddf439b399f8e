"""Makes a job's mesh from a model-parallel unit, a torch ``DeviceMesh``, or the configuration."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from deepspeed.axes import AXES, DATA, EXPERT, PIPE, ROWS, SAMPLES, SEQUENCE, TENSOR
from deepspeed.comm.job.job import Job, rank_in, size_of
from deepspeed.comm.job.mesh import Mesh, mesh_of_places
from deepspeed.comm.job.mpu import place_of
from deepspeed.comm.watch.barrier import store_barrier
from deepspeed.config.degrees import data_parallel_size, degrees
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError

TAKEN = "ds_cut_over"
"""Attribute of a model whose ``DTensor`` parameters were taken: the ranks over which they were cut."""

_USUAL_NAMES = {alias: row.name for row in ROWS for alias in row.aliases}
_SHORT_NAMES = tuple(row.aliases[0] for row in ROWS if row.aliases)
"""Programs' names of the axes of a ``DeviceMesh``; other names are kept."""


def mesh_of_mpu(mpu: Any, timeout: timedelta) -> Mesh:
    """Returns the mesh in which every rank has the place that its ``mpu`` returns. Every rank of the job must call it.

    An mpu has the coordinates of its own rank only, so the ranks exchange them.

    Raises:
        DeepSpeedConfigError: The places do not make a mesh; the same on every rank.
        DivergenceError: Some rank does something else.
        CommunicationError: Some rank has ended or did not arrive.
    """
    mine = place_of(mpu)
    watched = Job.current().watched.of()
    if watched is None:
        return mesh_of_places([mine], "the mpu").check(size_of())
    words = store_barrier(
        watched.watch, "the exchange of what the mpu returns", watched.ranks, timeout, json.dumps(mine)
    )
    return mesh_of_places([json.loads(word) for word in words], "the mpu")


def mesh_of_device_mesh(device_mesh: Any) -> Mesh:
    """Returns the mesh of a torch ``DeviceMesh`` over all ranks of the job, under the names of this package.

    Neighboring dimensions that mean the same (``dp_replicate``, ``dp_shard``) become one axis.

    Raises:
        DeepSpeedConfigError: It has no names or unknown ones, two dimensions that are no neighbors mean the same, or
            it does not hold every rank once.
    """
    names = device_mesh.mesh_dim_names or ()
    axes: list[tuple[str, int]] = []
    for name, size in zip(names, device_mesh.mesh.shape, strict=False):
        axis = _USUAL_NAMES.get(name, name)
        if axes and axes[-1][0] == axis:
            size *= axes.pop()[1]
        axes.append((axis, size))
    unknown = [axis for axis, size in axes if size > 1 and axis not in AXES]
    if unknown:
        raise DeepSpeedConfigError(
            f"initialize(mesh_param=...): expected dimensions with the names {', '.join(AXES)} or usual short ones "
            f"({', '.join(_SHORT_NAMES)}), found {', '.join(unknown)}; rename it"
        )
    return Mesh(tuple(axes), tuple(device_mesh.mesh.flatten().tolist())).check(size_of())


def ranks_of_dtensors(model: Any) -> list[int] | None:
    """Returns the ranks over which a model's ``DTensor`` parameters are cut, in order; None where it has none.

    The attribute :data:`TAKEN` marks a model whose parameters an engine has taken already.

    Raises:
        DeepSpeedConfigError: They lie on several groups of ranks, on a mesh of several axes, or are FSDP's.
    """
    if (known := getattr(model, TAKEN, None)) is not None:
        return list(known)
    module = sys.modules.get("torch.distributed.tensor")  # importing it costs more than most models
    if module is None or not callable(parameters := getattr(model, "parameters", None)):
        return None
    found = [one.device_mesh for one in parameters() if isinstance(one, module.DTensor)]
    if not found:
        return None
    sharded = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    if sharded is not None and any(isinstance(one, sharded) for one in model.modules()):
        raise DeepSpeedConfigError(_refusal_of_fsdp(model))
    if any(one.ndim > 1 for one in found) or len({tuple(one.mesh.tolist()) for one in found}) > 1:
        shown = "; ".join(sorted({str(one) for one in found})[:3])
        raise DeepSpeedConfigError(
            f"the model's DTensor parameters lie on {shown}; expected one mesh of one axis, that of tensor "
            "parallelism: parallelize_module(model, device_mesh['tp'], plan). Data-parallel ranks are those of ZeRO"
        )
    ranks: list[int] = found[0].mesh.tolist()
    return ranks


def _refusal_of_fsdp(model: Any) -> str:
    """Returns what to write instead of FSDP: lines for a model that Transformers has sharded, else a sentence."""
    size, tensor = getattr(model, "fsdp_size", None), getattr(model, "tp_size", None) or 1
    if not size:
        return (
            "the model was given to torch's fully_shard, which shards over the data-parallel ranks as ZeRO does; give "
            "initialize the model without it (parallelize_module alone is taken as it is)"
        )
    name = type(model).__name__.removeprefix("FSDP")  # fully_shard derives a class with this prefix
    kept = f", distributed_config=DistributedConfig(tp_size={tensor})" if tensor > 1 else ""
    return (
        f"the model was loaded with DistributedConfig(fsdp_size={size}), which shards over the data-parallel ranks as "
        f"ZeRO does. Load it without, and let ZeRO shard it:\n"
        f"    model = {name}.from_pretrained(folder{kept})\n"
        '    config["zero_optimization"] = {"stage": 3}\n'
        "    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)"
    )


def mesh_of_dtensors(ranks: Sequence[int]) -> Mesh:
    """Returns the mesh of a job in which ``ranks`` share layers: neighbors, or every n-th rank.

    Raises:
        DeepSpeedConfigError: The ranks are neither neighbors nor evenly apart.
    """
    world, size = size_of(), len(ranks)
    others = world // size
    axes = [(TENSOR, size)] if others == 1 else [(DATA, others), (TENSOR, size)]
    for mesh in (Mesh(tuple(axes)), Mesh(tuple(reversed(axes)))):
        if mesh.world_size == world and mesh.group(rank_in(), TENSOR) == list(ranks):
            return mesh
    raise DeepSpeedConfigError(
        f"the model's DTensor parameters are cut over the ranks {list(ranks)} of {world}, which are neither neighbors "
        "nor evenly apart; give initialize the whole mesh: mesh_param=<DeviceMesh with the axes dp and tp>"
    )


def mesh_of_param(mesh_param: Any) -> Mesh:
    """Returns the mesh of ``initialize(mesh_param=...)``: a ``DeviceMesh``, ``Mesh``, or sizes ``(data, sequence)``.

    Raises:
        DeepSpeedConfigError: It is none of these, or does not make up the job.
    """
    if isinstance(mesh_param, Mesh):
        return mesh_param.check(size_of())
    if hasattr(mesh_param, "mesh_dim_names"):
        return mesh_of_device_mesh(mesh_param)
    if isinstance(mesh_param, (tuple, list)) and len(mesh_param) == 2 and all(type(n) is int for n in mesh_param):
        return Mesh(tuple(zip((DATA, SEQUENCE), mesh_param, strict=True))).check(size_of())
    raise DeepSpeedConfigError(
        f"initialize(mesh_param={mesh_param!r}): expected the sizes (data, sequence), whose product is the number of "
        "ranks, or a torch DeviceMesh with names for its dimensions"
    )


def mesh_of_config(root: Root, world_size: int, *, stages: int = 1) -> Mesh:
    """Returns the mesh that the configuration requests: its degrees, and data-parallel ranks for the rest.

    The stages of the pipeline are not in the configuration.

    Raises:
        DeepSpeedConfigError: The degrees do not divide ``world_size``.
    """
    data = data_parallel_size(root, world_size, stages=stages)
    sizes = degrees(root)
    if data % sizes[EXPERT]:  # experts are spread over data x sequence ranks, which no axis of this mesh is
        sizes[EXPERT] = 1
    inside = math.prod(size for axis, size in sizes.items() if axis in SAMPLES)
    sizes |= {PIPE: stages, DATA: data // inside}
    return Mesh(tuple((name, sizes[name]) for name in AXES if name in sizes)).check(world_size)
