"""Times tensor parallelism of a GPT on 2 CPU ranks: ours, hand-written layers, and torch's, in turns.

All contestants compute the same: forward and backward of one batch, with two all-reduces forward and two backward per
block. *hand* has local ``nn.Linear`` layers and ``dist.all_reduce`` in autograd functions; *torch* is
``parallelize_module`` with the same plan; *upstream* is AutoTP of the published package, with ``--peer-python``. Their
losses are compared before anything is timed.

    python benchmarks/tensor.py [--width 512 --layers 8 --length 256 --batch 2 --rounds 10 --steps 3]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

RANKS = 2
GOALS = {"hand": 1.03, "torch": 0.80, "upstream": 1.0}
"""Largest step time of ours, as a share of that of each other contestant."""
COLUMNS, ROWS = ("q", "k", "v", "rise"), ("o", "fall")


class Block(nn.Module):
    """A transformer block, or a rank's part of one.

    Args:
        width: Of the hidden states.
        heads: Of the block.
        parts: Ranks that share the block.
    """

    def __init__(self, width: int, heads: int, parts: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.num_heads = heads // parts
        for name in ("q", "k", "v"):
            setattr(self, name, nn.Linear(width, width // parts))
        self.o = nn.Linear(width // parts, width)
        self.rise, self.fall = nn.Linear(width, 4 * width // parts), nn.Linear(4 * width // parts, width)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def leave(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        inner = self.enter(self.norm1(x))
        q, k, v = (
            layer(inner).view(batch, length, self.num_heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.leave(self.o, mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + self.leave(self.fall, F.gelu(self.rise(self.enter(self.norm2(x)))))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class HandBlock(Block):
    """A rank's part of a block with hand-written collectives."""

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        return _Enter.apply(x)

    def leave(self, layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(F.linear(x, layer.weight)) + layer.bias


def stack(kind: type[Block], arguments: argparse.Namespace, parts: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(arguments.width, arguments.heads, parts) for _ in range(arguments.layers)))


def layer_specs() -> list[dict[str, Any]]:
    """Returns the plan as ``layer_specs`` of the configuration."""
    return [
        {"patterns": [rf".*\.{name}\.weight"], "partition_type": kind}
        for names, kind in ((COLUMNS, "column"), (ROWS, "row"))
        for name in names
    ]


def batch(arguments: argparse.Namespace) -> torch.Tensor:
    """Returns the inputs of all contestants, ``[batch, length, width]``."""
    shape = arguments.batch, arguments.length, arguments.width
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


