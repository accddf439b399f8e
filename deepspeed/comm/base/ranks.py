"""World size, rank and backend from ``torch.distributed``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as torch_dist


class Ranks:
    """The ranks of torch's default process group, and of its other groups.

    ``comm.job.fake`` has a subclass for ranks that do not exist.
    """

    operations: Any = torch_dist  # has the collectives of ``torch.distributed``, under their names

    @property
    def world(self) -> Any:
        """The process group of all ranks; None before it is started."""
        return torch_dist.group.WORLD

    def is_initialized(self) -> bool:
        """Returns whether the job has more than one rank."""
        return torch_dist.is_initialized()

    def rank_in(self, group: Any = None) -> int:
        """Returns this process's rank in ``group`` (None: among all)."""
        return torch_dist.get_rank(group)

    def size_of(self, group: Any = None) -> int:
        """Returns the number of ranks in ``group`` (None: of all)."""
        return torch_dist.get_world_size(group)

    def ranks_of(self, group: Any = None) -> list[int]:
        """Returns the numbers in the job of the members of ``group`` (None: all), in its order."""
        return list(range(self.size_of())) if group is None else torch_dist.get_process_group_ranks(group)

    def backend_of(self, group: Any = None) -> str:
        """Returns the backend of ``group`` (None: of all ranks)."""
        return torch_dist.get_backend(group)

    def backend_for(self, group: Any, device: torch.device | None) -> str:
        """Returns the backend for tensors of ``device``: ``gloo`` for the CPU of ``cpu:gloo,cuda:nccl``."""
        kind = device.type if device is not None else "cpu"
        by_device = dict(entry.split(":", 1) for entry in self.backends_of(group).split(",") if ":" in entry)
        return by_device.get(kind) or self.backend_of(group)

    def backends_of(self, group: Any = None) -> str:
        """Returns the backends of ``group`` by device, as ``torch.distributed.new_group`` takes them."""
        return torch_dist.get_backend_config(group)
