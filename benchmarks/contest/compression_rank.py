"""One rank of ``benchmarks/compression.py``: trains a model whose gradients travel in one way; says what it took."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from links import sent_bytes, throttle_transport
from torch import nn


def model_of(millions: float) -> nn.Module:
    """Linear layers of 1024 columns, without biases."""
    torch.manual_seed(0)
    layers = [layer for _ in range(max(round(millions * 1e6 / 1024**2), 1)) for layer in _layer()]
    return nn.Sequential(*layers)


def _layer() -> list[nn.Module]:
    return [nn.Linear(1024, 1024, bias=False), nn.Tanh()]


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 1024, generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()


def ddp(told: dict[str, Any]) -> Callable[[int], None]:
    """torch's DDP in bf16 with fp32 masters left out: its hook is what is compared."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model_of(told["millions"]))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants types, not their names, or none
        return default_hooks.bf16_compress_hook(state, bucket)  # by that name DDP takes it on devices only

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        model(batch_of(number, dist.get_rank()).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(told: dict[str, Any]) -> Callable[[int], None]:
    """This project; the way is None, or one of communication_compression.gradients."""
    import deepspeed

    section = {} if told["way"] == "plain" else {"gradients": told["way"], "start_step": told.get("start_step", 0)}
    engine = deepspeed.initialize(
        model=model_of(told["millions"]),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": told["stage"]},
            "communication_data_type": "bf16",
            "gradient_clipping": 0.0,
            "communication_compression": section,
        },
    )[0]

    def step(number: int) -> None:
        engine.backward(engine(batch_of(number, dist.get_rank()).float()).square().mean())
        engine.step()

    return step


def main() -> None:
    told = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if told.get("throttle"):
        throttle_transport(told["throttle"])
    step = (ddp if told["kind"] == "ddp" else ours)(told)
    from deepspeed.comm.counters import traffic

    for number in range(told["warm"]):
        step(number)
    dist.barrier()
    took, before, booked = [], sent_bytes(), sum(tally.nbytes for tally in traffic.ran.values())
    processor = time.process_time()
    for number in range(told["steps"]):
        begun = time.perf_counter()
        step(told["warm"] + number)
        took.append(time.perf_counter() - begun)
    processor = time.process_time() - processor
    dist.barrier()
    booked = sum(tally.nbytes for tally in traffic.ran.values()) - booked
    print(
        "RESULT "
        + json.dumps(
            {
                "rank": int(os.environ["RANK"]),
                "median": statistics.median(took),
                "fastest": min(took),
                "processor": processor / told["steps"],
                "sent": (sent_bytes() - before) / told["steps"],
                "booked": booked / told["steps"],
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
