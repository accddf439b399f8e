"""Placement: where each of the four model states of a parameter lives. A ZeRO stage is a row of this table.

+---------+---------------+------------+----------------------------+
| stage   | compute param | gradient   | master and optimizer state |
+=========+===============+============+============================+
| 0       | replicated    | replicated | replicated                 |
| 1       | replicated    | replicated | sharded                    |
| 2       | replicated    | sharded    | sharded                    |
| 3       | sharded       | sharded    | sharded                    |
+---------+---------------+------------+----------------------------+

Code asks the placement, never the stage number.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Home(Enum):
    """The memory that holds a tensor."""

    DEVICE = "device"
    HOST = "host"
    FILE = "file"


@dataclass(frozen=True)
class Placement:
    """Where the model states live over the data-parallel ranks.

    Attributes:
        stage: The row of the table, for messages and for the ecosystem's queries only.
        shard_params: Each rank keeps only its slice of the compute parameters between uses.
        shard_gradients: Each micro-batch's gradients are reduced to the owner at once.
        shard_master: Each rank keeps only its slice of the fp32 masters and of the optimizer state.
        param_home: Memory of the compute shards.
        master_home: Memory of masters, optimizer state and reduced gradients.
    """

    stage: int
    shard_params: bool
    shard_gradients: bool
    shard_master: bool
    param_home: Home = Home.DEVICE
    master_home: Home = Home.DEVICE

    @classmethod
    def of_stage(cls, stage: int) -> Placement:
        """The row of the table for ``stage`` (0, 1, 2 or 3)."""
        return cls(stage=stage, shard_params=stage >= 3, shard_gradients=stage >= 2, shard_master=stage >= 1)
