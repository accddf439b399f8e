"""Plans a training of the GPU benchmark: the peak of its device memory and its step time.

``python -m on_gpu.planned WHO SHAPE RANKS`` prints both as JSON. It does not use the GPU, so it can run beside a
measurement.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from contest.contestants import engine_config

import deepspeed
from deepspeed.accelerator.devices import device_of_product
from on_gpu.models import CLIP, SHAPES, Shape, zero_of


def planned(shape: Shape, zero: dict[str, Any], ranks: int) -> dict[str, float | None]:
    """Returns ``planned``, the peak in GB (10^9 bytes), and ``predicted``, a step in ms, for this GPU or an H100."""
    product = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    plan = deepspeed.plan(
        lambda: shape.build("meta"),
        engine_config(zero, shape.micro_batch, CLIP),
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
