"""One rank of ``benchmarks/compression.py``: trains models whose gradients travel in different ways, a step of each in
turn, and prints what each took."""

from __future__ import annotations

import json
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


def ddp(setup: dict[str, Any]) -> Callable[[int], None]:
    """torch's DDP in bf16 with fp32 masters left out: its hook is what is compared."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(model_of(setup["millions"]))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP wants types, not their names, or none
        return default_hooks.bf16_compress_hook(state, bucket)  # by that name DDP takes it on devices only

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        model(batch_of(number, dist.get_rank()).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(setup: dict[str, Any], way: str) -> Callable[[int], None]:
    """This project; the way is "plain", or one of communication_compression.gradients."""
    import deepspeed

    engine = deepspeed.initialize(
        model=model_of(setup["millions"]),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": setup["stage"]},
            "communication_data_type": "bf16",
            "gradient_clipping": 0.0,
            "communication_compression": {} if way == "plain" else {"gradients": way},
        },
    )[0]

    def step(number: int) -> None:
        engine.backward(engine(batch_of(number, dist.get_rank()).float()).square().mean())
        engine.step()

    return step


class Contestant:
    """One way, and what its steps took."""

    def __init__(self, step: Callable[[int], None], warm: int) -> None:
        self._step = step
        self.took: list[float] = []
        self.processor = self.sent = self.counted = 0.0
        for number in range(warm):
            step(number)
        self._number = warm

    def run(self) -> None:
        """One step, after all ranks have come here."""
        from deepspeed.comm.transports.counters import traffic

        def figures() -> tuple[float, ...]:
            counted = sum(tally.nbytes for tally in traffic.ran.values())
            return time.perf_counter(), time.process_time(), sent_bytes(), counted

        dist.barrier()
        before = figures()
        self._step(self._number)
        self._number += 1
        wall, *more = (now - then for now, then in zip(figures(), before, strict=True))
        self.took.append(wall)
        self.processor, self.sent, self.counted = (
            total + one for total, one in zip((self.processor, self.sent, self.counted), more, strict=True)
        )

    def result(self) -> dict[str, float]:
        """Seconds and bytes of a step."""
        steps = len(self.took)
        return {
            "median": statistics.median(self.took),
            "fastest": min(self.took),
            "processor": self.processor / steps,
            "sent": self.sent / steps,
            "counted": self.counted / steps,
        }


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if setup.get("throttle"):
        throttle_transport(setup["throttle"])
    dist.init_process_group("gloo")
    contestants = {}
    for way, warm in setup["ways"].items():
        # One after the other: what is warmed up (auto chooses then) is not disturbed by the others.
        contestants[way] = Contestant(ddp(setup) if way == "ddp" else ours(setup, way), warm)
    for _ in range(setup["steps"]):
        for contestant in contestants.values():
            contestant.run()
    dist.barrier()
    print("RESULT " + json.dumps({way: one.result() for way, one in contestants.items()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
