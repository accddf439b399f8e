"""Groups that a program or a layer declares by name, as lists of ranks, for parameters that are shared differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.connect import create_transport, part_of_transport
from deepspeed.comm.new_groups import my_group
from deepspeed.comm.store import backend_for
from deepspeed.comm.transport import Transport
from deepspeed.comm.world import rank_in, size_of, stand_in, this_job
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
    """

    name: str
    ranks: tuple[tuple[int, ...], ...]
    divisor: int | None = None
    spans_parts: bool = False
    is_cut: bool = False
    is_whole: bool = False

    @property
    def mine(self) -> tuple[int, ...]:
        """The ranks of this rank's group."""
        me = rank_in()
        return next(members for members in self.ranks if me in members)


_defined: tuple[Any, dict[str, Defined]] = (None, {})
"""With all ranks of the job in which they were declared: another job has other ranks."""


def define_group(
    name: str, ranks: Sequence[Sequence[int]], divisor: int | None = None, *, is_whole: bool = False
) -> None:
    """Declares a group for parameters that are not the same on all data-parallel ranks.

    Every rank of the job must call it alike, before parameters of the group are built or an engine is made. Nothing is
    communicated. Declaring it again with the same ranks does nothing.

    Args:
        name: Its name, for ``zero.describe.put_in_group`` and ``in_group``, or a parameter's ``group_name``.
        ranks: The ranks of the job in lists: those of one list hold the same values and share them. Every rank is in
            exactly one list, lists are equally long, and the ranks of a list hold the same part of the model otherwise.
        divisor: See :class:`Defined`.
        is_whole: See :class:`Defined`.

    Raises:
        DeepSpeedConfigError: A rank is missing or occurs twice, lists are of unequal length, or the name is taken.
    """
    made = Defined(name, tuple(tuple(sorted(members)) for members in ranks), divisor, is_whole=is_whole)
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
    copies. Every rank of the job must call it alike, before an engine is made. Nothing is communicated.

    Args:
        name: Its name, for ``zero.describe.put_in_group``.
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
    _remember(Defined(name, (*lists, *alone), spans_parts=True, is_cut=is_cut))


def _remember(made: Defined) -> None:
    name = made.name
    known = _of_this_job().setdefault(name, made)
    if known != made:
        raise DeepSpeedConfigError(
            f"define_group({name!r}): the name is taken, by the ranks {[list(members) for members in known.ranks]}; "
            "choose another one"
        )


def defined_groups() -> Mapping[str, Defined]:
    """What has been declared in this job, by name, in the order of names."""
    return dict(sorted(_of_this_job().items()))


def connect_defined(
    defined: Defined, peers: Transport, use: str, *, device: torch.device | None, timeout: timedelta | None
) -> Transport:
    """A transport over this rank's group. Every rank of the job must call it, in the same order.

    Args:
        defined: The groups.
        peers: The ranks that make the same calls.
        use: What travels, in words.
        device: Where the buffers live.
        timeout: As of ``comm.connect.create_transport``.

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
        timeout: As of ``comm.connect.create_transport``.
    """
    members = defined.mine
    if (others := stand_in()) is not None:
        return others.transport(device, members) if len(members) > 1 else None
    made = create_transport(group_of(defined, device=device, timeout=timeout), device=device, timeout=timeout)
    made.axis = "pipe"
    return made if len(members) > 1 else None


def group_of(defined: Defined, *, device: torch.device | None = None, timeout: timedelta | None = None) -> Any:
    """This rank's torch process group of a declared group of copies. Every rank of the job must call it."""
    backend = backend_for(dist.group.WORLD, device)
    return my_group(defined.ranks, backend=backend, timeout=timeout, why=f"the copies {defined.name!r}")


def _of_this_job() -> dict[str, Defined]:
    global _defined
    job = this_job()
    if _defined[0] is not job:
        _defined = job, {}
    return _defined[1]
