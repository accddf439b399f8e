"""What the quickstart's model writes, with weights of 32, 16, 8 and 4 bits. Trains nothing.

    make quickstart      first: leaves the weights in runs/quickstart/model.safetensors
    make generate        this file

Each row loads the same file with ``deepspeed.init_inference`` in another dtype, and prints what the weights take, how
fast bytes come, and how well the model still predicts text (nats per byte, less is better).

Keys and values of what was written are kept, so that a step multiplies every weight with one row. Such a step waits for
weights from memory, and weights of fewer bits are there sooner. A prompt, or training, multiplies them with many rows:
there the arithmetic takes the time, and fewer bits save none.
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
from torch.nn import functional as F  # noqa: N812
from train import CONTEXT, GPT, Text, rotate

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
    for heading in ("MB", "bytes of text per second", "beside fp32", "nats per byte"):
        table.add_column(heading, justify="right")
    sample, speeds = b"", {}
    for name, config in WAYS.items():
        engine = deepspeed.init_inference(GPT(), config, checkpoint=str(arguments.weights))
        device = next(engine.parameters()).device
        loss = engine(seen.to(device), wanted.to(device)).item()
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            sample = write(engine.module, b"def main(", arguments.sample)
            seconds.append(time.perf_counter() - started)
        speeds[name] = arguments.sample / min(seconds)
        size = sum(tensor.nbytes for tensor in (*engine.parameters(), *engine.buffers()))
        ratio = f"{speeds[name] / speeds['fp32']:.2f} x"
        table.add_row(name, f"{size / 1e6:.1f}", f"{speeds[name]:.0f}", ratio, f"{loss:.3f}")
    console = Console()
    console.print(f"\nWhat the model writes after 'def main(' with weights of 4 bits, {CONTEXT} bytes in view:\n")
    console.print("    " + sample.decode("utf-8", errors="replace").replace("\n", "\n    "), markup=False)
    console.print()
    console.print(table)


@torch.no_grad()
def write(model: GPT, prompt: bytes, num_bytes: int) -> bytes:
    """Continues ``prompt`` byte by byte with the last ``CONTEXT`` keys and values of every layer in memory."""
    weight = model.embedding.weight
    dice = torch.Generator().manual_seed(0)
    kept = [(weight.new_empty(1, block.attention.heads, 0, 2 * model.half_head),) * 2 for block in model.blocks]
    frequency = 10_000 ** (-torch.arange(model.half_head, device=weight.device) / model.half_head)
    text, start = list(prompt), 0
    for _ in range(num_bytes):
        new = torch.tensor([text[start:]], device=weight.device)
        angles = torch.arange(start, len(text), device=weight.device, dtype=torch.float32)[:, None] * frequency
        x = model.embedding(new)
        for number, block in enumerate(model.blocks):
            heads = block.attention.heads
            q, k, v = block.attention.qkv(block.norm1(x)).view(1, new.shape[1], 3, heads, -1).permute(2, 0, 3, 1, 4)
            keys, values = (
                torch.cat(pair, 2)[:, :, -CONTEXT:] for pair in zip(kept[number], (rotate(k, angles), v), strict=True)
            )
            kept[number] = keys, values
            y = F.scaled_dot_product_attention(rotate(q, angles), keys, values, is_causal=start == 0)
            x = x + block.attention.out(y.transpose(1, 2).reshape(x.shape))
            x = x + block.down(F.gelu(block.up(block.norm2(x))))
        start = len(text)
        likely = (model.head(model.norm(x[:, -1])).float()[0] / 0.7).softmax(dim=0).cpu()
        text.append(int(torch.multinomial(likely, 1, generator=dice)))
    return bytes(text)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Samples from the quickstart's model in several widths.")
    parser.add_argument("--weights", type=Path, default=Path("runs/quickstart/model.safetensors"))
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to be predicted")
    parser.add_argument("--sample", type=int, default=300, help="bytes that the model writes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
