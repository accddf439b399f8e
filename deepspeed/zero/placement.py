"""Placement: where each of the four model states of a parameter lives. A ZeRO stage is a row of this table.

+---------+---------------+----------------------+------------------+----------------------------+
| stage   | compute param | gradient between     | gradient that    | master and optimizer state |
|         |               | micro-batches        | the update reads |                            |
+=========+===============+======================+==================+============================+
| 0       | replicated    | each rank's own sum  | replicated       | replicated                 |
| 1       | replicated    | each rank's own sum  | sharded          | sharded                    |
| 2       | replicated    | sharded              | sharded          | sharded                    |
| 3       | sharded       | sharded              | sharded          | sharded                    |
+---------+---------------+----------------------+------------------+----------------------------+

If gradients are sent by a lossy codec (``comm.codecs.codec``), there is a further state, *private*: the error feedback
of each rank. It has the full length at every stage, differs between ranks, and is never compared or gathered.
Checkpoints keep it for runs of the same size.

Offload chooses another tier for what is sharded: masters, optimizer state and reduced gradients (``master_tier``), at
stage 3 also the compute parameters (``param_tier``), and at every stage the frozen ones that are described so
(``base_tier``). Code reads the placement, never the stage number or the config.

"Sharded" means over all data-parallel ranks, unless only ``shard_ranks`` neighbors share. The others
then hold the same (``comm.job.grid``), and stage 3 has two more rows:

+---------+---------------+--------------+----------------------------+
|         | compute param | gradient     | master and optimizer state |
+=========+===============+==============+============================+
| MiCS    | neighbors     | neighbors    | neighbors                  |
| hpZ     | neighbors     | all          | all                        |
+---------+---------------+--------------+----------------------------+

Stages 0 and 2 are these two rows with one neighbor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.zero.tiling.describe import OFFLOADED, SHARED
from deepspeed.zero.tiling.layout import ModelLayout


class Tier(Enum):
    """The memory that holds a tensor."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"

    __hash__ = object.__hash__  # as of Kind


_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.FILE}
"""The tiers by the name of a device in the configuration."""


@dataclass(frozen=True)
class BucketPlacement:
    """Lists where the states of one bucket are kept.

    Attributes:
        is_sharded: Whether the full compute parameters exist only while they are used.
        param_tier: Memory of the compute parameters between uses.
        master_tier: Memory of master and optimizer state.
        gradient_tier: Memory of the reduced gradient.
    """

    is_sharded: bool
    param_tier: Tier
    master_tier: Tier

    @property
    def gradient_tier(self) -> Tier:
        """The tier of the masters: only the update reads reduced gradients."""
        return Tier.DEVICE if self.master_tier is Tier.DEVICE else Tier.HOST


