"""Measures sequence parallelism: memory, traffic, time beside a hand-written exchange, and the longest sequence.

- memory: bytes that autograd keeps for one block, per rank, at 1, 2 and 4 ranks that share a sequence: of a Llama layer
  of Transformers, and of a bare block of attention and an MLP without norms and gates, in which the one thing that is
  held twice weighs most (attention's result, by heads for its own backward and by tokens for the projection behind it);
- traffic: bytes that a rank sends per block and direction, and what the formula says, 4 s M (sp - 1) / sp^2;
- time: a block's forward and backward at 2 ranks beside the same block whose exchange is written out by hand with
  ``torch.distributed.all_to_all_single``; the two take turns;
- length: the longest sequence that a small Llama trains on one rank when its data may grow by so many MiB, plain, and
  with ``tiled_mlp``, ``tiled_loss`` and checkpointed layers.

Run ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.nn import functional

import deepspeed
from deepspeed.comm.counters import counted
from deepspeed.sequence.layer import DistributedAttention

HEADS, WIDTH = 8, 32


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


class _ByHand(torch.autograd.Function):
    """``[1, tokens, heads, width]``: tokens gathered and heads cut, or back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, back: bool) -> torch.Tensor:
        ctx.back = back
        size = dist.get_world_size()
        if back:
            source = x.contiguous()
            out = torch.empty_like(source)
            dist.all_to_all_single(out, source)
            return torch.cat([part[None] for part in out.view(size, -1, *x.shape[2:])], dim=2)
        source = torch.stack([part[0] for part in x.chunk(size, dim=2)]).contiguous()
        out = torch.empty_like(source)
        dist.all_to_all_single(out, source)
        return out.flatten(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ByHand.apply(gradients[0], not ctx.back), None


class Block(torch.nn.Module):
    """Attention and an MLP on ``[1, tokens, HEADS * WIDTH]``."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        width = HEADS * WIDTH
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self.attention = attention

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).view(1, x.size(1), 3 * HEADS, WIDTH).chunk(3, dim=2)
        x = x + self.out(self.attention(query, key, value).flatten(2))
        return x + self.mlp(x)


def _kept(block: torch.nn.Module, x: torch.Tensor, **given: Any) -> int:
    """Bytes of distinct storages, parameters left out, that backward will read."""
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    seen: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = block(x, **given)
        (out[0] if isinstance(out, tuple) else out).sum().backward()
    return sum(seen.values())


def _kept_by_llama(rank: int, size: int, tokens: int) -> int:
    from transformers import LlamaConfig, LlamaForCausalLM

    from deepspeed.parallel.sequence.transformers_models import share_sequences

    width = HEADS * WIDTH
    config = LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if size > 1:
        share_sequences(model, dist.group.WORLD)
    x = torch.randn(1, tokens // size, width, requires_grad=True)
    places = torch.arange(rank * tokens // size, (rank + 1) * tokens // size)[None]
    angles = model.model.rotary_emb(x, places)
    layer = model.model.layers[0]
    return _kept(layer, x, position_embeddings=angles, position_ids=places, attention_mask=None)


def _step(block: Block, x: torch.Tensor) -> float:
    dist.barrier()
    begun = time.perf_counter()
    block(x).sum().backward()
    dist.barrier()
    return time.perf_counter() - begun


def _rank(rank: int, size: int, tokens: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, verbose=False
    )
    torch.manual_seed(0)
    shared = DistributedAttention(_attend, dist.group.WORLD)
    ours = Block(lambda query, key, value: shared(query, key, value, 0))
    x = torch.randn(1, tokens // size, HEADS * WIDTH, requires_grad=True)
    found: dict[str, Any] = {"kept": _kept(ours, x), "llama": _kept_by_llama(rank, size, tokens)}
    with counted() as books:
        out = ours(x)
        found["sent"] = books.asked_along["all_to_all", "sequence"].nbytes
        out.sum().backward()
    if size > 1:

        def by_hand(*parts: torch.Tensor) -> torch.Tensor:
            return _ByHand.apply(_attend(*(_ByHand.apply(part, False) for part in parts)), True)

        other = Block(by_hand)
        other.load_state_dict(ours.state_dict())
        torch.testing.assert_close(other(x), ours(x))
        pairs = [(_step(ours, x), _step(other, x)) for _ in range(rounds + 1)][1:]
        found["ratios"] = [mine / theirs for mine, theirs in pairs]
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def _measured(size: int, tokens: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, tokens, rounds, folder), nprocs=size)
        with open(f"{folder}/found.json") as file:
            found: dict[str, Any] = json.load(file)
            return found


def _train_once(tokens: int, mebibytes: int, is_ours: bool) -> None:
    """One step of a small Llama in this process, whose data may grow by ``mebibytes``; ends with 0 if it fits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(2)
    config = LlamaConfig(
        vocab_size=32000, hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1 << 20, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if is_ours:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    section = {"tiled_mlp": is_ours, "tiled_loss": is_ours, "tile_tokens": 512}
    engine = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "sequence_parallel": section,
        },
    )[0]
    with open("/proc/self/status") as file:
        used = next(int(line.split()[1]) for line in file if line.startswith("VmData")) * 1024
    limit = used + mebibytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    ids = torch.randint(0, 32000, (1, tokens))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def _fits(tokens: int, mebibytes: int, is_ours: bool) -> bool:
    command = [sys.executable, __file__, "--train", str(tokens), "--mebibytes", str(mebibytes)]
    command += ["--plain"] * (not is_ours)
    # Large tensors in mappings of their own, on both sides: else glibc's heap keeps gaps that count as memory in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    return subprocess.run(command, capture_output=True, check=False, env=environment).returncode == 0


