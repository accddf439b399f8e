"""Times a mixture-of-experts layer, forward and backward, beside other implementations of the same.

    .venv/bin/python benchmarks/experts.py                              # one rank: about 4 minutes
    .venv/bin/python benchmarks/experts.py --ep 2 --peer-python ../peer/bin/python
    .venv/bin/python benchmarks/experts.py --tokens 64 --rounds 2 --experts 8 --top-k 1   # does it run?

Every contestant has a process per rank, with one thread. They take turns, in a new order each round, so that other load
of the machine affects all alike. All have the same gate, tokens and routes. `ours` and `upstream` are the layers of
this package and of the published one; `-drop` drops tokens at capacity factor 1, the others drop none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from contest.turns import Contestant, answer, requests

LOCAL = ("ours", "ours-drop", "loop", "grouped", "masked", "dense")
PEER = ("upstream", "upstream-drop")
RIVALS = {"ours": ("upstream", "loop", "grouped", "masked"), "ours-drop": ("upstream-drop",)}


# -- one contestant: a process that computes at each request ---------------------------------------------------


def work(name: str, shape: dict[str, int], rank: int, rendezvous: str) -> None:
    """Answers each request with the seconds of one forward and backward: wall and processor time."""
    import torch

    torch.set_num_threads(1)
    if shape["ep"] > 1:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=shape["ep"]
        )
    torch.manual_seed(0)
    layer = build(name, shape, rendezvous)
    x = torch.randn(
        shape["tokens"], shape["hidden"], generator=torch.Generator().manual_seed(7 + rank), requires_grad=True
    )
    for _ in requests():
        if shape["ep"] > 1:
            torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        out = layer(x)
        out.backward(out.detach())
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        for parameter in (x, *layer.parameters()):
            parameter.grad = None
        answer(*seconds)


def build(name: str, shape: dict[str, int], rendezvous: str) -> Any:
    """Returns the contestant's layer, from ``[tokens, hidden]`` to ``[tokens, hidden]``."""
    import torch
    from torch import nn

    hidden, inner, experts, k = (shape[key] for key in ("hidden", "inner", "experts", "k"))
    if name.startswith(("ours", "upstream")):
        import deepspeed
        from deepspeed.moe.layer import MoE

        is_ours = "parallel" in os.listdir(os.path.dirname(deepspeed.__file__))
        assert is_ours == name.startswith("ours"), f"{name} imported {deepspeed.__file__}"
        if not is_ours:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=0, world_size=1)
            deepspeed.init_distributed("gloo")
        layer = MoE(
            hidden,
            nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden)),
            experts,
            shape["ep"],
            k,
            use_rts=False,
            drop_tokens=name.endswith("-drop"),
            top2_2nd_expert_sampling=False,
        )
        layer.set_deepspeed_parallelism()

        class First(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = layer

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = self.layer(x)[0]
                return result

        return First()
    return _torch_layer(name, hidden, inner, experts, k)


def _torch_layer(name: str, hidden: int, inner: int, experts: int, k: int) -> Any:
    """Returns a layer in torch alone: a loop over routes sorted by expert, ``grouped_mm``, masks, or a dense layer."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class TorchLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(hidden, experts, bias=False)
            self.up = nn.Parameter(torch.randn(experts, inner, hidden) * 0.02)
            self.up_bias = nn.Parameter(torch.zeros(experts, inner))
            self.down = nn.Parameter(torch.randn(experts, hidden, inner) * 0.02)
            self.down_bias = nn.Parameter(torch.zeros(experts, hidden))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "dense":
                rows = x.repeat(k, 1)
                made = F.linear(F.gelu(F.linear(rows, self.up[0], self.up_bias[0])), self.down[0], self.down_bias[0])
                return made.view(k, *x.shape).sum(0)
            weights, index = torch.softmax(self.gate(x), dim=1).topk(k, dim=1)
            if k > 1:
                weights = weights / weights.sum(dim=1, keepdim=True)
            return self.masked(x, weights, index) if name == "masked" else self.sorted(x, weights, index)

        def masked(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            out = torch.zeros_like(x)
            parts = zip(*(t.unbind(0) for t in (self.up, self.up_bias, self.down, self.down_bias)), strict=True)
            for expert, (up, up_bias, down, down_bias) in enumerate(parts):
                token, choice = torch.where(index == expert)
                made = F.linear(F.gelu(F.linear(x[token], up, up_bias)), down, down_bias)
                out = out.index_add(0, token, made * weights[token, choice, None])
            return out

        def sorted(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            flat = index.reshape(-1)
            order = flat.argsort(stable=True)
            token = order // k
            counts = torch.bincount(flat, minlength=experts)
            rows = x[token]
            if name == "grouped":
                ends, owner = counts.cumsum(0).to(torch.int32), flat[order]
                middle = F.gelu(F.grouped_mm(rows, self.up.transpose(1, 2), offs=ends) + self.up_bias[owner])
                made = F.grouped_mm(middle, self.down.transpose(1, 2), offs=ends) + self.down_bias[owner]
            else:
                parts = zip(
                    rows.split(counts.tolist()),
                    *(t.unbind(0) for t in (self.up, self.up_bias, self.down, self.down_bias)),
                    strict=True,
                )
                made = torch.cat([F.linear(F.gelu(F.linear(r, u, a)), d, b) for r, u, a, d, b in parts])
            return torch.zeros_like(x).index_add(0, token, made * weights.reshape(-1)[order, None])

    return TorchLayer()


# -- the contest -------------------------------------------------------------------------------------------------------


def _slowest(contestant: Contestant) -> tuple[float, float]:
    """Runs one forward and backward; returns the wall and the processor seconds of the slowest rank."""
    rows = contestant.turn()
    return max(row[0] for row in rows), max(row[1] for row in rows)


def contest(shape: dict[str, int], names: list[str], options: argparse.Namespace) -> None:
    """Runs the contestants and prints their table."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="experts-") as folder:
        contestants = {}
        for name in names:
            python = options.peer_python if name in PEER else sys.executable
            contestants[name] = Contestant(__file__, name, shape, shape["ep"], folder, python)
        for number in range(options.rounds + 1):
            for name in random.sample(names, len(names)):
                contestants[name].turn()  # the caches have the data of the contestant before
                taken = [_slowest(contestants[name]) for _ in range(options.block)]
                times[name] += taken if number else []
        for contestant in contestants.values():
            contestant.end()
    print(f"\nE {shape['experts']}, k {shape['k']}, ep {shape['ep']}: ms of forward and backward\n")
    print("| contestant | median | fastest | processor |\n|---|---|---|---|")
    medians = {name: statistics.median(wall for wall, _ in rows) for name, rows in times.items()}
    for name, rows in times.items():
        fastest, cpu = min(wall for wall, _ in rows), statistics.median(cpu for _, cpu in rows)
        print(f"| {name} | {1e3 * medians[name]:.1f} | {1e3 * fastest:.1f} | {1e3 * cpu:.1f} |")
    for ours, rivals in RIVALS.items():
        timed = [name for name in rivals if name in medians]
        if ours in medians and timed:
            best = min(timed, key=medians.__getitem__)
            print(f"\n{ours} / best of the others ({best}): {medians[ours] / medians[best]:.3f}")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        name, shape, rank, rendezvous = sys.argv[2:6]
        work(name, json.loads(shape), int(rank), rendezvous)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=4, help="timed runs per turn")
    parser.add_argument("--peer-python", help="interpreter of an environment with the published package")
    parser.add_argument("--only", help="contestants, separated by commas")
    options = parser.parse_args()
    names = [*LOCAL, *(PEER if options.peer_python else ())]
    if options.ep > 1:
        names = [name for name in names if name.startswith(("ours", "upstream"))]
    if options.only:
        names = [name for name in names if name in options.only.split(",")]
    for experts in options.experts:
        for k in options.top_k:
            shape = {"tokens": options.tokens, "hidden": options.hidden, "inner": options.inner}
            contest({**shape, "experts": experts, "k": k, "ep": options.ep}, names, options)


if __name__ == "__main__":
    main()
