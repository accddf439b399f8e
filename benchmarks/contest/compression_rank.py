"""One rank of ``benchmarks/compression.py``: trains with each method in turns and prints times."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from contest.links import print_result, sent_bytes, throttle_transport

WIDTH = 1024


def numel_of(millions: float) -> int:
    """Returns the number of parameters of the model: whole layers, as near to ``millions`` as they come."""
    return max(round(millions * 1e6 / WIDTH**2), 1) * WIDTH**2


def model_of(millions: float) -> nn.Module:
    """Returns linear layers of width 1024 without biases."""
    torch.manual_seed(0)
    layers = [(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(numel_of(millions) // WIDTH**2)]
    return nn.Sequential(*(module for layer in layers for module in layer))


def batch_of(step: int, rank: int) -> torch.Tensor:
    """Returns the inputs of a rank at a step, bf16 ``[4, 1024]``."""
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).bfloat16()


def ddp(setup: dict[str, Any]) -> Callable[[int], None]:
    """Returns a step of torch's DDP in fp32 with its bf16 hook."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(model_of(setup["millions"]))

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and as text they differ
        return default_hooks.bf16_compress_hook(state, bucket)  # DDP refuses the hook itself on the CPU

    model.register_comm_hook(None, hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step(number: int) -> None:
        model(batch_of(number, dist.get_rank()).float()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(setup: dict[str, Any], method: str) -> Callable[[int], None]:
    """Returns a step of this project; the method is "plain", or one of communication_compression.gradients."""
    import deepspeed

    engine = deepspeed.initialize(
        model=model_of(setup["millions"]),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": setup["stage"]},
            "communication_data_type": "bf16",
            "gradient_clipping": 0.0,
            "communication_compression": {} if method == "plain" else {"gradients": method},
        },
    )[0]

    def step(number: int) -> None:
        engine.backward(engine(batch_of(number, dist.get_rank()).float()).square().mean())
        engine.step()

    return step


class Contestant:
    """One method with the times of its steps."""

    def __init__(self, step: Callable[[int], None], warm: int) -> None:
        self._step = step
        self._seconds: list[float] = []
        self.processor = self.sent = self.counted = 0.0
        for number in range(warm):
            step(number)
        self._number = warm

    def run(self) -> None:
        """Runs a step that all ranks begin together, and records its times and traffic."""
        from deepspeed.comm.base.counters import traffic

        def figures() -> tuple[float, ...]:
            counted = sum(tally.nbytes for tally in traffic.ran.values())
            return time.perf_counter(), time.process_time(), sent_bytes(), counted

        dist.barrier()
        before = figures()
        self._step(self._number)
        self._number += 1
        wall, *more = (now - then for now, then in zip(figures(), before, strict=True))
        self._seconds.append(wall)
        self.processor, self.sent, self.counted = (
            total + one for total, one in zip((self.processor, self.sent, self.counted), more, strict=True)
        )

    def result(self) -> dict[str, float]:
        """Returns seconds and bytes of a step."""
        steps = len(self._seconds)
        return {
            "median": statistics.median(self._seconds),
            "fastest": min(self._seconds),
            "processor": self.processor / steps,
            "sent": self.sent / steps,
            "counted": self.counted / steps,
        }


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    if setup["throttle"]:
        throttle_transport(setup["throttle"])
    dist.init_process_group("gloo")
    contestants = {}
    for method, warm in setup["methods"].items():
        # Each warms up alone, because "auto" chooses its codec by the times of these steps.
        contestants[method] = Contestant(ddp(setup) if method == "ddp" else ours(setup, method), warm)
    for _ in range(setup["steps"]):
        for contestant in contestants.values():
            contestant.run()
    dist.barrier()
    print_result({method: one.result() for method, one in contestants.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
