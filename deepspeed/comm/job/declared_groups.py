"""Groups that a program or a layer declares by name, as lists of ranks, for parameters that are shared differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from deepspeed.axes import PIPE
from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.job.connect import Connector
from deepspeed.comm.job.new_groups import Owner, ProcessGroups
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class Defined:
    """A declared group."""

    name: str
    # the ranks, in the job, of all groups of that name: every rank of the job is in exactly one
    ranks: tuple[tuple[int, ...], ...]
    # divisor of the sum of gradients over one of them; None: the number of all data-parallel ranks, since gradients of
    # experts come from the samples of all of them
    divisor: int | None = None
    spans_stages: bool = False  # its ranks hold different parts of the model otherwise; see :func:`define_copies`
    is_cut: bool = False  # whether tensor-parallel ranks have different parts of the copies
    # tensor-parallel ranks hold the same values, each in a list of its own; the first of them counts
    is_whole: bool = False
    # Whether it lasts as long as the job, since the program declared it. Groups declared for a model are removed with
    # the last of its engines.
    lasts: bool = True

    def of(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks of the group in which ``rank`` is."""
        return next(members for members in self.ranks if rank in members)


@dataclass
class _Entry:
    """A declared group and its users: the engines made with it, and declarations since the last of them."""

    defined: Defined
    is_awaited: bool = True
    engines: int = 0


@dataclass
class Claim:
    """An engine's claim to the groups that it was made with, which stay declared until all claims are given up."""

    _known: dict[str, _Entry] = field(default_factory=dict)
    _entries: list[_Entry] = field(default_factory=list)

    def give_up(self) -> None:
        """Drops groups that no other engine uses and that were not declared again. Every rank must call it alike."""
        for entry in self._entries:
            entry.engines -= 1
            name = entry.defined.name
            if not (entry.engines or entry.is_awaited or entry.defined.lasts) and self._known.get(name) is entry:
                del self._known[name]
        self._entries.clear()


