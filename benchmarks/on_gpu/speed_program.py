"""``python -m on_gpu.speed_program WHO SHAPE``: trains a GPT on one rank, and prints seconds, memory and waits."""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
from contest.contestants import fully_sharded

from on_gpu.models import SHAPES, Step, engine_step, torch_step, zero_of
from on_gpu.part import timed, waiter


def main(who: str, name: str) -> None:
    """Measures, and prints the JSON."""
    shape, device = SHAPES[name], "cuda" if torch.cuda.is_available() else "cpu"
    step = make_step(who, name, device)
    batch = shape.batch(device)
    is_small = name == "tiny"
    wait = waiter(device)
    for _ in range(2):
        step(batch)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = timed(lambda: step(batch), warmup=1 if is_small else 3, steps=3 if is_small else 10, wait=wait)
    found = {
        "seconds": seconds,
        "tokens": shape.tokens,
        "peak": torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None,
        "waits": host_waits(lambda: step(batch)) if device == "cuda" else None,
    }
    sys.stdout.write(json.dumps(found) + "\n")


def make_step(who: str, name: str, device: str) -> Step:
    """Returns the step of ``torch``, ``ddp``, ``fsdp2``, ``ours-STAGE[-host]`` or ``upstream-STAGE[-host]``."""
    shape = SHAPES[name]
    model = shape.build(device)
    if who.startswith(("ours", "upstream")):
        return engine_step(model, shape, zero_of(who))[0]
    if who == "torch":
        return torch_step(model, autocast=True)
    store = tempfile.mktemp(prefix="speed-")
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=0, world_size=1)
    if who == "fsdp2":
        return torch_step(fully_sharded(model, device, 1), autocast=False)
    return torch_step(torch.nn.parallel.DistributedDataParallel(model), autocast=True)


def host_waits(step: object) -> int:
    """Returns how often a step makes the host wait for the device, by the number of torch's warnings about it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()  # type: ignore[operator]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
    if dist.is_initialized():
        dist.destroy_process_group()
