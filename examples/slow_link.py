"""A model trained over a link of 100 Mbit/s, with plain gradients and with gradients of 4 bits.

    sudo .venv/bin/python examples/slow_link.py           two network namespaces, whose link the kernel throttles
    .venv/bin/python examples/slow_link.py                without the rights for that, the transport is throttled

Both runs start from the same weights and see the same samples. It prints the time of an update and the last loss.
docs/guide/compressed-communication.md explains when codes pay, and when they do not.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "contest"))

import links  # noqa: E402 - the namespaces of the benchmarks

RANKS, MEGABITS, WIDTH = 2, 100.0, 1024


def train(way: str, updates: int, throttle: float) -> None:
    """One rank: a regression that three layers can learn."""
    import deepspeed

    if throttle:
        links.throttle_transport(throttle)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    wanted = torch.randn(64, generator=torch.Generator().manual_seed(1))
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 16,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 2},
            "communication_compression": {} if way == "plain" else {"gradients": way},
        },
    )[0]
    begun = loss = 0.0
    for update in range(updates):
        if update == 2:  # the first ones allocate
            begun = time.perf_counter()
        seed = update * RANKS + int(os.environ["RANK"])
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed))
        error = (engine(x).squeeze(1) - torch.sin(x @ wanted / 8)).square().mean()
        engine.backward(error)
        engine.step()
        loss = error.item()
    took = (time.perf_counter() - begun) / (updates - 2)
    if os.environ["RANK"] == "0":
        print(f"RESULT {way:6} {took:.3f} s an update, last loss {loss:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--ways", nargs="*", default=["plain", "int4"], help="plain, int8, int4, sign or auto")
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(**json.loads(options.rank))
        return
    why = links.can_shape()
    print(f"{RANKS} ranks, {MEGABITS:g} Mbit/s" + (f", by a throttled transport ({why})" if why else ""))
    for way in options.ways:
        options_json = json.dumps({"way": way, "updates": options.updates, "throttle": MEGABITS if why else 0.0})
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with nullcontext([""] * RANKS) if why else links.namespaces(RANKS, MEGABITS) as spaces:
            started = []
            for rank, space in enumerate(spaces):
                words = [sys.executable, __file__, "--rank", options_json]
                environment = {
                    **os.environ,
                    **links.environment(rank, RANKS, port, shaped=not why),
                    "PYTHONPATH": str(ROOT),
                }
                pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                started.append(subprocess.Popen(words if why else links.command(space, words), env=environment, **pipe))
            outputs = [process.communicate()[0] for process in started]
        found = [
            line.removeprefix("RESULT ") for text in outputs for line in text.splitlines() if line.startswith("RESULT ")
        ]
        print(found[0] if found else f"{way}: a rank failed\n" + "\n".join(outputs))


if __name__ == "__main__":
    main()
