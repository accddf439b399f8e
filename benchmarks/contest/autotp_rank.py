"""One rank of the published package's AutoTP for ``benchmarks/tensor.py``; runs in an environment that has the package.

Each line of standard input is a number of steps; the answer is a line ``MILLISECONDS_PER_STEP LOSS``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch


def main() -> None:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    import tensor

    arguments = argparse.Namespace(**{name: int(value) for name, value in (each.split("=") for each in sys.argv[1:])})
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of the package must not mix with the replies
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "tensor_parallel": {
            "autotp_size": tensor.RANKS,
            "tp_overlap_comm": True,
            "partition_config": {"use_default_specs": False, "layer_specs": tensor.layer_specs()},
        },
    }
    model = deepspeed.initialize(model=tensor.stack(tensor.Block, arguments), config=config)[0].module
    for block in model.children():
        block.num_heads = arguments.heads // tensor.RANKS
    x = tensor.batch(arguments)
    for line in sys.stdin:
        count = int(line)
        started = time.perf_counter()
        for _ in range(count):
            loss = tensor.step(model, x)
        replies.write(f"{(time.perf_counter() - started) / count * 1e3} {loss}\n")
        replies.flush()


if __name__ == "__main__":
    main()
