"""``TorchBackend``: the functions of :mod:`deepspeed.comm` as methods of an object."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed

from deepspeed.comm import collectives
from deepspeed.comm.start import process_group


class TorchBackend:
    """Joins the process group of the job, and has its collectives as methods.

    ``backend`` is torch's; the other arguments are as in :func:`deepspeed.init_distributed`. ``name`` is for the
    program.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        process_group.init_distributed(
            dist_backend=backend, timeout=timeout, init_method=init_method, rank=rank, world_size=world_size
        )

    def __getattr__(self, name: str) -> Any:
        for module in (collectives, process_group):
            if name in vars(module) and not name.startswith("_"):
                return vars(module)[name]
        raise AttributeError(f"TorchBackend has no attribute {name!r}; deepspeed.comm lists the functions")

    @staticmethod
    def get_all_gather_function() -> Callable[..., Any]:
        """Returns torch's gather into one tensor."""
        return torch.distributed.all_gather_into_tensor

    @staticmethod
    def get_reduce_scatter_function() -> Callable[..., Any]:
        """Returns torch's reduce-scatter of one tensor."""
        return torch.distributed.reduce_scatter_tensor
