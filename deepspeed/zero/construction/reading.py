"""Builds sharded parameters whose values each rank reads for its own slice only."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from deepspeed import comm
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import Job
from deepspeed.zero.access.views import install_views
from deepspeed.zero.address import address_of, remember_class, set_address
from deepspeed.zero.construction.provisional import ProvisionalBucket
from deepspeed.zero.construction.sharing import ProvisionalGroups
from deepspeed.zero.tiling.layout import bucket_layout
from deepspeed.zero.tiling.tiles import Tile
from deepspeed.zero.untouched import untouched

Read = Callable[[int, int], torch.Tensor]
"""Reads elements ``[first, stop)`` of a flattened stored tensor: 1-D."""
_indices = itertools.count(1 << 24)  # apart from those of zero.Init and of engines


class SlicesFromFiles:
    """Replaces parameters on the meta device by slices on all ranks, without communication."""

    def __init__(self, dtype: torch.dtype, *, on_host: bool) -> None:
        if not comm.is_initialized():
            comm.init_distributed()
        self._dtype = dtype
        self._device = local_device()
        self._shard_device = torch.device("cpu") if on_host else self._device
        job, timeout = Job.adopt(), comm.default_timeout()
        peers = job.axis_of().transport("outside engines", device=self._device, timeout=timeout)
        self._groups = ProvisionalGroups(job, peers, self._device, timeout)

    @property
    def ranks(self) -> int:
        """Number of ranks that share each parameter."""
        return self._groups.peers.size

    def start(self, name: str, like: torch.nn.Parameter) -> torch.nn.Parameter:
        """Returns a sharded parameter in the place of one on the meta device, without its values."""
        install_views()
        group = self._groups.of(name, like)
        dtype = self._dtype if like.is_floating_point() else like.dtype
        layout = bucket_layout(
            next(_indices),
            [Tile(name, tuple(like.shape))],
            dtype=str(dtype).removeprefix("torch."),
            trainable=False,
            num_slices=group.size,
            group=group.name,
        )
        bucket = ProvisionalBucket(
            layout, dtype=dtype, device=self._device, shard_device=self._shard_device, group=group
        )
        made = torch.nn.Parameter(torch.empty(0, dtype=dtype, device=self._device), requires_grad=like.requires_grad)
        remember_class(made)
        set_address(made, bucket, 0)
        bucket.end_loan(0, made)
        return made

    def take(self, parameter: torch.nn.Parameter, first: int, numel: int, read: Read) -> None:
        """Reads the part of an interval of the flattened parameter that lies in this rank's slice."""
        address = address_of(parameter)
        assert address is not None
        fragment = address.bucket.fragment(address.tile)
        if fragment is None:
            return
        low, high = max(first, fragment.tile_start), min(first + numel, fragment.tile_stop)
        if low < high:
            at = fragment.slice_start + low - fragment.tile_start
            with untouched(), torch.no_grad():
                address.bucket.shard[at : at + high - low].copy_(read(low - first, high - first))
