"""The groups of expert-parallel layers: declared by their size, connected when they are first needed.

``ep_size_<n>`` names two groups: the ranks that share the experts of a layer, which exchange tokens, and the ranks that
hold the same experts, among which ZeRO shards (a declared group, ``comm.job.declared_groups``). The layers of a model
may have several sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from deepspeed.axes import EXPERT, SAME_EXPERTS, SAME_PART
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.base.timeout import default_timeout
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.connect import Connector
from deepspeed.comm.job.declared_groups import DeclaredGroups
from deepspeed.comm.job.mesh import Mesh
from deepspeed.comm.job.new_groups import ProcessGroups
from deepspeed.comm.watch.watched_group import WatchedGroups
from deepspeed.errors import CallOrderError, DeepSpeedConfigError


class ExpertRanks(NamedTuple):
    """The ranks of a job as layers of one expert-parallel size see them."""

    # lists of the ranks that share the experts of a layer, in the order of the experts
    sharing: tuple[tuple[int, ...], ...]
    same: tuple[tuple[int, ...], ...]  # lists of the ranks that hold the same experts


def cut(dense: Sequence[Sequence[int]], ep_size: int, *, data_first: bool = False) -> ExpertRanks:
    """Divides ranks that hold the same part of the rest of the model into groups of ``ep_size`` that share experts.

    Args:
        dense: Lists of ranks, each of which holds the same part of the model and sees other samples.
        data_first: Whether ranks that share experts are as far apart as possible, instead of neighbors.

    Raises:
        DeepSpeedConfigError: ``ep_size`` is below 1, or does not divide the number of these ranks.
    """
    sharing: list[tuple[int, ...]] = []
    same: list[tuple[int, ...]] = []
    for ranks in dense:
        if ep_size < 1 or len(ranks) % ep_size:
            raise DeepSpeedConfigError(
                f"ep_size {ep_size}: the {len(ranks)} ranks that see different samples cannot be cut into groups of "
                f"{ep_size} that share experts; choose a divisor of {len(ranks)}"
            )
        copies = len(ranks) // ep_size
        near = [tuple(ranks[first : first + ep_size]) for first in range(0, len(ranks), ep_size)]
        far = [tuple(ranks[first::copies]) for first in range(copies)]
        chosen = far if data_first else near
        sharing += chosen
        same += [tuple(members[place] for members in chosen) for place in range(ep_size)]
    return ExpertRanks(tuple(sharing), tuple(same))


def along_mesh(mesh: Mesh, ep_size: int, *, data_first: bool = False) -> ExpertRanks:
    """Returns which ranks of a mesh share experts and which hold the same ones.

    They lie along the expert axis if that has ``ep_size`` ranks; else the data ranks are divided.
    """
    if mesh.size(EXPERT) == ep_size > 1 and not data_first:
        others = (name for name in mesh.names if name in SAME_EXPERTS)
        return ExpertRanks(tuple(map(tuple, mesh.groups(EXPERT))), tuple(map(tuple, mesh.groups(*others))))
    dense = mesh.groups(*(name for name in mesh.names if name in SAME_PART))
    return cut(dense, ep_size, data_first=data_first)


@dataclass
class _Size:
    """One size of expert-parallel layers."""

    ranks: ExpertRanks  # all of the job
    axis: Axis | None = None  # the ranks that share the experts; None before it is needed
    # torch's process groups: of the ranks that share the experts, and of those that hold the same
    groups: tuple[Any, Any] | None = None


def group_name(ep_size: int) -> str:
    """Returns the name of the groups of layers whose experts ``ep_size`` ranks share."""
    return f"ep_size_{ep_size}"


def _shown(ranks: ExpertRanks) -> str:
    return ", ".join(str(list(members)) for members in ranks.sharing[:4]) + (", ..." if ranks.sharing[4:] else "")


class ExpertGroups:
    """The groups of the expert-parallel layers of one job."""

    def __init__(
        self,
        ranks: Ranks,
        watched: WatchedGroups,
        process_groups: ProcessGroups,
        connector: Connector,
        declared: DeclaredGroups,
    ) -> None:
        self._ranks = ranks
        self._watched = watched
        self._process_groups = process_groups
        self._connector = connector
        self._declared = declared
        self._sizes: dict[int, _Size] = {}

    def declare(
        self,
        ep_size: int,
        *,
        mesh: Mesh | None = None,
        dense: Sequence[Sequence[int]] = (),
        data_first: bool | None = None,
    ) -> ExpertRanks:
        """Declares the groups of a size. Every rank of the job must call it alike; nothing is communicated.

        A size that is declared keeps its ranks, unless ``data_first`` requests others, until the engines that use it
        are destroyed.

        Args:
            mesh: The job's mesh; None: see ``dense``.
            dense: Lists of the ranks that hold the same part of the rest of the model; empty: all ranks do.
            data_first: See :func:`cut`; None: as declared before, or else False.

        Raises:
            DeepSpeedConfigError: The size does not divide the ranks, or is declared with other ones.
        """
        known = self._known()
        if ep_size in known and data_first is None:
            self._define(ep_size, known[ep_size].ranks)
            return known[ep_size].ranks
        if mesh is not None:
            ranks = along_mesh(mesh, ep_size, data_first=bool(data_first))
        else:
            ranks = cut(dense or [range(self._ranks.size_of())], ep_size, data_first=bool(data_first))
        if ep_size in known and known[ep_size].ranks != ranks:
            raise DeepSpeedConfigError(
                f"ep_size {ep_size}: expected the experts on the ranks {_shown(known[ep_size].ranks)}, as for earlier "
                f"layers with this ep_size; found {_shown(ranks)}. Set use_data_before_expert_parallelism to one value "
                "everywhere, and leave it out under zero.Init and where groups are made by hand. If the earlier layers "
                "belong to an engine that is no longer needed, call its destroy() first"
            )
        self._define(ep_size, ranks)
        known.setdefault(ep_size, _Size(ranks))
        return ranks

    def _define(self, ep_size: int, ranks: ExpertRanks) -> None:
        if ep_size > 1:  # otherwise every rank has all experts, which are ordinary parameters
            self._declared.define(group_name(ep_size), ranks.same, is_whole=True, lasts=False)

    def sizes(self, *, made: bool = False) -> list[int]:
        """Returns the sizes that are declared, smallest first; with ``made`` those whose process groups exist."""
        return sorted(size for size, entry in self._known().items() if entry.groups is not None or not made)

    def axis(self, ep_size: int, device: torch.device | None = None) -> Axis:
        """Returns the ranks that share experts, as an axis apart from the groups that programs get.

        Every rank of the job must call it, in one order. It is made once; all layers and engines share its transport
        for layers, which carries tokens, as every rank runs them in the same order. :meth:`declare` must have been
        called.
        """
        size = self._size(ep_size)
        if size.axis is None:
            backend = self._ranks.backend_for(self._ranks.world, device)
            why = f"tokens, {ep_size} ranks"
            group = self._process_groups.mine(
                size.ranks.sharing, backend=backend, timeout=default_timeout(), why=why, owner="job"
            )
            size.axis = Axis(EXPERT, self._watched.record_of(group), self._ranks, self._connector, device)
        return size.axis

    def make_groups(self, ep_size: int) -> None:
        """Makes the process groups that :meth:`groups` returns. Every rank of the job must call it, in one order."""
        size = self._size(ep_size)
        if size.groups is None and self._ranks.is_initialized():
            backend = self._ranks.backends_of(self._ranks.world)

            def made(members: Sequence[Sequence[int]], why: str) -> Any:
                return self._process_groups.mine(
                    members, backend=backend, timeout=default_timeout(), why=why, owner="program"
                )

            sharing, same = size.ranks
            size.groups = (
                made(sharing, f"ranks that share experts, {ep_size} at a time"),
                made(same, f"ranks that hold the same experts, of {ep_size}"),
            )

    def groups(self, name: str) -> tuple[Any, Any]:
        """Returns this rank's process groups: of those that share experts, and of those that hold the same.

        Raises:
            CallOrderError: The groups have not been made.
        """
        number = name.rpartition("_")[2]
        size = self._known().get(int(number)) if number.isdecimal() and name == group_name(int(number)) else None
        if size is None or size.groups is None:
            made = ", ".join(group_name(n) for n, entry in sorted(self._known().items()) if entry.groups is not None)
            raise CallOrderError(
                f"the expert group {name!r} does not exist yet; known are {made or 'none'}. deepspeed.initialize makes "
                "the groups of the model's layers; groups._create_expert_and_data_parallel makes one by itself"
            )
        return size.groups

    def ranks_of(self, ep_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the ranks of the job in this rank's two groups of that size, in the order of :meth:`groups`."""
        ranks = self._size(ep_size).ranks
        me = self._ranks.rank_in()
        return (
            next(members for members in ranks.sharing if me in members),
            next(members for members in ranks.same if me in members),
        )

    def _size(self, ep_size: int) -> _Size:
        known = self._known()
        if ep_size not in known:
            raise CallOrderError(
                f"expert-parallel groups of {ep_size} ranks are not declared; call groups.declare_expert_groups or "
                "deepspeed.initialize first"
            )
        return known[ep_size]

    def _known(self) -> dict[int, _Size]:
        defined = self._declared.defined()
        for size in [size for size in self._sizes if size > 1 and group_name(size) not in defined]:
            del self._sizes[size]  # the engines that used it were destroyed
        return self._sizes
