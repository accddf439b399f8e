"""What the quickstart's model writes, with weights of 32, 16, 8 and 4 bits. Trains nothing.

    make quickstart      first: leaves the weights in runs/quickstart/model.safetensors
    make generate        this file

Each row loads the same file with ``deepspeed.init_inference`` in another dtype, and says what the weights take, how
fast bytes come, and how well the model still predicts text (nats per byte, less is better).
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from train import CONTEXT, GPT, Text, generate

import deepspeed

WAYS = {
    "fp32": {"dtype": "fp32"},
    "bf16": {"dtype": "bf16"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "quant": {"weight": {"num_bits": 4}}},
}


def main() -> None:
    arguments = parse_arguments()
    if not arguments.weights.is_file():
        sys.exit(f"{arguments.weights} does not exist: run `make quickstart` first, which writes it, or give --weights")
    text = Text(arguments.text)
    seen, wanted = (torch.stack(column) for column in zip(*(text[i * 997 % len(text)] for i in range(32)), strict=True))

    table = Table(title="One checkpoint in four widths", title_justify="left", box=None)
    table.add_column("weights")
    for heading in ("MB", "bytes of text per second", "nats per byte"):
        table.add_column(heading, justify="right")
    sample = b""
    for name, config in WAYS.items():
        engine = deepspeed.init_inference(GPT(), config, checkpoint=str(arguments.weights))
        engine.device = next(engine.parameters()).device
        with torch.no_grad():
            loss = engine(seen.to(engine.device), wanted.to(engine.device)).item()
        started = time.perf_counter()
        sample = generate(engine, b"def main(", arguments.sample)
        speed = arguments.sample / (time.perf_counter() - started)
        size = sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers()))
        table.add_row(name, f"{size / 1e6:.1f}", f"{speed:.0f}", f"{loss:.3f}")
    console = Console()
    console.print(f"\nWhat the model writes after 'def main(' with weights of 4 bits, {CONTEXT} bytes in view:\n")
    console.print("    " + sample.decode("utf-8", errors="replace").replace("\n", "\n    "), markup=False)
    console.print()
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Samples from the quickstart's model in several widths.")
    parser.add_argument("--weights", type=Path, default=Path("runs/quickstart/model.safetensors"))
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to be predicted")
    parser.add_argument("--sample", type=int, default=300, help="bytes that the model writes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
