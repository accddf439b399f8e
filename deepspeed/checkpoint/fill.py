"""Copies weights and buffers from a checkpoint into a model, each rank its own slices."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from deepspeed.checkpoint.format import COMPUTE, MASTER
from deepspeed.checkpoint.plan import FillEntry, ParameterMatch, fills, wanted_of
from deepspeed.checkpoint.source import CheckpointSource, Wanted
from deepspeed.errors import CheckpointError
from deepspeed.zero.bucket import Bucket, State
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.storage import distinct
from deepspeed.zero.tiling.layout import BucketLayout


class WeightFiller:
    """Fills one rank's masters and compute parameters; without ``use_masters`` masters from compute values.

    The most precise values are copied into the master (if there is one) and rounded into the compute parameter. If the
    checkpoint has separate compute values, they replace the rounded ones.
    """

    def __init__(
        self,
        runtime: ZeroRuntime,
        source: CheckpointSource,
        matches: Mapping[str, ParameterMatch],
        *,
        use_masters: bool = True,
    ) -> None:
        self._runtime = runtime
        self._source = source
        self._matches = matches
        self._use_masters = use_masters
        self._masters = {master.bucket.index: master for master in runtime.masters}

    def wanted(self) -> list[Wanted]:
        """Returns all that :meth:`fill` will read."""
        found = []
        for bucket in self._runtime.buckets:
            layout, rank, _, out = self._target(bucket)
            found += [entry.wanted for entry in fills(layout, rank, self._matches, None)]
            found += [entry.wanted for entry in self._overlays(layout, rank, out)]
        return found

    def check_state(self) -> None:
        """Raises CheckpointError if parameters are inside a ``GatheredParameters`` block and may not change."""
        for bucket in self._runtime.buckets:
            if bucket.is_sharded and bucket.state is not State.SHARDED:
                raise CheckpointError(
                    f"load_checkpoint: the parameters {bucket.label} are inside a GatheredParameters block; "
                    "load after the block"
                )

    @torch.no_grad()
    def fill(self) -> None:
        """Copies into this rank's slices.

        ``publish`` of ``zero.access.whole_buckets`` sends them to the other ranks.
        """
        for bucket in self._runtime.buckets:
            bucket.memory.forget()
            layout, rank, values, out = self._target(bucket)
            for entry in fills(layout, rank, self._matches, None):
                self._source.read(entry.wanted, values[entry.start : entry.stop])
            master = self._masters.get(bucket.index)
            if master is not None:
                master.publish()
            if out is not None:
                for entry in self._overlays(layout, rank, out):
                    self._source.read(entry.wanted, out[entry.start : entry.stop])
            if master is not None and not self._use_masters:
                master.refresh_all()

    def _target(self, bucket: Bucket) -> tuple[BucketLayout, int, torch.Tensor, torch.Tensor | None]:
        """Returns ``(layout, rank in it, what takes the best values, what takes compute values)``.

        The last may be None.
        """
        master = self._masters.get(bucket.index)
        if master is not None:
            return master.layout, master.rank, master.flat, master.out
        rank = bucket.transport.rank
        lower, upper = bucket.layout.slice_bounds(rank)
        values = bucket.shard if bucket.is_sharded else bucket.full.tensor[lower:upper]
        return bucket.layout, rank, values, values

    def _overlays(self, layout: BucketLayout, rank: int, out: torch.Tensor | None) -> list[FillEntry]:
        """Returns compute values that differ from the rounded master, where they fit the model's dtype."""
        if out is None:
            return []
        found = []
        for fragment in layout.fragments(rank):
            tile = layout.tiles[fragment.tile]
            entry = self._matches.get(tile.logical)
            if entry is None or entry.weights != MASTER or entry.saved.compute_dtype != out.dtype:
                continue
            whole = wanted_of(tile, COMPUTE, entry.saved.name, fragment.tile_start, fragment.tile_stop)
            for first, last in self._source.covered(whole):
                position = fragment.slice_start + first - fragment.tile_start
                found.append(FillEntry(position, position + last - first, whole._replace(start=first, stop=last)))
        return found


@torch.no_grad()
def load_buffers(source: CheckpointSource, names: Mapping[str, str], buffers: Mapping[str, torch.Tensor]) -> None:
    """Copies buffers in place; the checkpoint has them in the shapes of ``buffers``, or longer."""
    for name, saved in names.items():
        target, values = distinct(buffers[name]), source.read_buffer(saved)
        target.copy_(values[tuple(slice(size) for size in target.shape)])
