"""Weights that several stages hold: each has a copy, and gradients are summed over the copies before the update.

All copies get the same sum, in the order of stages, and make the same update, so they stay bit-identical. This holds
for every parameter of a tied module, since a model on one stage has one such module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.axes import PIPE
from deepspeed.comm.job.job import Job, rank_in
from deepspeed.comm.job.mesh import Mesh
from deepspeed.zero.tiling.describe import put_in_group
from deepspeed.zero.tiling.parts import has_part


@dataclass(frozen=True)
class Tie:
    """One key that lies on several stages."""

    key: str  # its name
    stages: tuple[int, ...]
    module: nn.Module | None  # this rank's copy; None where its stage has none
    group: str  # name of the group of copies

    def group_in(self, job: Job) -> Any:
        """Returns the torch process group of the copies. Every rank must call it."""
        return job.declared.group_of(job.declared.defined()[self.group])

    def weights_and_groups(self, job: Job) -> list[tuple[nn.Parameter, Any]]:
        """Returns this rank's parameters of the tie, with the process group of the copies. Every rank must call it."""
        group = self.group_in(job)
        return [] if self.module is None else [(parameter, group) for parameter in self.module.parameters()]


@torch.no_grad()
def settle_ties(job: Job, ties: Mapping[str, Tie], device: torch.device) -> None:
    """Gives all copies of tied weights the values of the first stage that has them. Every rank must call it.

    Raises:
        DivergenceError: The copies differ in names, shapes or dtypes; on all ranks that have one.
    """
    for key in sorted(ties):
        tie = ties[key]
        group = tie.group_in(job)
        if tie.module is None:
            continue
        cut = [parameter for parameter in tie.module.parameters() if has_part(parameter)]
        put_in_group(cut, _cut_group(tie.group))  # tensor parallelism may have cut it since the declaration
        parameters = dict(tie.module.named_parameters())
        comm.check_same_model(
            [
                f"tied weight {key}.{name}: {tuple(p.shape)} {p.dtype}{'' if p.requires_grad else ' frozen'}"
                for name, p in parameters.items()
            ],
            group,
        )
        axis = job.axis_of(group, PIPE)
        transport = axis.transport("outside engines", device=device, timeout=comm.default_timeout())
        for name, parameter in parameters.items():
            values = parameter.to(device, copy=True, memory_format=torch.contiguous_format)
            transport.broadcast(values.view(-1).view(torch.uint8), 0, label=f"the tied weight {key}.{name}")
            parameter.copy_(values)


def declare_ties(job: Job, mesh: Mesh, owners: Mapping[str, Sequence[int]], modules: nn.ModuleDict) -> dict[str, Tie]:
    """Declares the groups of ties over several stages, without communication. Every rank must call it alike.

    ``owners`` are the stages that have each key, ``modules`` those of this rank.
    """
    ties = {}
    for key, stages in owners.items():
        if len(stages) < 2:
            continue
        name = f"tied {key} of stages {', '.join(map(str, stages))}"
        module = modules[key] if key in modules else None
        lists = [[ranks[stage] for stage in stages] for ranks in mesh.groups(PIPE)]
        for is_cut, group in ((False, name), (True, _cut_group(name))):
            job.declared.define_copies(group, lists, is_cut=is_cut)
        if module is not None:
            for parameter in module.parameters():
                put_in_group([parameter], _cut_group(name) if has_part(parameter) else name)
                parameter.ds_pipe_replicated = mesh.position(rank_in(), PIPE) != stages[0]  # type: ignore[attr-defined]
        ties[key] = Tie(key, tuple(stages), module, name)
    return ties


def _cut_group(name: str) -> str:
    """Returns the group of copies that are sharded over tensor ranks, from the group of whole copies."""
    return f"{name}, cut"
