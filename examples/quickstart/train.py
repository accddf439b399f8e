"""Quickstart: a small language model, trained with ZeRO stage 3, from nothing but this file and ds_config.json.

    deepspeed --num_gpus 2 examples/quickstart/train.py          two ranks (on the CPU if there is no GPU)
    torchrun --nproc-per-node 2 examples/quickstart/train.py     the same, started by torch
    python examples/quickstart/train.py                          one rank

The model reads text one byte at a time and learns to predict the next byte. Its text is the library of the Python that
runs it, so nothing is downloaded. At the start it has learnt nothing: any of 256 bytes may come, which costs ln(256) =
5.5 nats per byte. After half a minute on two cores it needs about 2.3.

Read from the top: 1. text, 2. model, 3. training, 4. what came of it. Only part 3 is about DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import sysconfig
import time
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import deepspeed
import deepspeed.comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu import cpu_has_bf16

HERE = Path(__file__).parent
CONTEXT = 128  # bytes that the model sees at once


# --- 1. The text -----------------------------------------------------------------------------------------------------


class Text(Dataset):
    """All sources and documents below a folder as one row of bytes, cut into samples of ``CONTEXT + 1``."""

    # Tests repeat themselves and tables of numbers teach no language.
    SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}

    def __init__(self, folder: Path) -> None:
        files = sorted(
            path
            for path in folder.rglob("*")
            if path.suffix in (".py", ".rst", ".txt", ".md") and not self.SKIPPED.intersection(path.parts)
        )
        self.content = bytearray(b"\n\n".join(path.read_bytes() for path in files if path.is_file()))
        self.num_files = len(files)
        if len(self.content) < 1_000_000:
            sys.exit(f"{folder} has only {len(self.content)} bytes of text; name a folder with more: --text FOLDER")

    def __len__(self) -> int:
        return (len(self.content) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * CONTEXT
        sample = torch.frombuffer(self.content, dtype=torch.uint8, count=CONTEXT + 1, offset=start).long()
        return sample[:-1], sample[1:]  # what the model sees, and what it should predict after each byte of it


# --- 2. The model: a plain transformer, 3.3 million parameters -------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, angles), rotate(k, angles), v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Gives each head the position of a byte by turning pairs of its features (RoPE, arXiv:2104.09864)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), angles)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, width: int = 256, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.half_head = width // heads // 2
        self.embedding = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What the layers add to the residual stream starts small, so that its size does not grow with depth.
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * depth) if writes else 0.02)

    def forward(self, seen: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """The loss in nats per byte; without ``wanted`` the logits of the next byte, shape (batch, 256)."""
        position = torch.arange(seen.shape[1], device=seen.device, dtype=torch.float32)
        frequency = 10_000 ** (-torch.arange(self.half_head, device=seen.device) / self.half_head)
        x = self.embedding(seen)
        for block in self.blocks:
            x = block(x, position[:, None] * frequency)
        if wanted is None:
            return self.head(self.norm(x[:, -1])).float()
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), wanted.flatten())


# --- 3. Training -----------------------------------------------------------------------------------------------------


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(0)
    text = Text(arguments.text)

    # The engine takes the model, the data and the config. On every rank it keeps only that rank's share of the model.
    config = read_config(arguments.deepspeed_config)
    engine, _, loader, _ = deepspeed.initialize(model=GPT(), training_data=text, config=config)
    say(f"{len(text.content) / 1e6:.1f} MB of text in {text.num_files} files below {arguments.text}")
    ranks, device = dist.get_world_size(), get_accelerator().device_name()
    say(f"{ranks} rank(s) on {device}, ZeRO stage {engine.zero_optimization_stage()}\n")

    losses = train(engine, loader, config["scheduler"]["params"]["total_num_steps"], arguments.minutes)
    report(engine, losses, arguments.output, arguments.sample)
    dist.destroy_process_group()  # without it NCCL warns at the end


def train(engine: deepspeed.DeepSpeedEngine, loader, num_steps: int, minutes: float) -> list[float]:
    """The loop that every training script has. Returns the loss of each step, averaged over the ranks."""
    losses: list[float] = []
    started = time.perf_counter()
    for seen, wanted in loader:
        seen, wanted = seen.to(engine.device), wanted.to(engine.device)

        loss = engine(seen, wanted)
        engine.backward(loss)
        engine.step()

        # All ranks must take the same decision to stop, so they look at the same numbers.
        loss_now, gigabytes, seconds = over_ranks(loss.item(), memory_in_use() / 1e9, time.perf_counter() - started)
        losses.append(loss_now.mean().item())
        speed = len(losses) * seen.numel() * dist.get_world_size() / seconds.max().item()
        live(
            f"step {len(losses):4d}/{num_steps}   loss {losses[-1]:.3f} nats/byte   "
            f"{speed:8,.0f} tokens/s   {gigabytes.max().item():.2f} GB per rank   {seconds.max().item():4.0f} s",
            keep=len(losses) in (1, num_steps) or len(losses) % 25 == 0,
        )
        if len(losses) == num_steps:
            break
        if seconds.max().item() > 60 * minutes:
            say(f"\nstopped after {minutes:g} minutes (--minutes)")
            break
    return losses


def read_config(path: Path) -> dict:
    """The config file; in fp32 where bf16 would be computed in software, many times slower."""
    config = json.loads(path.read_text())
    on_cpu = get_accelerator().device_name() == "cpu"
    if config["bf16"]["enabled"] and not (cpu_has_bf16() if on_cpu else get_accelerator().is_bf16_supported()):
        say("this processor has no bf16 instructions: training in fp32 instead")
        config["bf16"]["enabled"] = False
    return config


def over_ranks(*mine: float) -> torch.Tensor:
    """Row ``i`` has the ``i``-th number of every rank. Every rank must call it."""
    row = torch.tensor(mine, dtype=torch.float32, device=get_accelerator().current_device_name())
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows, dim=1)


def memory_in_use() -> float:
    """Bytes: all that this process holds on the CPU, or the peak of its tensors on a device."""
    if get_accelerator().device_name() == "cpu":
        return psutil.Process().memory_info().rss
    return get_accelerator().max_memory_allocated()


# --- 4. What came of it ----------------------------------------------------------------------------------------------


def report(engine: deepspeed.DeepSpeedEngine, losses: list[float], output: Path, num_bytes: int) -> None:
    sample = generate(engine, b"def main(", num_bytes)  # every rank takes part: each has only its share
    say("\n\nWhat the model writes after 'def main(':\n")
    say("    " + sample.decode("utf-8", errors="replace").replace("\n", "\n    "))

    end = sum(losses[-10:]) / len(losses[-10:])
    say(f"\nLoss: {losses[0]:.2f} -> {end:.2f} nats per byte (mean of the last 10 steps) in {len(losses)} steps")

    rows, num_parameters = engine.memory_report(), sum(p.numel() for p in GPT().parameters())
    say(f"\nBytes of model state on rank 0, between two steps. N = {dist.get_world_size()} ranks,")
    say(f"Psi = {num_parameters:,} parameters; gradients and gathered parameters come and go during a step:\n")
    say(f"    {'kind':<22}{'counted':>14}{'formula':>14}")
    for kind, counted, expected, formula in rows:
        say(f"    {kind:<22}{counted:>14,}{expected:>14,}   {formula}")
    say(f"    {'sum':<22}{sum(row[1] for row in rows):>14,}{sum(row[2] for row in rows):>14,}")
    if engine.zero_optimization_stage() > 0 and dist.get_world_size() > 1:
        whole = (12 if next(engine.module.parameters()).dtype == torch.float32 else 14) * num_parameters
        say(f"\nWithout sharding (stage 0) every rank would keep {whole:,} bytes.")

    engine.save_16bit_model(str(output), "model.safetensors")  # every rank takes part; the first one writes
    if IS_FIRST:
        say(f"\n{draw(losses, output)}")
    say(f"Weights: {output / 'model.safetensors'}")
    say(
        "\nWhat to try next:\n"
        '    - "stage": 0, 1 or 2 in ds_config.json: same losses, another table\n'
        "    - --num_gpus 1 or 4 instead of 2: the sharded rows of the table grow and shrink\n"
        '    - "gradient_accumulation_steps": 4: a batch four times as large in the same memory\n'
        "    - --text FOLDER: let it learn from something else\n"
        "    - make generate: what it writes with weights of 32, 16, 8 and 4 bits, and how fast\n"
    )


@torch.no_grad()
def generate(engine: deepspeed.DeepSpeedEngine, prompt: bytes, num_bytes: int) -> bytes:
    """Continues ``prompt``. Equal seeds make all ranks draw the same bytes."""
    engine.eval()
    dice = torch.Generator().manual_seed(0)
    text = list(prompt)
    for _ in range(num_bytes):
        seen = torch.tensor([text[-CONTEXT:]], device=engine.device)
        likely = (engine(seen)[0] / 0.7).softmax(dim=0).cpu()  # below 1: prefer what is likely
        text.append(int(torch.multinomial(likely, 1, generator=dice)))
    return bytes(text)


def draw(losses: list[float], output: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "No picture of the loss: pip install matplotlib"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(losses) + 1), losses, linewidth=1)
    axes.axhline(math.log(256), linestyle=":", color="grey", label="every byte equally likely")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Quickstart: byte-level GPT")
    axes.legend()
    output.mkdir(parents=True, exist_ok=True)
    figure.savefig(output / "loss.png", dpi=120, bbox_inches="tight")
    return f"Picture of the loss: {output / 'loss.png'}"


# --- Small print -----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT with ZeRO.")
    parser.add_argument("--deepspeed_config", type=Path, default=HERE / "ds_config.json")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to learn from")
    parser.add_argument("--minutes", type=float, default=0.75, help="stop training after this long")
    parser.add_argument("--sample", type=int, default=200, help="bytes that the model writes at the end")
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"), help="folder for picture and weights")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the deepspeed command")
    return parser.parse_args()


IS_FIRST = os.environ.get("RANK", "0") == "0"  # every launcher sets it
IS_WATCHED = sys.stdout.isatty() or "COLUMNS" in os.environ  # the deepspeed command sets COLUMNS on a terminal


def say(line: str) -> None:
    if IS_FIRST:
        print(line, flush=True)


def live(line: str, keep: bool) -> None:
    """Rewrites one line of the screen; the lines to keep stay, and a log file has only those."""
    if IS_FIRST and (keep or IS_WATCHED):
        print(line, end="\n" if keep else "\r", flush=True)


if __name__ == "__main__":
    main()
