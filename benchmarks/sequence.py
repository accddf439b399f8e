"""Measures sequence parallelism: memory, traffic, time beside a hand-written exchange, and the longest sequence.

- memory: bytes per rank that the forward of one block saves for backward, at 1, 2 and 4 ranks that share a sequence.
  The blocks are a Llama layer of Transformers, and a bare block of attention and an MLP without norms and gates.
  Attention's output is saved twice (by heads for its own backward, by tokens for the projection after it), which weighs
  most in the bare block; ``recompute_exchange`` saves it once. Each block is measured both ways;
- traffic: bytes that a rank sends per block and direction, beside the formula 4 s M (sp - 1) / sp^2;
- time: forward and backward of the bare block at 2 ranks, beside the same block with a hand-written exchange by
  ``torch.distributed.all_to_all_single``, and beside itself with ``recompute_exchange``, in turns; also processor time,
  and the bytes that are only copied;
- length: the longest sequence that a small Llama trains on one rank with a limit on the growth of its data, with and
  without ``tiled_mlp``, ``tiled_loss`` and checkpointed layers.

    python benchmarks/sequence.py [--part memory] [--part time] [--part length] [--report FILE]

On a quiet machine of 2 cores all parts take about 6 minutes, nearly all of it for the length.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contest.alive import Alive
from contest.longest import Longest, find_longest
from contest.process_memory import status_bytes
from rich.console import Console
from torch.nn import functional

import deepspeed
from deepspeed.comm.base.counters import counted
from deepspeed.sequence.layer import DistributedAttention

HEADS, WIDTH = 8, 32


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    parts = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


class _ByHand(torch.autograd.Function):
    """Gathers the tokens and splits the heads of ``[1, tokens, heads, width]``; ``back``: the reverse."""

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


def _saved_bytes(block: torch.nn.Module, x: torch.Tensor, **arguments: Any) -> int:
    """Returns the bytes that are alive for backward, with the input and without the weights."""
    with Alive() as alive:
        out = block(x, **arguments)
        out = (out[0] if isinstance(out, tuple) else out).sum()
    found = alive.nbytes(x, out, *block.parameters()) + x.nbytes
    out.backward()
    return found


def _saved_by_llama(rank: int, size: int, tokens: int, once: bool) -> int:
    """Returns the bytes alive for backward of a Llama layer; ``once``: with ``recompute_exchange``."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

    from deepspeed.parallel.sequence.context import AttentionExchange
    from deepspeed.parallel.sequence.ulysses import share_sequences

    width = HEADS * WIDTH
    config = LlamaConfig(
        vocab_size=32, hidden_size=width, intermediate_size=7 * width // 2, num_hidden_layers=1,
        num_attention_heads=HEADS, num_key_value_heads=HEADS // 2, attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if size > 1:
        exchange = AttentionExchange(heads_group=dist.group.WORLD, recompute=once)
        share_sequences(model, dist.group.WORLD, exchange, core=None, disable_in_eval=False)
    x = torch.randn(1, tokens // size, width, requires_grad=True)
    places = torch.arange(rank * tokens // size, (rank + 1) * tokens // size)[None]
    angles = model.model.rotary_emb(x, places)
    layer = model.model.layers[0]
    return _saved_bytes(layer, x, position_embeddings=angles, position_ids=places, attention_mask=None)


def _step(block: Block, x: torch.Tensor) -> tuple[float, float]:
    """Runs forward and backward; returns wall and processor seconds of this rank."""
    dist.barrier()
    started, processor = time.perf_counter(), time.process_time()
    block(x).sum().backward()
    processor = time.process_time() - processor
    dist.barrier()
    return time.perf_counter() - started, processor


def _copied_bytes(block: Block, x: torch.Tensor) -> int:
    with Alive() as alive:
        block(x).sum().backward()
    return alive.copied


def _rank(rank: int, size: int, tokens: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank))
    deepspeed.init_distributed(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, verbose=False
    )
    torch.manual_seed(0)

    def block(**options: Any) -> Block:
        shared = DistributedAttention(_attend, dist.group.WORLD, **options)
        return Block(lambda query, key, value: shared(query, key, value, 0))

    ours, once = block(), block(recompute_exchange=True)
    x = torch.randn(1, tokens // size, HEADS * WIDTH, requires_grad=True)
    found: dict[str, Any] = {
        "bare": _saved_bytes(ours, x),
        "bare once": _saved_bytes(once, x),
        "llama": _saved_by_llama(rank, size, tokens, False),
        "llama once": _saved_by_llama(rank, size, tokens, True),
    }
    with counted() as traffic:
        out = ours(x)
        found["sent"] = traffic.requested_along["all_to_all", "sequence"].nbytes
        out.sum().backward()
    if size > 1 and rounds:

        def by_hand(*parts: torch.Tensor) -> torch.Tensor:
            return _ByHand.apply(_attend(*(_ByHand.apply(part, False) for part in parts)), True)

        other = Block(by_hand)
        other.load_state_dict(ours.state_dict())
        torch.testing.assert_close(other(x), ours(x))
        found["copied"] = _copied_bytes(ours, x), _copied_bytes(other, x), _copied_bytes(once, x)
        turns = [[_step(block, x) for block in (ours, other, once)] for _ in range(rounds + 2)][2:]
        for index, name in enumerate(("wall", "processor")):
            found[name] = [[step[index] for step in turn] for turn in turns]
    if rank == 0:
        with open(f"{folder}/found.json", "w") as file:
            json.dump(found, file)
    dist.barrier()
    dist.destroy_process_group()


def _measure(size: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Returns what rank 0 of ``size`` ranks finds."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (size, tokens, rounds, folder), nprocs=size)
        with open(f"{folder}/found.json") as file:
            found: dict[str, Any] = json.load(file)
            return found


def _memory(tokens: int) -> list[str]:
    found = {size: _measure(size, tokens, 0) for size in (1, 2, 4)}
    lines = [
        f"Bytes alive for backward per rank, {tokens:,} tokens, in brackets the share of one rank's; goal: within 5 % "
        "of 1 / ranks. *Once*: with `recompute_exchange`. *Sent*: in forward; the formula is 4 s M (sp - 1) / sp².",
        "",
        "| ranks | Llama layer | once | bare block | once | sent | by formula |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for size, each in found.items():
        names = "llama", "llama once", "bare", "bare once"
        saved = [f"{each[name]:,} ({each[name] / found[1][name]:.4f})" for name in names]
        formula = 4 * tokens * HEADS * WIDTH * 4 * (size - 1) // size**2
        lines.append(f"| {size} | {' | '.join(saved)} | {each['sent']:,} | {formula:,} |")
    return lines


def _time(tokens: int, rounds: int) -> list[str]:
    found = _measure(2, tokens, rounds)
    lines = [
        f"A bare block forward and backward at 2 ranks, {tokens:,} tokens, {rounds} turns; goal: at most 1.03. *Once*: "
        "with `recompute_exchange`, which exchanges one more tensor beside nine.",
        "",
        "| | ours | by hand | ratio | once | over ours |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, words in (("wall", "median, ms"), ("processor", "median of processor time, ms")):
        mine, theirs, again = (statistics.median(column) * 1000 for column in zip(*found[name], strict=True))
        ratio, more = (statistics.median(turn[a] / turn[b] for turn in found[name]) for a, b in ((0, 1), (2, 0)))
        lines.append(f"| {words} | {mine:.2f} | {theirs:.2f} | {ratio:.3f} | {again:.2f} | {more:.3f} |")
    mine, theirs, again = found["copied"]
    lines.append(
        f"| bytes only copied | {mine:,} | {theirs:,} | {mine / theirs:.3f} | {again:,} | {again / mine:.3f} |"
    )
    return lines


def _train_once(tokens: int, mebibytes: int, is_ours: bool) -> None:
    """Trains one step of a small Llama in this process, whose data may grow by ``mebibytes`` (0: without limit)."""
    from transformers.models.llama import LlamaConfig, LlamaForCausalLM

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
    if mebibytes:
        limit = status_bytes("VmData") + mebibytes * 2**20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print("ready", flush=True)
    ids = torch.randint(0, 32000, (1, tokens))
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def _length(mebibytes: int, times: int, console: Console) -> list[str]:
    found: dict[bool, Longest] = {}
    for is_ours in (False, True):

        def command(tokens: int, limit: int, is_ours: bool = is_ours) -> list[str]:
            words = [sys.executable, __file__, "--train", str(tokens), "--mebibytes", str(limit)]
            return words + ["--plain"] * (not is_ours)

        plain = found[False].fits if is_ours else None
        most = None if plain is None else times * plain.tokens
        found[is_ours] = find_longest(command, mebibytes, (4096, 8192) if is_ours else (512, 1024), most)
        console.print(f"{'tiles' if is_ours else 'plain'}: {found[is_ours]}")
    lines = [
        f"The longest sequence of a Llama with 2 layers and 32,000 words whose data may grow by {mebibytes:,} MiB; "
        "goal: at least 12 times longer. Attention's time grows with the square of the length, so nothing longer than "
        f"{times} times is run; *by the line* is the length that memory allows by the growth of two short runs.",
        "",
        "| | fits | times plain | grew by, MiB | seconds | fails | KiB per token | by the line |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    shortest = found[False].fits
    for is_ours, name in ((False, "plain"), (True, "tiles and checkpointed layers")):
        each = found[is_ours]
        fits, fails = each.fits, each.fails
        assert fits is not None and shortest is not None
        cells = [
            f"{fits.tokens:,}",
            f"{'' if fails else 'at least '}{fits.tokens / shortest.tokens:.1f}",
            f"{fits.grown / 2**20:,.0f}",
            f"{fits.seconds:.0f}",
            f"{fails.tokens:,}" if fails else "",
            f"{each.per_token / 1024:.1f}",
            f"{each.by_line:,}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Prints a table for each part, and writes the report if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=("memory", "time", "length"), action="append", help="default: all")
    parser.add_argument("--tokens", type=int, default=2048, help="sequence length of the block (default 2048)")
    parser.add_argument("--rounds", type=int, default=41, help="timed rounds (default 41)")
    parser.add_argument(
        "--mebibytes", type=int, default=2048, help="limit on the growth of memory in MiB (default 2048)"
    )
    parser.add_argument(
        "--times",
        type=int,
        default=14,
        help="longest sequence to try, as a multiple of the longest one without tiles (default 14)",
    )
    parser.add_argument("--report", type=Path, help="also write the tables into this file, as Markdown")
    parser.add_argument("--train", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train is not None:
        _train_once(chosen.train, chosen.mebibytes, not chosen.plain)
        return
    console, parts = Console(soft_wrap=True), chosen.part or ["memory", "time", "length"]
    loads, sections = [os.getloadavg()[0]], []
    for part, title, make in (
        ("memory", "Memory and traffic", lambda: _memory(chosen.tokens)),
        ("time", "Time", lambda: _time(chosen.tokens, chosen.rounds)),
        ("length", "Length", lambda: _length(chosen.mebibytes, chosen.times, console)),
    ):
        if part in parts:
            table = [f"## {title}", "", *make()]
            sections += ["", *table]
            console.print("\n".join(table))
    loads.append(os.getloadavg()[0])
    if chosen.report is not None:
        head = [
            f"# Sequences that ranks share, {datetime.date.today()}",
            "",
            f"`python benchmarks/sequence.py{''.join(f' --part {part}' for part in chosen.part or [])}`: "
            f"{os.cpu_count()} cores, torch {torch.__version__}, load {loads[0]:.1f} before, {loads[1]:.1f} after.",
        ]
        chosen.report.write_text("\n".join(head + sections) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
