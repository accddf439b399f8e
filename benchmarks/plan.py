"""Measures time and memory of planning: over ranks, over layers, and over layers that differ from each other.

The model is Llama-shaped; with 80 layers it has 70 billion parameters. Each plan runs in a process of its own.
Run: ``python -m benchmarks.plan [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch import nn

RANKS = (8, 64, 512, 4096, 16384, 65536)
LAYERS = (10, 20, 40, 80)
DISTINCT = (1, 4, 16, 80)

LLAMA_70B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    "zero_optimization": {"stage": 3},
}

_PROGRAM = """
import json, resource, sys, time
started = time.perf_counter()
import deepspeed
from benchmarks.plan import CONFIG, llama
layers, distinct, nodes, devices = json.loads(sys.argv[1])
plan = deepspeed.plan(lambda: llama(layers, distinct), CONFIG, nodes=nodes, devices_per_node=devices,
                      sequence_length=4096, activation_checkpointing=True, suggest=False)
print(json.dumps({
    "parameters": plan.simulated.parameters,
    "planning": plan.seconds,
    "processor": time.process_time(),
    "total": time.perf_counter() - started,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "device": plan.device_bytes,
    "calls": sum(calls for calls, _ in plan.simulated.flow.requested.values()),
}))
"""


def llama(layers: int, distinct: int) -> nn.Module:
    """Returns the model; its layers have ``distinct`` different widths in turn."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

    config = AutoConfig.for_model(**{**LLAMA_70B, "num_hidden_layers": layers})
    model = LlamaForCausalLM._from_config(config)
    for number, layer in enumerate(model.model.layers):
        narrower = {**config.to_dict(), "intermediate_size": config.intermediate_size - 128 * (number % distinct)}
        layer.mlp = LlamaMLP(type(config)(**narrower))
    return model


def measure(layers: int, distinct: int, ranks: int) -> dict[str, Any]:
    """Plans in a fresh process; returns times, memory and the planned figures."""
    argument = json.dumps([layers, distinct, max(ranks // 8, 1), min(ranks, 8)])
    done = subprocess.run([sys.executable, "-c", _PROGRAM, argument], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _row(layers: int, distinct: int, ranks: int) -> str:
    found = measure(layers, distinct, ranks)
    return (
        f"| {layers} | {distinct} | {found['parameters'] / 1e9:.1f}B | {ranks:,} | {found['planning']:.1f} | "
        f"{found['total']:.1f} | {found['processor']:.1f} | {found['peak'] / 2**30:.2f} | "
        f"{found['device'] / 2**30:.2f} | {found['calls']:,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    parser.add_argument("--distinct", type=int, nargs="+", default=DISTINCT)
    options = parser.parse_args()
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start.",
        "Llama-shaped, stage 3, bf16, 4 micro-batches of 1 x 4,096 tokens; each plan has activations with and without "
        "checkpointing.",
        "",
        "| layers | different layers | parameters | ranks | planning, s | with imports, s | processor time of all, s | "
        "peak resident, GiB | planned device, GiB | collectives per step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    most = max(options.layers)
    for ranks in options.ranks:
        lines.append(_row(most, 1, ranks))
    for layers in options.layers:
        lines.append(_row(layers, 1, 4096))
    for distinct in options.distinct:
        lines.append(_row(most, distinct, 4096))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
