"""What codes of gradients cost and save: bytes that the kernel counts, step times on shaped links, codec time.

Parts (``compression.py PART``; all of them without one):

- codec: nanoseconds of processor time per element and core to encode with error feedback, and to decode.
- bytes: what each way sends per step and rank, by the books and by the kernel's counters of the interface.
- steps: step times on a link of ``--megabits`` beside torch's DDP with its bf16 hook.
- cells: whether a codec pays on each link, as ``deepspeed.comm.worth`` says and as measured.

Ranks live in network namespaces whose links the kernel shapes (``contest/links.py``); where that is not allowed, the
project's own transport is throttled and DDP is left out. Run ``--help`` for the options.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "contest"))

import links  # noqa: E402 - lies beside the ranks, which import it too

from deepspeed.accelerator.host_allocator import keep_freed_memory  # noqa: E402
from deepspeed.comm.codec import coded_nbytes, decode_add, encode  # noqa: E402
from deepspeed.comm.codecs import Int4Codec, Int8Codec, SignCodec  # noqa: E402
from deepspeed.comm.worth import Link, Way, exchange_seconds, plain_bits_on_the_wire  # noqa: E402

RANK = HERE / "contest" / "compression_rank.py"
CODECS = {"sign": SignCodec(2048), "int8": Int8Codec(256), "int4": Int4Codec(256)}
LINKS = {"100 Mbit": 100.0, "1 Gbit": 1_000.0, "10 Gbit": 10_000.0, "loopback": None}


def codec_times(millions: float = 4.0, rounds: int = 6) -> dict[str, tuple[float, float]]:
    """``{codec: (encode with feedback, decode and add)}`` in ns of processor time per element, the best of rounds."""
    keep_freed_memory()
    torch.set_num_threads(1)
    found = {}
    for name, codec in CODECS.items():
        values = torch.randn(int(millions * 2**20))
        error, out = torch.zeros_like(values), torch.zeros_like(values)
        codes = torch.empty(coded_nbytes(codec, values.numel()), dtype=torch.uint8)
        kept = None if name == "int8" else error  # as communication_compression has it by default
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            marks = [time.process_time()]
            encode(codec, values, kept, codes)
            marks.append(time.process_time())
            decode_add(codec, codes, out)
            marks.append(time.process_time())
            best = [min(old, b - a) for old, a, b in zip(best, marks, marks[1:], strict=False)]
        found[name] = (best[0] / values.numel() * 1e9, best[1] / values.numel() * 1e9)
    return found


def run(told: dict[str, Any], ranks: int, megabits: float | None, *, shaped: bool) -> list[dict[str, float]]:
    """Trains, and returns what each rank says."""
    with ExitStack() as stack:
        spaces = stack.enter_context(links.namespaces(ranks, megabits)) if shaped else [""] * ranks
        if not shaped and megabits is not None:
            told = {**told, "throttle": megabits}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank, space in enumerate(spaces):
            words = [sys.executable, str(RANK), json.dumps(told)]
            told_rank = links.environment(rank, ranks, port, shaped=shaped)
            paths = {**os.environ, **told_rank, "PYTHONPATH": str(HERE.parent)}
            words = links.command(space, words) if shaped else words
            started.append(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=paths)
            )
        found = []
        for process in started:
            out, err = process.communicate()
            lines = [line for line in out.splitlines() if line.startswith("RESULT ")]
            if process.returncode or not lines:
                raise SystemExit(f"a rank failed:\n{out[-2000:]}\n{err[-4000:]}")
            found.append(json.loads(lines[0].removeprefix("RESULT ")))
    return found


def part_codec(_options: argparse.Namespace, _shaped: bool) -> None:
    print("codec    encode  decode  together, ns per element and core (goal: at most 8)")
    for name, (encoding, decoding) in codec_times().items():
        print(f"{name:8}{encoding:7.2f} {decoding:7.2f} {encoding + decoding:9.2f}")


def part_bytes(options: argparse.Namespace, shaped: bool) -> None:
    told = {"kind": "ours", "stage": options.stage, "millions": options.millions, "warm": 2, "steps": 3}
    numel = max(round(options.millions * 1e6 / 1024**2), 1) * 1024**2
    reference = 2 * (options.ranks - 1) / options.ranks * 2 * numel  # an all-reduce of bf16
    print(f"a bf16 all-reduce among {options.ranks} ranks: {reference / 1e6:.2f} MB a step and rank")
    print("way       books MB  kernel MB  differ  below the all-reduce")
    for way in options.ways:
        found = run({**told, "way": way}, options.ranks, None, shaped=shaped)
        books = sum(row["booked"] for row in found) / len(found)
        kernel = sum(row["sent"] for row in found) / len(found)
        differ = f"{100 * (kernel / books - 1):5.1f} %" if kernel else "      -"
        print(f"{way:9}{books / 1e6:9.3f}{kernel / 1e6:11.3f} {differ}{reference / books:15.2f} times")
        if way == "sign":
            whole = 1 / (0.15 + 0.85 * books / reference)
            print(f"          a whole run with 15 % of its updates before start_step: {whole:.2f} times below")


def part_steps(options: argparse.Namespace, shaped: bool) -> None:
    told = {"stage": options.stage, "millions": options.millions, "warm": options.warm, "steps": options.steps}
    entered = [("ours", way) for way in options.ways]
    if shaped:
        entered.insert(0, ("ddp", "bf16 hook"))
    print(
        f"{options.ranks} ranks, {options.millions:g}M parameters, {options.megabits:g} Mbit/s, stage {options.stage}"
    )
    print("way              median s  fastest s  processor s  MB/step  times the first")
    first = None
    for kind, way in entered:
        found = run({**told, "kind": kind, "way": way}, options.ranks, options.megabits, shaped=shaped)
        median, fastest = (max(row[key] for row in found) for key in ("median", "fastest"))
        first = first or median
        sent = max(row["sent"] or row["booked"] for row in found) / 1e6
        processor = max(row["processor"] for row in found)
        title = f"{kind} {way}"
        print(f"{title:16}{median:9.3f}{fastest:11.3f}{processor:13.3f}{sent:9.2f}{first / median:12.2f}", flush=True)


def part_cells(options: argparse.Namespace, shaped: bool) -> None:
    numel = max(round(options.millions * 1e6 / 1024**2), 1) * 1024**2
    times, right, cells = codec_times(), 0, 0
    whole = options.stage == 0
    plain = Way("plain", plain_bits_on_the_wire(16, options.ranks, whole=whole), 1.0, 0.0)
    print("link       codec   said: plain s  coded s  pays   measured: plain s  coded s  pays")
    for title, megabits in LINKS.items():
        told = {"kind": "ours", "stage": options.stage, "millions": options.millions, "warm": 2, "steps": options.steps}
        rate = megabits if megabits is not None else options.loopback
        link = Link(rate * 1e6 / 8)
        measured = {
            way: max(row["median"] for row in run({**told, "way": way}, options.ranks, megabits, shaped=shaped))
            for way in ("plain", *CODECS)
        }
        for name, codec in CODECS.items():
            way = Way(name, 8 * coded_nbytes(codec, 1 << 18) / (1 << 18), *times[name])
            said = [exchange_seconds(numel, options.ranks, link, one, whole=whole) for one in (plain, way)]
            pays, paid = said[1] < said[0], measured[name] < measured["plain"]
            right, cells = right + (pays is paid), cells + 1
            print(
                f"{title:10} {name:6}{said[0]:14.3f}{said[1]:9.3f}  {pays!s:6}{measured['plain']:17.3f}"
                f"{measured[name]:9.3f}  {paid}",
                flush=True,
            )
    print(f"{right} of {cells} are right")


PARTS = {"codec": part_codec, "bytes": part_bytes, "steps": part_steps, "cells": part_cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--millions", type=float, default=20.0, help="parameters")
    parser.add_argument("--megabits", type=float, default=100.0, help="of each direction of each rank's link")
    parser.add_argument("--loopback", type=float, default=16_000.0, help="megabits that the unshaped link is taken for")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="steps before; auto needs 10")
    parser.add_argument("--ways", nargs="*", default=["plain", "sign", "int8", "int4"])
    options = parser.parse_args()
    why = links.can_shape()
    if why is not None:
        print(f"links cannot be shaped here ({why}): the transport is throttled instead, and DDP is left out")
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options, why is None)


if __name__ == "__main__":
    main()
