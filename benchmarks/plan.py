"""How long planning takes, and how much memory, for a 70B model on 8 to 65,536 ranks.

Each plan runs in a process of its own. Run: ``python -m benchmarks.plan [--out FILE]``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

RANKS = (8, 64, 512, 4096, 16384, 65536)
LAYERS = (10, 20, 40, 80)

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

_ONE = """
import json, resource, sys, time
started = time.perf_counter()
import deepspeed
model, config, nodes, devices, sequence = json.loads(sys.argv[1])
plan = deepspeed.plan(model, config, nodes=nodes, devices_per_node=devices, sequence_length=sequence,
                      activation_checkpointing=True, suggest=False)
print(json.dumps({
    "parameters": plan.rehearsed.parameters,
    "planning": plan.seconds,
    "total": time.perf_counter() - started,
    "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "device": plan.device_bytes,
    "calls": sum(calls for calls, _ in plan.rehearsed.flow.asked.values()),
}))
"""


def measure(model: dict[str, object], ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model))
        argument = json.dumps([str(path), CONFIG, max(ranks // 8, 1), min(ranks, 8), 4096])
        done = subprocess.run([sys.executable, "-c", _ONE, argument], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _row(model: dict[str, object], ranks: int) -> str:
    found = measure(model, ranks)
    return (
        f"| {model['num_hidden_layers']} | {found['parameters'] / 1e9:.1f}B | {ranks:,} | {found['planning']:.1f} | "
        f"{found['total']:.1f} | {found['peak'] / 2**30:.2f} | {found['device'] / 2**30:.2f} | {found['calls']:,} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS)
    options = parser.parse_args()
    lines = [
        f"Python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start.",
        "Llama-shaped, stage 3, bf16, 4 micro-batches of 1 x 4,096 tokens; each plan has activations with and without "
        "checkpointing.",
        "",
        "| layers | parameters | ranks | planning, s | with imports, s | peak resident, GiB | planned device, GiB | "
        "collectives per step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for ranks in options.ranks:
        lines.append(_row(LLAMA_70B, ranks))
    for layers in options.layers:
        lines.append(_row({**LLAMA_70B, "num_hidden_layers": layers}, 4096))
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