def _longest(mebibytes: int, is_ours: bool, low: int, high: int) -> int:
    """The longest that fits, within a sixteenth; ``low`` fits or is 0, ``high`` does not."""
    while high - low > max(low // 16, 64):
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(middle, mebibytes, is_ours) else (low, middle)
    return low


def _longest_plain(mebibytes: int) -> int:
    low, high = 0, 1024
    while _fits(high, mebibytes, False):
        low, high = high, 2 * high
    return _longest(mebibytes, False, low, high)


def _longest_ours(mebibytes: int, plain: int, minutes: float) -> tuple[int, bool]:
    """The longest that was seen to fit, at 12 times ``plain`` first, and whether time ended the search.

    Attention's time grows with the square of the length, so that twice a length takes about four times as long.
    """
    ends, tokens = time.monotonic() + 60 * minutes, 12 * plain
    if not _fits(tokens, mebibytes, True):
        return _longest(mebibytes, True, plain, tokens), False
    while True:
        begun = time.monotonic()
        longer = 3 * tokens // 2
        if begun + 2.25 * (begun - (ends - 60 * minutes)) > ends:
            return tokens, True
        if not _fits(longer, mebibytes, True):
            return _longest(mebibytes, True, tokens, longer), False
        tokens = longer


def main() -> None:
    """Prints one table for each part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("memory", "time", "length"), action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=2048, help="of the block's sequence (default 2048)")
    parser.add_argument("--rounds", type=int, default=15, help="timed pairs of steps (default 15)")
    parser.add_argument("--mebibytes", type=int, default=2048, help="by which data may grow (default 2048)")
    parser.add_argument("--minutes", type=float, default=6, help="after which no longer one is tried (default 6)")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        _train_once(chosen.train, chosen.mebibytes, not chosen.plain)
        return
    console, parts = Console(), chosen.part or ["memory", "time", "length"]
    if "memory" in parts or "time" in parts:
        sizes = (1, 2, 4) if "memory" in parts else (2,)
        found = {size: _measured(size, chosen.tokens, chosen.rounds if "time" in parts else 1) for size in sizes}
        table = Table("ranks", "Llama layer", "bare block", "sent, bytes", "by formula", "time, by hand = 1")
        for size, each in found.items():
            formula = 4 * chosen.tokens * HEADS * WIDTH * 4 * (size - 1) // size**2
            kept = [f"{each[name]:,}" for name in ("llama", "kept")]
            if 1 in found:
                kept = [f"{each[name]:,} ({each[name] / found[1][name]:.4f})" for name in ("llama", "kept")]
            ratio = f"{statistics.median(each['ratios']):.3f}" if "ratios" in each else ""
            table.add_row(str(size), *kept, f"{each['sent']:,}", f"{formula:,}", ratio)
        console.print(table)
    if "length" in parts:
        plain = _longest_plain(chosen.mebibytes)
        ours, ended = _longest_ours(chosen.mebibytes, plain, chosen.minutes)
        table = Table(f"longest sequence in {chosen.mebibytes:,} MiB", "tokens", "times plain")
        table.add_row("plain", f"{plain:,}", "1.0")
        least = "at least " * ended
        table.add_row("tiles and checkpointed layers", f"{least}{ours:,}", f"{least}{ours / max(plain, 1):.1f}")
        console.print(table)


if __name__ == "__main__":
    main()
