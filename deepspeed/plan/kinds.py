"""Which ranks of a job are alike, and which one of each kind is planned.

Ranks that differ along ``data``, ``expert`` and ``sequence`` hold equally much and do the same. Along ``tensor`` the
first has at least as much as any other (uneven heads: one more), and counts what all have whole. Stages of a pipeline
are all different: in their layers, or in the number of micro-batches whose activations wait for their backward. So
there is one kind per stage, and stages with equal layers need no plan of their own where one that has no fewer
micro-batches in flight is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed.axes import OTHER_PARTS, PIPE
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class RankKind:
    """Ranks that are alike.

    Attributes:
        stage: Their stage of the pipeline, from 0.
        stages: How many there are.
        rank: The one that is planned.
        ranks: How many ranks are of this kind.
    """

    stage: int
    stages: int
    rank: int
    ranks: int

    @property
    def title(self) -> str:
        """The kind in words; empty where all ranks of the job are of this kind."""
        return f"stage {self.stage + 1} of {self.stages}" if self.stages > 1 else ""


def kinds_of(mesh: Mesh) -> list[RankKind]:
    """Returns one kind per stage. The second of alike ranks is planned, as the first may have less padding."""
    stages = mesh.size(PIPE)
    alike = [name for name in mesh.names if name not in OTHER_PARTS]
    found = []
    for stage in range(stages):
        ranks = mesh.group(mesh.rank_at({PIPE: stage} if stages > 1 else {}), *alike)
        found.append(RankKind(stage, stages, ranks[min(1, len(ranks) - 1)], mesh.world_size // stages))
    return found


def kind_of(mesh: Mesh, rank: int) -> RankKind:
    """Returns the kind of ``rank``, which is the one that is planned.

    Raises:
        DeepSpeedConfigError: There is no such rank.
    """
    if rank not in range(mesh.world_size):
        raise DeepSpeedConfigError(f"plan(rank={rank!r}): expected a whole number from 0 to {mesh.world_size - 1}")
    stages = mesh.size(PIPE)
    return RankKind(mesh.coordinate(rank).get(PIPE, 0), stages, rank, mesh.world_size // stages)


def needed(kinds: Sequence[RankKind], contents: Sequence[object], in_flight: Sequence[int]) -> list[RankKind]:
    """Returns those of ``kinds`` among which the heaviest is: of equal contents, the first with the most in flight.

    Args:
        kinds: By stage.
        contents: What each stage holds, to be compared.
        in_flight: For how many micro-batches each keeps activations, at most.
    """
    alike = [[place for place, other in enumerate(contents) if other == content] for content in contents]
    return [kind for place, kind in enumerate(kinds) if place == max(alike[place], key=lambda one: in_flight[one])]
