"""The groups of expert-parallel layers: declared by their size, connected when they are first needed.

``ep_size_<n>`` names both the ranks that share the experts of a layer and those that hold the same ones. The latter are
a group that parameters name (``comm.job.declared_groups``): ZeRO shards among them. The former exchange tokens. The
layers of a model may have several sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.comm.job.declared_groups import Defined, connect_defined, define_group, defined_groups
from deepspeed.comm.job.expert_ranks import ExpertRanks, along_mesh, cut
from deepspeed.comm.job.mesh import EXPERT, Mesh
from deepspeed.comm.job.new_groups import my_group
from deepspeed.comm.job.world import rank_in, size_of, stand_in
from deepspeed.comm.start.process_group import default_timeout
from deepspeed.comm.transports.connect import shared_transport
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import CallOrderError, DeepSpeedConfigError


@dataclass
class _Size:
    """One size of expert-parallel layers.

    Attributes:
        ranks: All of the job.
        transport: Carries tokens; None before it is needed.
        groups: Torch's process groups: of the ranks that share the experts, and of those that hold the same.
    """

    ranks: ExpertRanks
    transport: Transport | None = None
    groups: tuple[Any, Any] | None = None


_sizes: tuple[Any, dict[int, _Size]] = (None, {})
"""With all ranks of the job in which they were declared: another job has other ranks."""


def group_name(ep_size: int) -> str:
    """The name of the groups of layers whose experts ``ep_size`` ranks share."""
    return f"ep_size_{ep_size}"


def declare_experts(
    ep_size: int, *, mesh: Mesh | None = None, dense: Sequence[Sequence[int]] = (), data_first: bool | None = None
) -> ExpertRanks:
    """Declares the groups of a size. Every rank of the job must call it alike; nothing is communicated.

    A size that is declared keeps its ranks, unless ``data_first`` asks for others, until the engines that use it are
    destroyed.

    Args:
        ep_size: Ranks that share the experts of a layer.
        mesh: Of the job; None: see ``dense``.
        dense: Lists of the ranks that hold the same part of the rest of the model; empty: all ranks do.
        data_first: See ``comm.job.expert_ranks.cut``; None: as declared before, or else False.

    Raises:
        DeepSpeedConfigError: The size does not divide the ranks, or is declared with other ones.
    """
    known = _of_this_job()
    if ep_size in known and data_first is None:
        _define(ep_size, known[ep_size].ranks)
        return known[ep_size].ranks
    if mesh is not None:
        ranks = along_mesh(mesh, ep_size, data_first=bool(data_first))
    else:
        ranks = cut(dense or [range(size_of())], ep_size, data_first=bool(data_first))
    if ep_size in known and known[ep_size].ranks != ranks:
        raise DeepSpeedConfigError(
            f"the experts of layers with ep_size {ep_size} are shared by the ranks {_shown(known[ep_size].ranks)}, as "
            f"was decided before, and now by {_shown(ranks)}; set use_data_before_expert_parallelism alike everywhere, "
            "and under zero.Init or before the groups are made by hand leave it out. If an engine that is no longer "
            "needed decided it, call its destroy() first"
        )
    _define(ep_size, ranks)
    known.setdefault(ep_size, _Size(ranks))
    return ranks


def _define(ep_size: int, ranks: ExpertRanks) -> None:
    if ep_size > 1:  # else every rank has all experts, as it has all other parameters
        define_group(group_name(ep_size), ranks.same, is_whole=True, lasts=False)


def declared_sizes(*, made: bool = False) -> list[int]:
    """The sizes that are declared in this job, smallest first; with ``made`` those whose process groups exist."""
    return sorted(size for size, entry in _of_this_job().items() if entry.groups is not None or not made)


def connect_experts(ep_size: int, device: torch.device | None = None) -> Transport:
    """What carries tokens between the ranks that share experts. Every rank of the job must call it, in one order.

    It is made once; all layers and engines share it, as every rank runs them in the same order.

    Args:
        ep_size: See :func:`declare_experts`, which must have been called.
        device: Where the tokens are.
    """
    size = _declared(ep_size)
    if size.transport is None:
        peers = shared_transport(device=device, timeout=default_timeout())
        # Not the torch group that programs get: theirs is for their own collectives.
        sharing = Defined(f"expert parallel, {ep_size}", size.ranks.sharing)
        size.transport = connect_defined(sharing, peers, "tokens", device=device, timeout=default_timeout())
        size.transport.owner, size.transport.axis = peers.owner, EXPERT
    return size.transport


def make_torch_groups(ep_size: int) -> None:
    """Makes the process groups that :func:`torch_groups` answers. Every rank of the job must call it, in one order."""
    size = _declared(ep_size)
    if size.groups is None and stand_in() is None and dist.is_initialized():
        backend = dist.get_backend_config(dist.group.WORLD)

        def made(members: Sequence[Sequence[int]], why: str) -> Any:
            return my_group(members, backend=backend, timeout=default_timeout(), why=why, is_for_programs=True)

        sharing, same = size.ranks
        size.groups = (
            made(sharing, f"ranks that share experts, {ep_size} at a time"),
            made(same, f"ranks that hold the same experts, of {ep_size}"),
        )


def torch_groups(name: str) -> tuple[Any, Any]:
    """This rank's process groups: of those that share experts, and of those that hold the same.

    Args:
        name: ``ep_size_<n>``.

    Raises:
        CallOrderError: They have not been made.
    """
    number = name.rpartition("_")[2]
    size = _of_this_job().get(int(number)) if number.isdecimal() and name == group_name(int(number)) else None
    if size is None or size.groups is None:
        made = ", ".join(group_name(n) for n, entry in sorted(_of_this_job().items()) if entry.groups is not None)
        raise CallOrderError(
            f"the expert group {name!r} does not exist yet; known are {made or 'none'}. deepspeed.initialize makes the "
            "groups of the model's layers; groups._create_expert_and_data_parallel makes one by itself"
        )
    return size.groups


def ranks_of(name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ranks of the job in this rank's two groups, as :func:`torch_groups`."""
    ranks = _declared(int(name.rpartition("_")[2])).ranks
    me = rank_in()
    return (
        next(members for members in ranks.sharing if me in members),
        next(members for members in ranks.same if me in members),
    )


def _shown(ranks: ExpertRanks) -> str:
    return ", ".join(str(list(members)) for members in ranks.sharing[:4]) + (", ..." if ranks.sharing[4:] else "")


def _declared(ep_size: int) -> _Size:
    known = _of_this_job()
    if ep_size not in known:
        raise CallOrderError(
            f"expert-parallel groups of {ep_size} ranks are not declared; call comm.expert_groups.declare_experts or "
            "deepspeed.initialize first"
        )
    return known[ep_size]


def _of_this_job() -> dict[int, _Size]:
    global _sizes
    job = stand_in() or (dist.group.WORLD if dist.is_initialized() else None)
    if _sizes[0] is not job:
        _sizes = job, {}
    known, defined = _sizes[1], defined_groups()
    for size in [size for size in known if size > 1 and group_name(size) not in defined]:
        del known[size]  # the engines that used it are gone
    return known
