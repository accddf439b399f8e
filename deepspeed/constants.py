"""Constants under the import path of upstream."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from deepspeed import TORCH_DISTRIBUTED_DEFAULT_PORT

default_pg_timeout: timedelta  # see __getattr__
# Values of ``route`` in ``engine.deepspeed_io(dataset, route=...)``: the purpose of a data loader.
ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
# Variables that the launcher sets for each process: the number of its machine, and how many machines there are.
CROSS_RANK = "CROSS_RANK"
CROSS_SIZE = "CROSS_SIZE"

__all__ = ["CROSS_RANK", "CROSS_SIZE", "TORCH_DISTRIBUTED_DEFAULT_PORT", "default_pg_timeout"]


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name == "default_pg_timeout":  # read at each access, as DEEPSPEED_TIMEOUT sets it
            from deepspeed.comm import default_timeout

            return default_timeout()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
