"""The key-value store through which the ranks met."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def rendezvous_store() -> Any:
    """The store of the default process group, shared by all its ranks, or None without one."""
    return distributed_c10d._get_default_store() if dist.is_initialized() else None
