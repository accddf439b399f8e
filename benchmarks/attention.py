"""Times block-sparse attention beside dense attention, and beside BigBird of Transformers with the same pattern.

    python benchmarks/attention.py [--repetitions N] [--write-report]

One thread, batch 1, 8 heads of 64. Contestants take turns; each time is the least processor time of forward and
backward over several repetitions, which other load of the machine changes little. Prints ratios beside their goals.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contest.process_memory import status_bytes
from torch.nn import functional

from deepspeed.ops.sparse_attention import BigBirdSparsityConfig, FixedSparsityConfig, attend, compile_layout

HEADS, WIDTH = 8, 64
# name -> (length, pattern, goal: largest share of the time of dense attention)
CASES: dict[str, tuple[int, Any, float]] = {
    "4,096 tokens, blocks of 64, BigBird": (4096, BigBirdSparsityConfig(HEADS, 64, num_random_blocks=2), 0.20),
    "4,096 tokens, blocks of 16, BigBird": (
        4096,
        BigBirdSparsityConfig(HEADS, 16, num_random_blocks=8, num_sliding_window_blocks=11, num_global_blocks=3),
        0.35,
    ),
    "4,096 tokens, blocks of 16, fixed": (4096, FixedSparsityConfig(HEADS, 16, num_local_blocks=16), 0.35),
    "16,384 tokens, blocks of 64, BigBird": (16384, BigBirdSparsityConfig(HEADS, 64, num_random_blocks=2), 0.07),
}


def tensors(length: int) -> list[torch.Tensor]:
    """Returns random query, key and value, each ``[1, HEADS, length, WIDTH]``."""
    return [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]


def least(contestants: dict[str, Callable[[], torch.Tensor]], repetitions: int) -> dict[str, float]:
    """Returns the least processor seconds of a forward and a backward; the contestants take turns."""
    shortest = dict.fromkeys(contestants, float("inf"))
    for _ in range(repetitions):
        for name, forward in contestants.items():
            start = time.process_time()
            result = forward()
            result.backward(torch.ones_like(result))
            shortest[name] = min(shortest[name], time.process_time() - start)
    return shortest


def beside_dense(repetitions: int) -> list[dict[str, Any]]:
    """Times every case beside dense attention; returns the rows."""
    rows = []
    for name, (length, config, goal) in CASES.items():
        random.seed(0)
        layout = config.make_layout(length)
        plan = compile_layout(layout, config.block)
        operands = tensors(length)
        contestants = {
            "dense": partial(functional.scaled_dot_product_attention, *operands),
            "sparse": partial(attend, *operands, plan),
        }
        times = least(contestants, repetitions if length < 10_000 else 2)
        row = {"case": name, "density": layout.float().mean().item(), **times}
        rows.append({**row, "ratio": times["sparse"] / times["dense"], "goal": goal})
        show(rows[-1])
    return rows


def beside_big_bird(repetitions: int) -> dict[str, Any]:
    """Times Transformers' BigBird attention layer beside the same layer with our attention; returns the row."""
    from transformers.models.big_bird import BigBirdConfig
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel

    length, block = 4096, 64
    settings = BigBirdConfig(
        hidden_size=HEADS * WIDTH, num_attention_heads=HEADS, block_size=block, num_random_blocks=3, use_bias=True
    )
    theirs = BigBirdBlockSparseAttention(settings, seed=0).train()
    hidden = torch.randn(1, length, HEADS * WIDTH, requires_grad=True)
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, length), block)
    blocked, band, from_mask, to_mask = masks

    def big_bird() -> torch.Tensor:
        return theirs(hidden, band, from_mask, to_mask, blocked, blocked)[0]

    # The same number of blocks per row: 3 in the window, 3 random, and the first and the last, which are global.
    random.seed(0)
    config = BigBirdSparsityConfig(HEADS, block, True, num_random_blocks=3, num_global_blocks=1)
    layout = config.make_layout(length)
    layout[:, -1] = layout[:, :, -1] = 1
    plan = compile_layout(layout, block)

    def ours() -> torch.Tensor:
        query, key, value = (
            layer(hidden).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
            for layer in (theirs.query, theirs.key, theirs.value)
        )
        return attend(query, key, value, plan).transpose(1, 2).flatten(2)

    times = least({"transformers": big_bird, "ours": ours}, repetitions)
    row = {"case": "BigBird layer of 4,096 tokens, blocks of 64, 3 random, own layout per head", **times}
    row |= {"ratio": times["ours"] / times["transformers"], "goal": 1.0}
    show(row)
    return row


def peak(length: int) -> int:
    """Returns the growth of this process's peak resident memory in a forward and a backward, in bytes."""
    random.seed(0)
    plan = compile_layout(BigBirdSparsityConfig(HEADS, 64, num_random_blocks=2).make_layout(length), 64)
    query, key, value = tensors(length)
    before = status_bytes("VmHWM")  # ru_maxrss would start at the peak of the parent process
    result = attend(query, key, value, plan)
    result.backward(torch.ones_like(result))
    return status_bytes("VmHWM") - before


def memory() -> list[dict[str, Any]]:
    """Measures :func:`peak` at three lengths, each in a fresh process; returns the rows."""
    rows = []
    for length in (4096, 8192, 16384):
        command = [sys.executable, __file__, "--peak-of", str(length)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append({"tokens": length, "bytes": int(done.stdout), "bytes_per_token": int(done.stdout) / length})
        print(f"{length:6} tokens: {int(done.stdout) / 2**20:6.1f} MiB above the inputs", file=sys.stderr)
    return rows


def show(row: dict[str, Any]) -> None:
    print(f"{row['ratio']:.3f} (goal {row['goal']})  {row['case']}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--write-report", action="store_true", help="also write benchmarks/results/attention-DATE.json")
    parser.add_argument("--peak-of", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if arguments.peak_of:
        print(peak(arguments.peak_of))
        return
    report = {
        "torch": torch.__version__,
        "beside_dense": beside_dense(arguments.repetitions),
        "beside_transformers": beside_big_bird(arguments.repetitions),
        "memory": memory(),
    }
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.write_report:
        place = Path(__file__).parent / "results" / f"attention-{datetime.date.today()}.json"
        place.write_text(text + "\n")


if __name__ == "__main__":
    main()