class DeclaredGroups:
    """The groups that are declared in one job."""

    def __init__(self, ranks: Ranks, process_groups: ProcessGroups, connector: Connector) -> None:
        self._ranks = ranks
        self._process_groups = process_groups
        self._connector = connector
        self._entries: dict[str, _Entry] = {}

    def define(
        self,
        name: str,
        ranks: Sequence[Sequence[int]],
        divisor: int | None = None,
        *,
        is_whole: bool = False,
        lasts: bool = True,
    ) -> None:
        """Declares a group for parameters that are not the same on all data-parallel ranks.

        Every rank of the job must call it alike, before parameters of the group are built or an engine is made. Nothing
        is communicated. Declaring it again with the same ranks does nothing. :class:`Defined` explains the rest.

        Args:
            name: Its name, for ``zero.tiling.describe.put_in_group`` and ``in_group``, or a parameter's ``group_name``.
            ranks: The ranks of the job in lists: those of one list hold the same values and share them. Every rank is
                in exactly one list, lists are equally long, and the ranks of a list hold the same part of the model
                otherwise.

        Raises:
            DeepSpeedConfigError: A rank is missing or occurs twice, lists are of unequal length, or the name is taken.
        """
        made = Defined(
            name, tuple(tuple(sorted(members)) for members in ranks), divisor, is_whole=is_whole, lasts=lasts
        )
        given = sorted(rank for members in made.ranks for rank in members)
        if given != list(range(self._ranks.size_of())):
            raise DeepSpeedConfigError(
                f"define_group({name!r}): its lists hold the ranks {given}; expected every rank from 0 to "
                f"{self._ranks.size_of() - 1} once"
            )
        if len({len(members) for members in made.ranks}) > 1:
            raise DeepSpeedConfigError(
                f"define_group({name!r}): its lists have {[len(members) for members in made.ranks]} ranks; expected "
                "equally many, as ranks with the same part of the model gather in one order"
            )
        self._remember(made)

    def define_copies(self, name: str, ranks: Sequence[Sequence[int]], *, is_cut: bool = False) -> None:
        """Declares a group for tied weights: ranks with different parts of the model hold copies of them.

        Each copy is shared by the data-parallel ranks of its part like other parameters; gradients are then summed over
        the copies. Every rank of the job must call it alike, before an engine is made. Nothing is communicated. It does
        not last: see :class:`Defined`. The ranks of the job that hold copies of the same values are one list of
        ``ranks``; those that have none need not occur.

        Raises:
            DeepSpeedConfigError: A rank occurs twice, or the name is taken.
        """
        lists = [tuple(members) for members in ranks]
        given = [rank for members in lists for rank in members]
        if len(set(given)) < len(given) or not set(given) <= set(range(self._ranks.size_of())):
            raise DeepSpeedConfigError(
                f"define_copies({name!r}): its lists hold the ranks {sorted(given)}; expected ranks from 0 to "
                f"{self._ranks.size_of() - 1}, each at most once"
            )
        alone = [(rank,) for rank in range(self._ranks.size_of()) if rank not in given]
        self._remember(Defined(name, (*lists, *alone), spans_stages=True, is_cut=is_cut, lasts=False))

    def _remember(self, made: Defined) -> None:
        name = made.name
        entry = self._entries.setdefault(name, _Entry(made))
        known = entry.defined
        if known != made:
            remedy = "choose another one"
            if entry.engines and not known.lasts:
                remedy += f", or call destroy() of the {entry.engines} engine(s) made with it before"
            raise DeepSpeedConfigError(
                f"define_group({name!r}): the name is taken, by the ranks "
                f"{[list(members) for members in known.ranks]}; {remedy}"
            )
        entry.is_awaited = True

    def defined(self) -> Mapping[str, Defined]:
        """Returns what has been declared in this job, by name, in the order of names."""
        return {name: entry.defined for name, entry in sorted(self._entries.items())}

    def claim(self) -> Claim:
        """Claims all groups that are declared. Every rank of the job must call it alike; nothing is communicated."""
        entries = list(self._entries.values())
        for entry in entries:
            entry.engines += 1
            entry.is_awaited = False
        return Claim(self._entries, entries)

    def connect(
        self,
        defined: Defined,
        peers: Transport,
        use: str,
        *,
        device: torch.device | None,
        timeout: timedelta | None,
        owner: Owner = "engine",
    ) -> Transport:
        """Returns a transport over this rank's group. Every rank of the job must call it, in the same order.

        ``peers`` are the ranks that make the same calls; ``use`` says what is sent, for messages.

        Raises:
            DeepSpeedConfigError: Ranks of the group make other calls.
        """
        mine = defined.of(self._ranks.rank_in())
        known = list(peers.ranks) or [self._ranks.rank_in()]
        outside = set(mine) - set(known)
        if outside:
            raise DeepSpeedConfigError(
                f"the group {defined.name!r} holds the ranks {list(mine)}, of which {sorted(outside)} do not hold the "
                f"same part of the model as this rank; expected ranks among {known}"
            )
        backend = self._ranks.backend_for(self._ranks.world, device)
        # Gloo matches transfers by tag, so that all uses can share a group.
        why = f"the group {defined.name!r}" + ("" if backend == "gloo" else f" ({use})")
        group = self._process_groups.mine(defined.ranks, backend=backend, timeout=timeout, why=why, owner=owner)
        return self._connector.subgroup_of(peers, group, defined.name)

    def connect_copies(
        self, defined: Defined, *, device: torch.device | None, timeout: timedelta | None
    ) -> Transport | None:
        """Returns a transport over the ranks with copies; None where this rank has none. Every rank must call it."""
        made = self._connector.create(self.group_of(defined, device=device, timeout=timeout), device, timeout, PIPE)
        return made if len(defined.of(self._ranks.rank_in())) > 1 else None

    def group_of(
        self, defined: Defined, *, device: torch.device | None = None, timeout: timedelta | None = None
    ) -> Any:
        """Returns this rank's process group of a declared group of copies. Every rank of the job must call it."""
        backend = self._ranks.backend_for(self._ranks.world, device)
        why = f"the copies {defined.name!r}"
        return self._process_groups.mine(defined.ranks, backend=backend, timeout=timeout, why=why, owner="job")
