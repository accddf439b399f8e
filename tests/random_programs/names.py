"""Translates parameter names of a rank's engine to those of the whole model."""

import re
from typing import Any

import torch.distributed as dist

from tests.random_programs.program import Layout, Program

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


class Names:
    """Translates the names of one rank.

    Args:
        program: The program.
        layout: The layout of the phase.
        rank: The rank.
        module: The model that was given to ``initialize``.
    """

    def __init__(self, program: Program, layout: Layout, rank: int, module: Any) -> None:
        self.place = layout.place(rank)
        self.ranks = layout.experts
        self.experts = program.model.given.get("experts", 0)
        self.is_own_layer = not program.model.is_transformers
        self.starts: dict[str, str] = {}
        if program.model.is_transformers and layout.pipe:
            from deepspeed.parallel.pipe.transformers_models import transformers_names

            self.starts = transformers_names(module._layer_specs)

    @property
    def expert_place(self) -> int:
        """Returns this rank's number among those that share experts."""
        if self.ranks == 1 or not self.is_own_layer:
            return self.place.data % self.ranks
        from deepspeed.comm.job.groups import declare_expert_groups
        from deepspeed.comm.job.job import Job

        declare_expert_groups(self.ranks)  # initialize does it too, but names are needed before
        return Job.adopt().experts.ranks_of(self.ranks)[0].index(my_rank())

    def whole(self, name: str) -> str:
        """Returns the name in the whole model."""
        found = _EXPERT.fullmatch(name)
        if found is not None:
            number = self.expert_place * (self.experts // self.ranks) + int(found[2])
            name = f"{found[1]}{number}{found[3]}"
        start = next((start for start in self.starts if name.startswith(start)), None)
        return name if start is None else self.starts[start] + name.removeprefix(start)


def my_rank() -> int:
    """Returns this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0
