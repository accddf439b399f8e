"""Groups ranks that hold and do the same, and chooses which one of each kind is planned.

Ranks that differ along ``data``, ``expert`` and ``sequence`` are alike. Along ``tensor`` the first has at least as much
as any other (one more head if uneven, and the replicated parameters). So there is one kind per pipeline stage; of
stages with equal layers, only the one with the most micro-batches in flight needs a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.axes import OTHER_PARTS, PIPE
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class RankKind:
    """Ranks that are alike."""

    stage: int  # their stage of the pipeline, from 0
    stages: int  # number of stages
    rank: int  # the planned rank

    @property
    def title(self) -> str:
        """A name of the kind; empty if all ranks of the job are of this kind."""
        return f"stage {self.stage + 1} of {self.stages}" if self.stages > 1 else ""


def kinds_of(mesh: Mesh) -> list[RankKind]:
    """Returns one kind per stage. The second of alike ranks is planned, as the first may have less padding."""
    stages = mesh.size(PIPE)
    alike = [name for name in mesh.names if name not in OTHER_PARTS]
    found = []
    for stage in range(stages):
        ranks = mesh.group(mesh.rank_at({PIPE: stage} if stages > 1 else {}), *alike)
        found.append(RankKind(stage, stages, ranks[min(1, len(ranks) - 1)]))
    return found


def kind_of(mesh: Mesh, rank: int) -> RankKind:
    """Returns the kind of ``rank``, its planned rank; raises DeepSpeedConfigError where ``rank`` is not in the job."""
    if rank not in range(mesh.world_size):
        raise DeepSpeedConfigError(f"plan(rank={rank!r}): expected a whole number from 0 to {mesh.world_size - 1}")
    return RankKind(mesh.coordinate(rank).get(PIPE, 0), mesh.size(PIPE), rank)


def needed(kinds: Sequence[RankKind], contents: Sequence[object], in_flight: Sequence[int]) -> list[RankKind]:
    """Returns the kinds that may need most memory: of stages with equal contents, the first with the most in flight."""
    alike = [[place for place, other in enumerate(contents) if other == content] for content in contents]
    return [kind for place, kind in enumerate(kinds) if place == max(alike[place], key=lambda one: in_flight[one])]