def step(model: nn.Module, x: torch.Tensor) -> float:
    """Runs forward and backward; returns the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    return float(loss.detach())


class _Upstream:
    """A process with the published package that computes this rank's steps at each request."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        names = ("width", "heads", "layers", "length", "batch")
        script = Path(__file__).resolve().parent / "contest" / "autotp_rank.py"
        variables = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": arguments.peer_port, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": 1, "PYTHONPATH": "",
        }  # fmt: skip
        self._process = subprocess.Popen(
            [arguments.peer_python, str(script), *(f"{name}={getattr(arguments, name)}" for name in names)],
            env={**os.environ, **{name: str(value) for name, value in variables.items()}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if arguments.verbose else subprocess.DEVNULL,
            text=True,
        )

    def steps(self, count: int) -> tuple[float, float]:
        """Returns the milliseconds of a step and the loss."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline().split()
        if len(reply) != 2:
            raise RuntimeError("a rank of the published package has ended; --verbose shows its output")
        return float(reply[0]), float(reply[1])

    def close(self) -> None:
        self._process.communicate()


def _ours(arguments: argparse.Namespace, _rank: int) -> nn.Module:
    from deepspeed.comm.job import groups
    from deepspeed.comm.job.job import Job
    from deepspeed.comm.job.mesh import Mesh
    from deepspeed.config.sections.tensor_parallel import TensorParallel
    from deepspeed.parallel.tensor.cutting import cut_model

    model = stack(Block, arguments)
    mesh = Mesh((("tensor", RANKS),))
    groups.set_mesh(mesh)
    section = TensorParallel(autotp_size=RANKS, verify=False, partition_config={"layer_specs": layer_specs()})
    cut_model(Job.adopt(), model, section, mesh, torch.device("cpu"))
    for block in model:
        block.num_heads = arguments.heads // RANKS
    return model


def _hand(arguments: argparse.Namespace, rank: int) -> nn.Module:
    whole, model = stack(Block, arguments), stack(HandBlock, arguments, RANKS)
    with torch.no_grad():
        for mine, value in zip(model.parameters(), whole.parameters(), strict=True):
            cut = next((dim for dim in range(mine.dim()) if mine.shape[dim] != value.shape[dim]), None)
            mine.copy_(value if cut is None else value.chunk(RANKS, cut)[rank])
    return model


def _torch(arguments: argparse.Namespace, _rank: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model = stack(Block, arguments)
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in model:
        parallelize_module(block, init_device_mesh("cpu", (RANKS,)), plan)
        block.num_heads = arguments.heads // RANKS
    return model


CONTESTANTS: dict[str, Callable[[argparse.Namespace, int], nn.Module]] = {"ours": _ours, "hand": _hand, "torch": _torch}


def _run(rank: int, arguments: argparse.Namespace, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.rendezvous}", rank=rank, world_size=RANKS)
    models = {name: make(arguments, rank) for name, make in CONTESTANTS.items()}
    x = batch(arguments)
    peer = _Upstream(arguments, rank) if arguments.peer_python else None
    losses = {name: step(model, x) for name, model in models.items()}
    if peer is not None:
        losses["upstream"] = peer.steps(1)[1]
    expected = losses["hand"]
    wrong = {name: loss for name, loss in losses.items() if abs(loss - expected) > 1e-4 * abs(expected)}
    if wrong:
        raise AssertionError(f"expected the same loss of all contestants, found {losses}")
    times: dict[str, list[float]] = {name: [] for name in losses}
    for _ in range(arguments.rounds):
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(arguments.steps):
                step(model, x)
            times[name].append((time.perf_counter() - started) / arguments.steps * 1e3)
        if peer is not None:
            dist.barrier()
            times["upstream"].append(peer.steps(arguments.steps)[0])
    if rank == 0:
        results.update(times)
    if peer is not None:
        peer.close()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Prints the table; with ``--check`` the exit code shows whether the goals are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("width", 512), ("heads", 8), ("layers", 8), ("length", 256), ("batch", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=10, help="blocks per contestant")
    parser.add_argument("--steps", type=int, default=3, help="steps per block")
    parser.add_argument("--peer-python", help="Python of an environment with the published deepspeed")
    parser.add_argument("--verbose", action="store_true", help="show the output of the published package")
    parser.add_argument("--check", action="store_true", help="exit with code 1 unless every goal is met")
    arguments = parser.parse_args()
    from deepspeed.ports import free_port  # not above: autotp_rank.py imports this file beside another deepspeed

    with tempfile.TemporaryDirectory() as folder, mp.Manager() as manager:
        arguments.rendezvous, arguments.peer_port = f"{folder}/rendezvous", free_port()
        shared = manager.dict()
        mp.spawn(_run, args=(arguments, shared), nprocs=RANKS)
        times = {name: statistics.median(shared[name]) for name in dict(shared)}
    table = Table("contestant", "ms per step (median)", "ours / it", "goal")
    for name, value in times.items():
        table.add_row(
            name, f"{value:.1f}", f"{times['ours'] / value:.3f}", f"<= {GOALS[name]}" if name in GOALS else ""
        )
    Console().print(table)
    met = all(times["ours"] <= goal * times[name] for name, goal in GOALS.items() if name in times)
    return 1 if arguments.check and not met else 0


if __name__ == "__main__":
    sys.exit(main())