@dataclass(frozen=True)
class Placement:
    """Describes how the model states are placed over the data-parallel ranks."""

    stage: int  # the row of the table, for messages and for the ecosystem's queries only
    shard_params: bool  # each rank keeps only its slice of the compute parameters between uses
    shard_gradients: bool  # each micro-batch's gradients are reduced to the owner at once
    shard_master: bool  # each rank keeps only its slice of the fp32 masters and of the optimizer state
    param_tier: Tier = Tier.DEVICE  # memory of the compute shards
    master_tier: Tier = Tier.DEVICE  # memory of masters, optimizer state and (unless on the device) reduced gradients
    # share of the trained elements whose master is in ``master_tier``; the rest is on the device
    offloaded_share: float = 1.0
    max_host_params: int = 0  # elements of compute shards that stay in host memory before files are used
    shard_ranks: int | None = None  # neighbors that share the compute parameters; None: all ranks
    spread_master: bool = False  # with ``shard_ranks``: gradients, masters and optimizer state are cut over all ranks
    # masters in host memory are updated before the norm is known, in a second set of them and of their optimizer state
    speculates: bool = False
    base_tier: Tier = Tier.DEVICE  # memory of the shards of frozen parameters in the group ``describe.OFFLOADED``
    narrow_masters: bool = False  # masters of 16-bit parameters have their dtype, and so have their reduced gradients
    narrow_states: bool = False  # optimizer states of such masters have it too

    @classmethod
    def of_section(cls, zero: ZeroOptimization, ranks: int | None = None) -> Placement:
        """Returns the placement that ``zero_optimization`` requests.

        Args:
            ranks: Data-parallel ranks; None: unknown, so that settings for several groups are left out.
        """
        optimizer, param = zero.offload_optimizer, zero.offload_param
        neighbors = zero.mics_shard_size if zero.mics_shard_size > 0 else zero.zero_hpz_partition_size
        is_grid = ranks is not None and 1 < neighbors < ranks
        return cls.of_stage(
            zero.stage,
            param_tier=_TIERS[param.device] if param is not None else Tier.DEVICE,
            master_tier=_TIERS[optimizer.device] if optimizer is not None else Tier.DEVICE,
            offloaded_share=optimizer.ratio if optimizer is not None else 1.0,
            max_host_params=param.max_in_cpu if param is not None else 0,
            shard_ranks=neighbors if is_grid else None,
            spread_master=is_grid and zero.mics_shard_size <= 0,
            speculates=optimizer is not None and optimizer.super_offload,
        )

    @classmethod
    def of_stage(
        cls,
        stage: int,
        *,
        param_tier: Tier = Tier.DEVICE,
        master_tier: Tier = Tier.DEVICE,
        offloaded_share: float = 1.0,
        max_host_params: int = 0,
        shard_ranks: int | None = None,
        spread_master: bool = False,
        speculates: bool = False,
    ) -> Placement:
        """Returns the row of the table for ``stage`` (0, 1, 2 or 3), with other tiers for what that stage shards."""
        return cls(
            stage=stage,
            shard_params=stage >= 3,
            shard_gradients=stage >= 2,
            shard_master=stage >= 1,
            param_tier=param_tier if stage >= 3 else Tier.DEVICE,
            master_tier=master_tier if stage >= 1 else Tier.DEVICE,
            offloaded_share=offloaded_share,
            max_host_params=max_host_params,
            shard_ranks=shard_ranks if stage >= 3 else None,
            spread_master=spread_master and stage >= 3 and shard_ranks is not None,
            speculates=speculates and stage >= 1 and master_tier is Tier.HOST,
        )

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Every tier in use, the device first."""
        used = {Tier.DEVICE, self.param_tier, self.base_tier, self.master_tier}
        if used != {Tier.DEVICE}:
            used.add(Tier.HOST)
        return tuple(tier for tier in Tier if tier in used)

    def of_buckets(self, layout: ModelLayout) -> tuple[BucketPlacement, ...]:
        """Returns the placement of each bucket.

        With several ranks a bucket is sharded where the stage shards, and at every stage if its parameters are
        described as shared or offloaded; with one, only where its parameters leave the device. Masters leave the device
        in model order until their share is reached; compute shards fill the allowed host memory in model order before
        they go into files.
        """
        placed = []
        trained = sum(bucket.numel for bucket in layout.buckets if bucket.trainable)
        moved = host = 0
        for bucket in layout.buckets:
            master_tier = Tier.DEVICE
            if bucket.trainable:
                if moved < self.offloaded_share * trained:
                    master_tier = self.master_tier
                moved += bucket.numel
            is_base = bucket.group in (SHARED, OFFLOADED) and not bucket.trainable
            tier = self.base_tier if is_base and bucket.group == OFFLOADED else self.param_tier
            wanted = self.shard_params and bucket.index not in layout.persistent
            is_sharded = (bucket.num_slices > 1 or tier is not Tier.DEVICE) and (wanted or is_base)
            param_tier = tier if is_sharded else Tier.DEVICE
            if param_tier is Tier.FILE and host + bucket.slice_numel <= self.max_host_params:
                param_tier = Tier.HOST
                host += bucket.slice_numel
            placed.append(BucketPlacement(is_sharded, param_tier, master_tier))
        return tuple(placed)

    def of_unfrozen(
        self, layout: ModelLayout, placed: Sequence[BucketPlacement], index: int
    ) -> tuple[BucketPlacement, ...]:
        """Returns the placements after a frozen bucket starts to be trained; the others do not change.

        Its master leaves the device if those that are there have not reached their share.
        """
        trained = moved = 0
        for bucket, at in zip(layout.buckets, placed, strict=True):
            if bucket.trainable:
                trained += bucket.numel
                moved += bucket.numel if at.master_tier is not Tier.DEVICE else 0
        tier = self.master_tier if moved < self.offloaded_share * trained else Tier.DEVICE
        return (*placed[:index], replace(placed[index], master_tier=tier), *placed[index + 1 :])
