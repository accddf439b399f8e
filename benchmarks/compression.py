"""Measures what gradient codecs cost and save: bytes by the kernel's counters, step times on shaped links, codec time.

Parts (``compression.py PART``; all of them without one):

- codec: nanoseconds of processor time per element and core to encode with error feedback, and to decode.
- bytes: what each way sends per step and rank, by the traffic counters and by the kernel's counters of the interface.
- steps: step times on a link of ``--megabits`` beside torch's DDP with its bf16 hook.
- auto: ``"auto"`` beside plain gradients, on links of 100 Mbit/s and of 10 Gbit/s.
- cells: whether a codec pays on each link, by ``deepspeed.plan.codes`` and as measured.

What is compared takes turns, a step each, in the same processes.

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

from deepspeed.accelerator.cpu import keep_freed_memory  # noqa: E402
from deepspeed.accelerator.devices import Device  # noqa: E402
from deepspeed.comm.codecs import table  # noqa: E402
from deepspeed.comm.codecs.codec import coded_nbytes, decode_add, encode  # noqa: E402
from deepspeed.config.codec_names import GRADIENT_CODECS  # noqa: E402
from deepspeed.plan.codes import CodecCost, PlannedSum, bits_of, codec_seconds, coded_costs  # noqa: E402
from deepspeed.plan.machine import Machine  # noqa: E402

RANK = HERE / "contest" / "compression_rank.py"
CODECS = {name: table.CODECS[name].codec() for name in GRADIENT_CODECS}
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
        kept = error if codec.feeds_back else None
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


def run(setup: dict[str, Any], ranks: int, megabits: float | None, *, shaped: bool) -> list[dict[str, Any]]:
    """Trains, and returns what each rank printed of each way."""
    with ExitStack() as stack:
        spaces = stack.enter_context(links.namespaces(ranks, megabits)) if shaped else [""] * ranks
        if not shaped and megabits is not None:
            setup = {**setup, "throttle": megabits}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank, space in enumerate(spaces):
            words = [sys.executable, str(RANK), json.dumps(setup)]
            rank_setup = links.environment(rank, ranks, port, shaped=shaped)
            paths = {**os.environ, **rank_setup, "PYTHONPATH": str(HERE.parent)}
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


def slowest(found: list[dict[str, Any]], way: str, figure: str) -> float:
    """A figure of the rank for which it is largest."""
    return max(row[way][figure] for row in found)


def part_auto(options: argparse.Namespace, shaped: bool) -> None:
    print(f"{options.ranks} ranks, {options.millions:g}M parameters, stage {options.stage}; goal: at most 1.05")
    print("link        plain median s  auto median s  auto / plain  plain fastest  auto fastest  ratio  verdict")
    for title, megabits in (("100 Mbit", 100.0), ("10 Gbit", 10_000.0)):
        setup = {"stage": options.stage, "millions": options.millions, "steps": options.steps}
        # The first 15 updates of auto are its trial; two more, as every engine has them to warm up.
        setup["ways"] = {"plain": 1, "auto": 17}
        found = run(setup, options.ranks, megabits, shaped=shaped)
        plain, auto = (slowest(found, way, "median") for way in ("plain", "auto"))
        best = [slowest(found, way, "fastest") for way in ("plain", "auto")]
        verdict = "holds" if auto <= 1.05 * plain else "FAILS"
        print(
            f"{title:10}{plain:16.3f}{auto:15.3f}{auto / plain:14.3f}{best[0]:15.3f}{best[1]:14.3f}"
            f"{best[1] / best[0]:7.3f}  {verdict}",
            flush=True,
        )


def part_codec(_options: argparse.Namespace, _shaped: bool) -> None:
    print("codec    encode  decode  together, ns per element and core (goal: at most 8)")
    for name, (encoding, decoding) in codec_times().items():
        print(f"{name:8}{encoding:7.2f} {decoding:7.2f} {encoding + decoding:9.2f}")


def part_bytes(options: argparse.Namespace, shaped: bool) -> None:
    setup = {"stage": options.stage, "millions": options.millions, "steps": 3, "ways": dict.fromkeys(options.ways, 2)}
    numel = max(round(options.millions * 1e6 / 1024**2), 1) * 1024**2
    half = 2 * (options.ranks - 1) / options.ranks * numel  # elements that an all-reduce sends
    print(
        f"an all-reduce among {options.ranks} ranks: {2 * half / 1e6:.2f} MB of bf16, {4 * half / 1e6:.2f} MB of fp32, "
        "a step and rank"
    )
    print("way       count MB  kernel MB  differ  below bf16  below fp32")
    found = run(setup, options.ranks, None, shaped=shaped)
    counted = {way: sum(row[way]["counted"] for row in found) / len(found) for way in options.ways}
    for way, nbytes in counted.items():
        kernel = sum(row[way]["sent"] for row in found) / len(found)
        differ = f"{100 * (kernel / nbytes - 1):5.1f} %" if kernel else "      -"
        print(
            f"{way:9}{nbytes / 1e6:9.3f}{kernel / 1e6:11.3f} {differ}{2 * half / nbytes:12.2f}{4 * half / nbytes:12.2f}"
        )
    if "sign" in counted:
        print("a whole run whose first 15 % of updates travel otherwise, then as signs (goal: 5 times below):")
        for warm, bits in (("bf16", 2 * half), ("fp32", 4 * half), ("int8", counted.get("int8"))):
            if bits is not None:
                sent = 0.15 * bits + 0.85 * counted["sign"]
                print(f"  as {warm}: {2 * half / sent:.2f} times below bf16, {4 * half / sent:.2f} below fp32")


def part_steps(options: argparse.Namespace, shaped: bool) -> None:
    ways = [*(["ddp"] if shaped else []), *options.ways]
    setup = {"stage": options.stage, "millions": options.millions, "steps": options.steps}
    setup["ways"] = dict.fromkeys(ways, options.warm)
    print(
        f"{options.ranks} ranks, {options.millions:g}M parameters, {options.megabits:g} Mbit/s, stage {options.stage}"
    )
    found = run(setup, options.ranks, options.megabits, shaped=shaped)
    print("way              median s  fastest s  processor s  MB/step  times the first")
    first = slowest(found, ways[0], "median")
    for way in ways:
        median, fastest, processor = (slowest(found, way, figure) for figure in ("median", "fastest", "processor"))
        sent = max(row[way]["sent"] or row[way]["counted"] for row in found) / 1e6
        title = "ddp bf16 hook" if way == "ddp" else f"ours {way}"
        print(f"{title:16}{median:9.3f}{fastest:11.3f}{processor:13.3f}{sent:9.2f}{first / median:12.2f}", flush=True)


def part_cells(options: argparse.Namespace, shaped: bool) -> None:
    numel = max(round(options.millions * 1e6 / 1024**2), 1) * 1024**2
    times, right, cells = codec_times(), 0, 0
    whole = options.stage == 0
    planned_sum = PlannedSum(numel, tuple(range(options.ranks)), 0, whole, 16, 1, 0)
    device = Device("cpu", 0, 0.0, 0.0, 0.0, 0.0, "this machine")
    # Ranks on one machine share its cores, so what they compute takes as many times longer.
    sharing = max(options.ranks / (os.cpu_count() or 1), 1.0)
    print(f"{options.ranks} ranks on {os.cpu_count()} cores, {options.millions:g}M parameters, stage {options.stage}")
    print("link       codec  planned: plain s  coded s  pays   measured: plain s  coded s  pays")
    for title, megabits in LINKS.items():
        setup = {"stage": options.stage, "millions": options.millions, "steps": options.steps}
        setup["ways"] = dict.fromkeys(("plain", *CODECS), 1)
        rate = (megabits if megabits is not None else options.loopback) * 1e6 / 8
        machine = Machine(device, options.ranks, 1, 0, network=rate)
        plain, *coded = coded_costs([planned_sum], machine, native=False, may_skip=False, codecs=list(CODECS.values()))
        on_links = {row.name: row.link_seconds for row in coded}
        found = run(setup, options.ranks, megabits, shaped=shaped)
        for name, codec in CODECS.items():
            encode_time, decode_time = times[name]
            way = CodecCost(bits_of(codec), sharing * encode_time, sharing * decode_time)
            on_cores = codec_seconds(numel, options.ranks, way, whole=whole)
            predicted = [plain.seconds, on_links[name] + on_cores]
            measured = [slowest(found, one, "median") for one in ("plain", name)]
            pays, paid = predicted[1] < predicted[0], measured[1] < measured[0]
            right, cells = right + (pays is paid), cells + 1
            print(
                f"{title:10} {name:6}{predicted[0]:14.3f}{predicted[1]:9.3f}  {pays!s:6}{measured[0]:17.3f}"
                f"{measured[1]:9.3f}  {paid!s:5}{'' if pays is paid else '  WRONG'}",
                flush=True,
            )
    print(f"{right} of {cells} are right (goal: 11 of 12)")


PARTS = {"codec": part_codec, "bytes": part_bytes, "steps": part_steps, "auto": part_auto, "cells": part_cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=PARTS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--millions", type=float, default=20.0, help="millions of parameters")
    parser.add_argument("--megabits", type=float, default=100.0, help="Mbit/s of each direction of each rank's link")
    parser.add_argument(
        "--loopback", type=float, default=16_000.0, help="assumed Mbit/s of the link that is not shaped"
    )
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3, help="timed steps per codec")
    parser.add_argument("--warm", type=int, default=1, help="steps before the timed ones")
    parser.add_argument("--ways", nargs="*", default=["plain", "sign", "int8", "int4"])
    options = parser.parse_args()
    why = links.can_shape()
    if why is not None:
        print(f"links cannot be shaped here ({why}): the transport is throttled instead, and DDP is left out")
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options, why is None)


if __name__ == "__main__":
    main()
