"""Plans a training of the GPU benchmark: the peak of its device memory and its step time.

``python -m on_gpu.planned WHO SHAPE RANKS`` prints both as JSON; it needs no GPU, and runs while one is measured.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

import deepspeed
from deepspeed.accelerator.devices import device_of_product
from on_gpu.models import SHAPES, Shape, config_of, zero_of


def planned(shape: Shape, zero: dict[str, Any], ranks: int) -> dict[str, float | None]:
    """Returns ``planned``, the peak in decimal gigabytes, and ``predicted``, a step in milliseconds, on this GPU."""
    product = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    plan = deepspeed.plan(
        lambda: shape.build("meta"),
        config_of(shape, zero),
        devices_per_node=ranks,
        device=device_of_product(product) or "h100",
        inputs=lambda micro_batch, length: shape.batch("meta"),
        sequence_length=shape.length,
        suggest=False,
        compare_checkpointing=False,
        headroom=0.0,
    )
    step = plan.timed_step
    return {"planned": plan.device_bytes / 1e9, "predicted": None if step is None else 1e3 * step.seconds}


if __name__ == "__main__":
    who, name, ranks = sys.argv[1:]
    sys.stdout.write(json.dumps(planned(SHAPES[name], zero_of(who), int(ranks))) + "\n")
