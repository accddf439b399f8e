"""What torch.distributed knows of its groups beyond its public functions: the rendezvous store, and which are alive."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


def rendezvous_store() -> Any:
    """The store of the default process group, shared by all its ranks, or None without one."""
    return distributed_c10d._get_default_store() if dist.is_initialized() else None


def is_alive(group: Any) -> bool:
    """Whether ``group`` has not been destroyed."""
    return group in distributed_c10d._world.pg_map
