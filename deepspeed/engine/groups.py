"""The groups of one engine: from the configuration, the program's mpu, and what was declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from deepspeed import comm
from deepspeed.axes import TENSOR
from deepspeed.comm.job.declared_groups import Defined
from deepspeed.comm.job.grid import create_grid, gathering_by_nodes
from deepspeed.comm.job.groups import get_tensor_model_parallel_group
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.comm.job.new_groups import Lease
from deepspeed.comm.transports.connect import warm_up
from deepspeed.comm.transports.transport import Transport
from deepspeed.engine.communication_compression import use_zero_plus_plus, with_codecs
from deepspeed.engine.zero_settings import gathers_by_nodes, gradient_divisor
from deepspeed.engine_feature import EngineSetup
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.group import BucketGroup, Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.tiling.describe import CUT, OFFLOADED, ROWS, describe, put_in_group
from deepspeed.zero.tiling.layout import DATA


def create_groups(
    placement: Placement,
    ranks: RankCoordinates,
    device: torch.device,
    *,
    by_nodes: bool,
    divisor: int | None = None,
    copies: Mapping[str, bool] = MappingProxyType({}),
) -> Groups:
    """Makes the groups. Every rank of the job must call it, in the same order.

    Args:
        placement: The ZeRO row.
        ranks: Where this rank stands.
        device: Where the buffers live.
        by_nodes: Gather in two steps where the ranks span nodes.
        divisor: What makes a mean of the sum of gradients; None: the number of data-parallel ranks.
        copies: Names of further groups of all data-parallel ranks: of parameters that some tensor-parallel ranks, but
            not all, have alike, and of frozen bases; and whether this rank counts among those that have them alike.

    Raises:
        DeepSpeedConfigError: Groups that cannot be used together.
    """
    with Job.current().process_groups.leased() as lease:
        return _groups_over(lease, placement, ranks, device, by_nodes=by_nodes, divisor=divisor, copies=copies)


def _groups_over(
    lease: Lease,
    placement: Placement,
    ranks: RankCoordinates,
    device: torch.device,
    *,
    by_nodes: bool,
    divisor: int | None,
    copies: Mapping[str, bool],
) -> Groups:
    """Makes the groups with the process groups of ``lease``; for the rest see :func:`create_groups`."""
    timeout = comm.default_timeout()
    divisor = ranks.data_size if divisor is None else divisor
    defined = Job.current().declared.defined()
    if placement.shard_ranks is not None:
        if others := (*defined, *copies):
            key = "zero_hpz_partition_size" if placement.spread_master else "mics_shard_size"
            raise DeepSpeedConfigError(
                f"zero_optimization.{key} {placement.shard_ranks} with {', '.join(map(_named, others))}: expected all "
                "parameters to be sharded over the same ranks, but these are sharded over ranks of their own. Leave "
                f"{key} out, or train without what it is combined with here"
            )
        grid = create_grid(
            placement.shard_ranks,
            group=ranks.zero_group,
            device=device,
            timeout=timeout,
            by_nodes=by_nodes,
            islands=ranks.islands,
        )
        owners = grid.positions if placement.spread_master else grid.gather
        return Groups.of(BucketGroup(DATA, grid.gather, grid.reduce, owners, grid.combine, divisor), lease=lease)
    gather, reduce = (
        Job.current().axis_of(ranks.zero_group).transport(device=device, timeout=timeout) for _ in range(2)
    )
    if by_nodes:
        gather = gathering_by_nodes(gather, gather, [range(gather.size)], device=device, timeout=timeout)
    data = BucketGroup(DATA, gather, reduce, gather, divisor=divisor)
    own = [_own_group(one, reduce, divisor, ranks, device) for one in defined.values() if not one.spans_parts]
    if ranks.model_size == 1:
        groups = Groups.of(data, *(replace(data, name=name) for name in copies), *own, lease=lease)
    else:
        # What is whole on tensor ranks counts on the first of them; of what is cut, every rank has something else.
        whole, cut = replace(data, counts=ranks.tensor_rank == 0), replace(data, name=CUT, is_part=True)
        shared = (replace(data, name=name, counts=counts, is_part=True) for name, counts in copies.items())
        tied = (_copies(one, cut if one.is_cut else whole, device) for one in defined.values() if one.spans_parts)
        parts = (whole, cut, *shared, *own, *tied)
        job = Job.current().axis_of(name="job").transport(device=device, timeout=timeout)
        tensor = get_tensor_model_parallel_group() if ranks.mesh.size(TENSOR) > 1 else None
        groups = Groups({group.name: group for group in parts}, reduce, job, tensor, lease)
    for transport in dict.fromkeys((gather, groups.job, *(group.gather for group in own))):
        warm_up(transport)
    return groups


def _named(group: str) -> str:
    """Returns a group of parameters, by what made it."""
    size = group.removeprefix("ep_size_")
    return f"expert layers of ep_size {size}" if size != group else f"the parameters of {group!r}"


def _copies(defined: Defined, data: BucketGroup, device: torch.device) -> BucketGroup:
    """Returns the group of weights that ranks with other parts of the model have too: the first of them counts."""
    combine = Job.current().declared.connect_copies(defined, device=device, timeout=comm.default_timeout())
    if combine is None:
        return replace(data, name=defined.name)
    counts = data.counts and combine.rank == 0
    return replace(data, name=defined.name, combine=combine, counts=counts, spans_parts=True)


def _own_group(
    defined: Defined, peers: Transport, divisor: int, ranks: RankCoordinates, device: torch.device
) -> BucketGroup:
    if defined.name in (DATA, CUT):
        raise DeepSpeedConfigError(f"define_group({defined.name!r}): the name is reserved; choose another one")
    gather, reduce = (
        Job.current().declared.connect(defined, peers, use, device=device, timeout=comm.default_timeout())
        for use in ("parameters", "gradients")
    )
    divisor = divisor if defined.divisor is None else defined.divisor
    counts = not defined.is_whole or ranks.tensor_rank == 0
    return BucketGroup(defined.name, gather, reduce, gather, divisor=divisor, counts=counts, ranks=defined.ranks)


def refuse_cut_tensors(
    optimizer: torch.optim.Optimizer | None, model: nn.Module, groups: Groups, placement: Placement
) -> None:
    """Raises where an optimizer needs whole tensors and would take parts, or parts of several groups, for them.

    LAMB needs norms only, which it adds over the tensor-parallel ranks too. Muon takes the tensors of each group by
    themselves. Every rank of the job must call it.

    Raises:
        NotYetSupportedError: The optimizer works on whole tensors, and parameters are in groups of their own.
    """
    if not callable(getattr(optimizer, "attach_segments", None)):
        return
    adds_norms = vars(type(optimizer)).get("_adds_norms_of_parts", False) and groups.other_parts is not None
    takes_tables = vars(type(optimizer)).get("_takes_tables_of_groups", False)
    parts = []
    for name, parameter in model.named_parameters():
        group = groups[groups.name_of(name, describe(name, parameter))]
        if group.is_part and not group.spans_parts and adds_norms:
            parts.append(f"{name}: a part of it, whose norms LAMB adds up")
        elif group.is_part or (group.name != DATA and placement.shard_master and not takes_tables):
            if group.name == ROWS:
                advice = ", Muon or ZeRO stage 0, or set sparse_gradients to false"
            else:
                advice = " (where only tensor parallelism cuts it, Lamb works too)"
            raise NotYetSupportedError(
                f"the optimizer {type(optimizer).__name__} works on whole tensors, but has {name!r} in the group "
                f"{group.name!r}, whose ranks hold a part of it or share it among themselves; use an optimizer that "
                f"works element by element, such as AdamW{advice}"
            )
    if adds_norms:
        comm.check_same_model(parts, groups.other_parts)


def _tables_of_rows(setup: EngineSetup, *, has_warm_up: bool) -> dict[str, bool]:
    """Puts the tables of embeddings into a group of their own, for ``sparse_gradients``; communicates nothing.

    Raises:
        DeepSpeedConfigError: Gradients are not sent as sums over data-parallel ranks alone.
    """
    problem = None
    if setup.ranks.model_size > 1:
        problem = f"tensor or pipeline parallelism (a model over {setup.ranks.model_size} ranks)"
    elif setup.ranks.islands > 1:
        problem = "islands"
    elif has_warm_up:
        problem = "an optimizer that exchanges momentum in the place of gradients"
    if problem is not None:
        raise DeepSpeedConfigError(
            f"sparse_gradients: expected gradients that are summed over data-parallel ranks, found {problem}. Set it "
            "to false"
        )
    tables = [
        (f"{name}.weight", module.weight)
        for name, module in setup.model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    ]
    found = [(name, table) for name, table in tables if describe(name, table).group == DATA]
    put_in_group([table for _, table in found], ROWS)  # type: ignore[misc]
    listed = ", ".join(dict.fromkeys(name for name, _ in found)) or "none, as the model has no embedding"
    log_dist(f"sparse_gradients: of these gradients only the non-zero rows are sent: {listed}")
    return {ROWS: True} if found else {}


def make_groups(
    setup: EngineSetup,
    placement: Placement,
    precision: PrecisionPolicy,
    optimizer: torch.optim.Optimizer | None,
    own: Mapping[str, bool],
    *,
    has_warm_up: bool,
) -> tuple[Groups, Placement]:
    """Makes the groups of an engine. Every rank of the job must call it.

    Args:
        setup: What was requested.
        placement: Where model states live, as far as the configuration says it.
        precision: Dtypes of what is sent.
        optimizer: The torch optimizer, or None.
        own: Groups of parameters that are sharded by themselves, and whether this rank counts in each.
        has_warm_up: Gradients are sent in the warm-up of the optimizer only.

    Returns:
        The groups, and the placement with the memory of frozen bases.

    Raises:
        DeepSpeedConfigError: Groups that cannot be used together.
        NotYetSupportedError: The optimizer needs whole tensors, of which ranks have parts.
    """
    root, ranks = setup.root, setup.ranks
    if root.sparse_gradients:
        own = {**own, **_tables_of_rows(setup, has_warm_up=has_warm_up)}
    groups = create_groups(
        placement,
        ranks,
        setup.device,
        by_nodes=gathers_by_nodes(root),
        divisor=gradient_divisor(root, ranks),
        copies=own,
    )
    if ROWS in groups.by_name and setup.device.type != "meta":  # a plan has no row numbers: it counts whole gradients
        rows = replace(groups[ROWS], reduces_rows=True)
        groups = replace(groups, by_name={**groups.by_name, ROWS: rows})
    groups = with_codecs(groups, root, precision, setup.device, has_warm_up=has_warm_up)
    groups = use_zero_plus_plus(groups, root.zero_optimization)
    placement = replace(placement, base_tier=Tier.HOST if OFFLOADED in own else Tier.DEVICE)
    refuse_cut_tensors(optimizer, setup.model, groups, placement)
    return groups, placement
