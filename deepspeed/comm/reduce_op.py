"""The reductions, under the names that callers of ``deepspeed.comm`` use."""

from __future__ import annotations

import enum
from typing import Any

import torch.distributed as torch_dist


class _UnsupportedOp(enum.Enum):
    """A reduction that nothing performs; a placeholder in tables of operations."""

    UNUSED = "unused"


class ReduceOp:
    """Reductions. The members are torch's own, so either may be passed to either library's functions."""

    SUM: Any = torch_dist.ReduceOp.SUM
    PRODUCT: Any = torch_dist.ReduceOp.PRODUCT
    MIN: Any = torch_dist.ReduceOp.MIN
    MAX: Any = torch_dist.ReduceOp.MAX
    BAND: Any = torch_dist.ReduceOp.BAND
    BOR: Any = torch_dist.ReduceOp.BOR
    BXOR: Any = torch_dist.ReduceOp.BXOR
    AVG: Any = torch_dist.ReduceOp.AVG
    UNUSED: Any = _UnsupportedOp.UNUSED
