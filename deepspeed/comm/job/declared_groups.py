"""Groups that a program or a layer declares by name, as lists of ranks, for parameters that are shared differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.job.new_groups import my_group
from deepspeed.comm.job.torch_groups import backend_for
from deepspeed.comm.job.world import rank_in, size_of, stand_in, this_job
from deepspeed.comm.transports.connect import create_transport, part_of_transport
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError


@dataclass(frozen=True)
class Defined:
    """A declared group.

    Attributes:
        name: Its name.
        ranks: The ranks, in the job, of all groups of that name: every rank of the job is in exactly one.
        divisor: What makes a mean of the sum of gradients over one of them; None: the number of all data-parallel
            ranks, as gradients of experts are made of the samples of all of them.
        spans_parts: Its ranks hold different parts of the model otherwise; see :func:`define_copies`.
        is_cut: Of copies: tensor-parallel ranks have different parts of them.
        is_whole: Tensor-parallel ranks hold the same values, each in a list of its own; the first of them counts.
        lasts: The program declared it, and it stays as long as the job. Others were declared for a model, whose engines
            own them: they are forgotten with the last of these.
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    divisor: int | None = None
    spans_parts: bool = False
    is_cut: bool = False
    is_whole: bool = False
    lasts: bool = True

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this rank's group."""
        me = rank_in()
        return next(members for members in self.ranks if me in members)


@dataclass
class _Entry:
    """A declared group and who needs it: the engines made with it, and whoever declared it since the last of them."""

    defined: Defined
    is_awaited: bool = True
    engines: int = 0


_defined: tuple[Any, dict[str, _Entry]] = (None, {})
"""With all ranks of the job in which they were declared: another job has other ranks."""


def define_group(
    name: str,
    ranks: Sequence[Sequence[int]],
    divisor: int | None = None,
    *,
    is_whole: bool = False,
    lasts: bool = True,
) -> None:
    """Declares a group for parameters that are not the same on all data-parallel ranks.

    Every rank of the job must call it alike, before parameters of the group are built or an engine is made. Nothing is
    communicated. Declaring it again with the same ranks does nothing.

    Args:
        name: Its name, for ``zero.tiling.describe.put_in_group`` and ``in_group``, or a parameter's ``group_name``.
        ranks: The ranks of the job in lists: those of one list hold the same values and share them. Every rank is in
            exactly one list, lists are equally long, and the ranks of a list hold the same part of the model otherwise.
        divisor: See :class:`Defined`.
        is_whole: See :class:`Defined`.
        lasts: See :class:`Defined`.

    Raises:
        DeepSpeedConfigError: A rank is missing or occurs twice, lists are of unequal length, or the name is taken.
    """
    made = Defined(name, tuple(tuple(sorted(members)) for members in ranks), divisor, is_whole=is_whole, lasts=lasts)
    given = sorted(rank for members in made.ranks for rank in members)
    if given != list(range(size_of())):
        raise DeepSpeedConfigError(
            f"define_group({name!r}): its lists hold the ranks {given}; expected every rank from 0 to {size_of() - 1} "
            "once"
        )
    if len({len(members) for members in made.ranks}) > 1:
        raise DeepSpeedConfigError(
            f"define_group({name!r}): its lists have {[len(members) for members in made.ranks]} ranks; expected "
            "equally many, as ranks with the same part of the model gather in one order"
        )
    _remember(made)


def define_copies(name: str, ranks: Sequence[Sequence[int]], *, is_cut: bool = False) -> None:
    """Declares a group for parameters of which ranks with different parts of the model hold copies (tied weights).

    Each copy is shared by the data-parallel ranks of its part like other parameters; gradients are then summed over the
    copies. Every rank of the job must call it alike, before an engine is made. Nothing is communicated. It does not
    last: see :class:`Defined`.

    Args:
        name: Its name, for ``zero.tiling.describe.put_in_group``.
        ranks: The ranks of the job in lists: those of one list hold copies of the same values. Ranks that have none
            need not occur.
        is_cut: Tensor-parallel ranks have different parts of the parameters.

    Raises:
        DeepSpeedConfigError: A rank occurs twice, or the name is taken.
    """
    lists = [tuple(members) for members in ranks]
    given = [rank for members in lists for rank in members]
    if len(set(given)) < len(given) or not set(given) <= set(range(size_of())):
        raise DeepSpeedConfigError(
            f"define_copies({name!r}): its lists hold the ranks {sorted(given)}; expected ranks from 0 to "
            f"{size_of() - 1}, each at most once"
        )
    alone = [(rank,) for rank in range(size_of()) if rank not in given]
    _remember(Defined(name, (*lists, *alone), spans_parts=True, is_cut=is_cut, lasts=False))


