"""How long a mixture-of-experts layer takes, forward and backward, beside other ways of computing the same.

    .venv/bin/python benchmarks/experts.py                              # one rank: about 4 minutes
    .venv/bin/python benchmarks/experts.py --ep 2 --peer-python ../peer/bin/python
    .venv/bin/python benchmarks/experts.py --tokens 64 --rounds 2 --experts 8 --top-k 1   # does it run?

Every contestant is a process of its own per rank, with one thread; they take turns, in a new order each round, so that
whatever else the machine does hits all alike. All have the same gate, tokens and routes. `ours` and `upstream` are the
layers of this package and of the published one; `-drop` drops tokens at capacity factor 1, the others drop none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from contest.turns import dismiss, take_turn

LOCAL = ("ours", "ours-drop", "loop", "grouped", "masked", "dense")
PEER = ("upstream", "upstream-drop")
RIVALS = {"ours": ("upstream", "loop", "grouped", "masked"), "ours-drop": ("upstream-drop",)}


# -- one contestant: a process that computes on request --------------------------------------------------------


def work(name: str, shape: dict[str, int], rank: int, meeting: str) -> None:
    """For every line on standard input, prints the seconds of one forward and backward: wall and processor time."""
    import torch

    torch.set_num_threads(1)
    if shape["ep"] > 1:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=shape["ep"])
    torch.manual_seed(0)
    layer = build(name, shape)
    x = torch.randn(
        shape["tokens"], shape["hidden"], generator=torch.Generator().manual_seed(7 + rank), requires_grad=True
    )
    for line in sys.stdin:
        if not line.strip():
            break
        if shape["ep"] > 1:
            torch.distributed.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        out = layer(x)
        out.backward(out.detach())
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        for parameter in (x, *layer.parameters()):
            parameter.grad = None
        print(json.dumps(seconds), flush=True)


def build(name: str, shape: dict[str, int]) -> Any:
    """Returns the contestant's layer, from ``[S, M]`` to ``[S, M]``."""
    import torch
    from torch import nn

    hidden, inner, experts, k = (shape[key] for key in ("hidden", "inner", "experts", "k"))
    if name.startswith(("ours", "upstream")):
        import deepspeed
        from deepspeed.moe.layer import MoE

        is_ours = "parallel" in os.listdir(os.path.dirname(deepspeed.__file__))
        assert is_ours == name.startswith("ours"), f"{name} imported {deepspeed.__file__}"
        if not is_ours and torch.distributed.is_initialized() is False:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
            )
        if not is_ours:
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
    return _plain(name, hidden, inner, experts, k)


def _plain(name: str, hidden: int, inner: int, experts: int, k: int) -> Any:
    """Returns a layer in plain torch: a loop over routes sorted by expert, ``grouped_mm``, masks, or a dense layer."""
    import torch
    import torch.nn.functional as F  # noqa: N812
    from torch import nn

    class Plain(nn.Module):
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

    return Plain()


# -- the contest -------------------------------------------------------------------------------------------------------


class Contestant:
    """The processes of one contestant."""

    def __init__(self, name: str, shape: dict[str, int], python: str) -> None:
        meeting = tempfile.mktemp(prefix="experts-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(random.randint(20000, 40000))}
        self.processes = [
            subprocess.Popen(
                [python, __file__, "--work", name, json.dumps(shape), str(rank), meeting],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(shape["ep"])},
            )
            for rank in range(shape["ep"])
        ]

    def turn(self) -> tuple[float, float]:
        """Runs one forward and backward; returns the slowest rank's wall and processor seconds."""
        rows = take_turn(self.processes)
        return max(row[0] for row in rows), max(row[1] for row in rows)

    def leave(self) -> None:
        dismiss(self.processes)


def contest(shape: dict[str, int], names: list[str], options: argparse.Namespace) -> None:
    """Runs the contestants and returns one table row for each."""
    pythons = {name: options.peer_python if name in PEER else sys.executable for name in names}
    contestants = {name: Contestant(name, shape, pythons[name]) for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for round_ in range(options.rounds + 1):
        for name in random.sample(names, len(names)):
            contestants[name].turn()  # finds the caches full of somebody else's data
            taken = [contestants[name].turn() for _ in range(options.block)]
            times[name] += taken if round_ else []
    for contestant in contestants.values():
        contestant.leave()
    print(f"\nE {shape['experts']}, k {shape['k']}, ep {shape['ep']}: ms of forward and backward\n")
    print("| contestant | median | fastest | processor |\n|---|---|---|---|")
    medians = {name: statistics.median(wall for wall, _ in rows) for name, rows in times.items()}
    for name, rows in times.items():
        fastest, cpu = min(wall for wall, _ in rows), statistics.median(cpu for _, cpu in rows)
        print(f"| {name} | {1e3 * medians[name]:.1f} | {1e3 * fastest:.1f} | {1e3 * cpu:.1f} |")
    for ours, rivals in RIVALS.items():
        there = [name for name in rivals if name in medians]
        if ours in medians and there:
            best = min(there, key=medians.__getitem__)
            print(f"\n{ours} / best of the others ({best}): {medians[ours] / medians[best]:.3f}")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        name, shape, rank, meeting = sys.argv[2:6]
        work(name, json.loads(shape), int(rank), meeting)
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
