"""Where a job's mesh comes from: a model-parallel unit, a torch ``DeviceMesh``, the configuration."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

from deepspeed.comm.meeting import meet
from deepspeed.comm.mesh import AXES, DATA, EXPERT, PIPE, SEQUENCE, TENSOR, Mesh, mesh_of_places
from deepspeed.comm.mpu import place_of
from deepspeed.comm.party import party_of
from deepspeed.comm.world import size_of
from deepspeed.config.sections.root import Root

_USUAL_NAMES = {
    "pp": PIPE,
    "pipeline": PIPE,
    "pipeline_parallel": PIPE,
    "dp": DATA,
    "data_parallel": DATA,
    "ep": EXPERT,
    "expert_parallel": EXPERT,
    "sp": SEQUENCE,
    "cp": SEQUENCE,
    "sequence_parallel": SEQUENCE,
    "tp": TENSOR,
    "tensor_parallel": TENSOR,
}
"""What programs call the axes of a ``DeviceMesh``; any other name stays as it is."""


def mesh_of_mpu(mpu: Any, timeout: timedelta) -> Mesh:
    """The mesh in which every rank has the place that its ``mpu`` says. Every rank of the job must call it.

    An mpu knows the place of its own rank only, so the ranks tell each other.

    Args:
        mpu: The program's model-parallel unit.
        timeout: How long to wait for the other ranks.

    Raises:
        DeepSpeedConfigError: The places do not make a mesh; the same on every rank.
        DivergenceError: Some rank does something else.
        CommunicationError: Some rank has ended or did not come.
    """
    mine = place_of(mpu)
    party = party_of()
    if party is None:
        return mesh_of_places([mine], "the mpu").check(size_of())
    words = meet(party.watch, "the exchange of what the mpu answers", party.ranks, timeout, json.dumps(mine))
    return mesh_of_places([json.loads(word) for word in words], "the mpu")


def mesh_of_device_mesh(device_mesh: Any) -> Mesh:
    """The mesh of a torch ``DeviceMesh`` over all ranks of the job, under the names of this package.

    Args:
        device_mesh: With names for its dimensions.

    Raises:
        DeepSpeedConfigError: It has no names, two dimensions mean the same, or it does not hold every rank once.
    """
    names = device_mesh.mesh_dim_names or ()
    named = (_USUAL_NAMES.get(name, name) for name in names)
    axes = tuple(zip(named, device_mesh.mesh.shape, strict=False))
    return Mesh(axes, tuple(device_mesh.mesh.flatten().tolist())).check(size_of())


def mesh_of_config(root: Root, world_size: int) -> Mesh:
    """The mesh that the configuration asks for: its degrees, and data-parallel ranks for the rest.

    Raises:
        DeepSpeedConfigError: The degrees do not divide ``world_size``.
    """
    stages, experts = root.pipeline.stages, root.expert_parallel
    degrees = {
        PIPE: stages if isinstance(stages, int) else 1,
        EXPERT: experts.autoep_size if experts is not None and experts.enabled else 1,
        SEQUENCE: root.sequence_parallel_size,
        TENSOR: max(root.tensor_parallel.autotp_size, 1),
    }
    others = Mesh(tuple(degrees.items())).world_size
    data = max(world_size // others, 1)
    return Mesh(tuple((name, degrees.get(name, data)) for name in AXES)).check(world_size)