def _remember(made: Defined) -> None:
    name = made.name
    entry = _of_this_job().setdefault(name, _Entry(made))
    known = entry.defined
    if known != made:
        remedy = "choose another one"
        if entry.engines and not known.lasts:
            remedy += f", or call destroy() of the {entry.engines} engine(s) made with it before"
        raise DeepSpeedConfigError(
            f"define_group({name!r}): the name is taken, by the ranks {[list(members) for members in known.ranks]}; "
            f"{remedy}"
        )
    entry.is_awaited = True


def defined_groups() -> Mapping[str, Defined]:
    """What has been declared in this job, by name, in the order of names."""
    return {name: entry.defined for name, entry in sorted(_of_this_job().items())}


@dataclass
class Claim:
    """An engine's claim to the groups that it was made with; what is claimed stays declared until it is given up."""

    _entries: list[_Entry] = field(default_factory=list)

    def give_up(self) -> None:
        """Forgets the groups that no other engine uses and nobody has declared anew. Every rank must call it alike."""
        known = _of_this_job()
        for entry in self._entries:
            entry.engines -= 1
            name = entry.defined.name
            if not (entry.engines or entry.is_awaited or entry.defined.lasts) and known.get(name) is entry:
                del known[name]
        self._entries.clear()


def claim_groups() -> Claim:
    """Claims all groups that are declared. Every rank of the job must call it alike; nothing is communicated."""
    entries = list(_of_this_job().values())
    for entry in entries:
        entry.engines += 1
        entry.is_awaited = False
    return Claim(entries)


def connect_defined(
    defined: Defined, peers: Transport, use: str, *, device: torch.device | None, timeout: timedelta | None
) -> Transport:
    """A transport over this rank's group. Every rank of the job must call it, in the same order.

    Args:
        defined: The groups.
        peers: The ranks that make the same calls.
        use: What travels, in words.
        device: Where the buffers live.
        timeout: As of ``comm.transports.connect.create_transport``.

    Raises:
        DeepSpeedConfigError: Ranks of the group make other calls.
    """
    outside = set(defined.mine) - set(peers.ranks or [rank_in()])
    if outside:
        raise DeepSpeedConfigError(
            f"the group {defined.name!r} holds the ranks {list(defined.mine)}, of which {sorted(outside)} do not hold "
            f"the same part of the model as this rank; expected ranks among {list(peers.ranks) or [rank_in()]}"
        )
    if (others := stand_in()) is not None:
        made: Transport = others.transport(device, defined.mine)
        made.belongs_to(peers)
        made.axis = defined.name
        return made
    backend = backend_for(dist.group.WORLD, device)
    # Gloo matches transfers by tag, so that all uses can share a group.
    why = f"the group {defined.name!r}" + ("" if backend == "gloo" else f" ({use})")
    group = my_group(defined.ranks, backend=backend, timeout=timeout, why=why)
    made = part_of_transport(peers, group)
    made.axis = defined.name
    return made


def connect_copies(defined: Defined, *, device: torch.device | None, timeout: timedelta | None) -> Transport | None:
    """A transport over the ranks with copies; None where this rank has none. Every rank of the job must call it.

    Args:
        defined: As :func:`define_copies` declared it.
        device: Where the buffers live.
        timeout: As of ``comm.transports.connect.create_transport``.
    """
    members = defined.mine
    if (others := stand_in()) is not None:
        made: Transport = others.transport(device, members)
    else:
        made = create_transport(group_of(defined, device=device, timeout=timeout), device=device, timeout=timeout)
    made.axis = "pipe"
    return made if len(members) > 1 else None


def group_of(defined: Defined, *, device: torch.device | None = None, timeout: timedelta | None = None) -> Any:
    """This rank's torch process group of a declared group of copies. Every rank of the job must call it."""
    backend = backend_for(dist.group.WORLD, device)
    return my_group(defined.ranks, backend=backend, timeout=timeout, why=f"the copies {defined.name!r}")


def _of_this_job() -> dict[str, _Entry]:
    global _defined
    job = this_job()
    if _defined[0] is not job:
        _defined = job, {}
    return _defined[1]
