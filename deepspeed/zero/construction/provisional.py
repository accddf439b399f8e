"""Provisional buckets, one per module: they keep sharded parameters before there is an engine.

A provisional bucket has a flat layout cut over the ranks, as an engine's bucket, but no buffer for full values and no
states: parameters become full only in ``GatheredParameters``. ``deepspeed.initialize`` moves the values into the
final buckets (``zero.model_states``). A copied sharded parameter lives in such a bucket too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from deepspeed.accelerator.cpu import MallocTrimmer
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.zero.address import (
    Gatherer,
    Loan,
    ParameterBucket,
    State,
    mark_full,
    mark_sharded,
    plain_class,
    remember_class,
    set_address,
)
from deepspeed.zero.calls import compare_calls
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.tiling.assemble import scatter
from deepspeed.zero.tiling.layout import BucketLayout, Fragment, bucket_layout
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched

_trimmer = MallocTrimmer()
_indices = itertools.count(1 << 20)  # disjoint from engines' bucket numbers, with which copies are sorted


def copy_of(bucket: ParameterBucket) -> ProvisionalBucket:
    """Returns a provisional bucket with the present values of ``bucket``; communicates nothing."""
    tiles = tuple(replace(tile, name=f"copy of {tile.name}") for tile in bucket.layout.tiles)
    made = ProvisionalBucket(
        replace(bucket.layout, index=next(_indices), tiles=tiles),
        dtype=bucket.dtype,
        device=bucket.device,
        shard_device=bucket.shard.device,
        group=bucket.group,
    )
    made.shard.copy_(bucket.shard)
    if isinstance(bucket, ProvisionalBucket):
        made.gatherer = bucket.gatherer  # passes over the model reach its copied modules too
    return made


def copy_sharded(
    bucket: ParameterBucket, tile: int, parameter: torch.nn.Parameter, memo: dict[int, Any]
) -> torch.nn.Parameter:
    """Returns ``copy.deepcopy`` of a sharded parameter: one with the same values, in a bucket of no engine.

    Both classes of buckets have it as their method ``copy_parameter``. Parameters of one bucket that are copied
    together share the copy of the bucket. Needs no communication.
    """
    with untouched():
        if id(bucket) not in memo:
            memo[id(bucket)] = copy_of(bucket)
        made = torch.nn.Parameter(
            torch.empty(0, dtype=bucket.dtype, device=bucket.device), requires_grad=parameter.requires_grad
        )
        made.__class__ = plain_class(parameter)
        remember_class(made)
        set_address(made, memo[id(bucket)], tile)
        memo[id(bucket)].end_loan(tile, made)
        return made


class ProvisionalBucket:
    """Parameters that are sharded but belong to no engine."""

    def __init__(
        self,
        layout: BucketLayout,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard_device: torch.device,
        group: BucketGroup,
    ) -> None:
        self.layout = layout
        self.group = group
        self.loans: dict[int, Loan] = {}
        self.pins = 0
        self.gatherer: Gatherer | None = None
        self.dtype = dtype
        self.device = device
        self.is_sharded = group.size > 1
        self.is_partitioned = True
        self.state = State.SHARDED if self.is_sharded else State.FULL
        # On one rank the parameters keep what they have.
        self.shard = torch.zeros(layout.slice_numel if self.is_sharded else 0, dtype=dtype, device=shard_device)
        nbytes = self.shard.numel() * dtype.itemsize
        _ShardTotals.add(nbytes)
        weakref.finalize(self, _ShardTotals.add, -nbytes).atexit = False

    @property
    def owner(self) -> None:
        """None: no engine has the parameters."""

    @property
    def is_trained(self) -> bool:
        """Returns False: no engine has the parameters."""
        return False

    @property
    def transport(self) -> Transport:
        """Carries the parameters."""
        return self.group.gather

    def fragment(self, tile: int) -> Fragment | None:
        """Returns the fragment of a tile that lies in this rank's slice, or None."""
        return self.layout.fragment(tile, self.transport.rank)

    def as_gathered(self, fragment: Fragment) -> torch.Tensor:
        """Returns this rank's fragment of a parameter, 1-D; there is no codec that changes it."""
        return self.shard[fragment.in_slice]

    def keep_fragment(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes this rank's fragment of a parameter into the shard.

        Args:
            values: 1-D, of that fragment.
        """
        self.shard[fragment.in_slice].copy_(values)

    def start_loan(self, tile: int, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Makes one parameter full with values in a tensor of its own, in the parameter's shape."""
        mark_full(parameter, tensor, plain_class(parameter))

    def end_loan(self, tile: int, parameter: torch.nn.Parameter) -> None:
        """Undoes :meth:`start_loan`; the values of the loaned tensor are dropped."""
        mark_sharded(parameter, torch.empty(0, dtype=self.dtype, device=self.device))
        if self.device.type == "cpu":
            note_freed(self.layout.tiles[tile].numel * self.dtype.itemsize)

    copy_parameter = copy_sharded


class _ShardTotals:
    """Bytes of provisional shards of this process."""

    held = most = 0

    @classmethod
    def add(cls, nbytes: int) -> None:
        cls.held += nbytes
        cls.most = max(cls.most, cls.held)


def note_freed(nbytes: int) -> None:
    """Called when host memory of full parameters, or of shards that have moved on, was freed."""
    _trimmer.note(nbytes, _ShardTotals.most)


def shard_parameters(
    params: Sequence[torch.nn.Parameter],
    names: Sequence[str],
    *,
    group: BucketGroup,
    device: torch.device,
    dtype: torch.dtype | None,
    shard_device: torch.device | None = None,
    gatherer: Gatherer | None = None,
) -> None:
    """Shards full parameters into provisional buckets; the values of the group's first rank win.

    Every rank of the group must call it, with parameters of the same shapes.

    Args:
        params: Parameters with their values, the same on all ranks but for the values.
        dtype: The dtype of floating parameters from now on; None keeps each one's own.
        shard_device: Where the shards are kept; None: on ``device``.
        gatherer: Makes one of them full for code that uses it outside ``GatheredParameters``.
    """
    kinds: dict[torch.dtype, list[tuple[torch.nn.Parameter, str]]] = {}
    for parameter, name in zip(params, names, strict=True):
        wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        kinds.setdefault(wanted, []).append((parameter, name))
    with untouched(), torch.no_grad():
        described = [(name, tuple(p.shape), str(p.dtype)) for p, name in zip(params, names, strict=True)]
        compare_calls(group.gather, f"zero.Init shards {described}")
        for kind, members in kinds.items():
            bucket = _shard_kind(members, group, device, kind, shard_device or device)
            bucket.gatherer = gatherer


def _shard_kind(
    members: Iterable[tuple[torch.nn.Parameter, str]],
    group: BucketGroup,
    device: torch.device,
    dtype: torch.dtype,
    shard_device: torch.device,
) -> ProvisionalBucket:
    members = list(members)
    layout = bucket_layout(
        next(_indices),
        [Tile(name, tuple(parameter.shape)) for parameter, name in members],
        dtype=str(dtype).removeprefix("torch."),
        trainable=False,
        num_slices=group.size,
        group=group.name,
    )
    bucket = ProvisionalBucket(layout, dtype=dtype, device=device, shard_device=shard_device, group=group)
    transfers: list[TensorTransfer] = []
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    for tile, (parameter, _) in enumerate(members):
        remember_class(parameter)
        set_address(parameter, bucket, tile)
        if parameter.dtype != dtype or parameter.device != device:
            parameter.data = parameter.data.to(device=device, dtype=dtype)
        if not bucket.is_sharded:
            continue
        values = parameter.data.reshape(-1)
        fragment = bucket.fragment(tile)
        place = None if fragment is None else values[fragment.in_tile]
        if fragment is not None and place is not None:
            arriving.append((bucket.shard[fragment.in_slice], place))
        transfers += scatter(layout, tile, group.gather.rank, 0, values, place)
    if not bucket.is_sharded:
        return bucket
    group.gather.move(transfers, label=f"the first values of {layout.tiles[0].name}")
    for place, values in arriving:
        place.copy_(values)
    for tile, (parameter, _) in enumerate(members):
        bucket.end_loan(tile, parameter)
    return bucket
