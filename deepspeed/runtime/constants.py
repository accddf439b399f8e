"""What a data loader is for, as ``engine.deepspeed_io(dataset, route=...)`` takes it."""

from __future__ import annotations

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"
