"""Measures codecs of gradients: bytes by the kernel's counters, step times on shaped links, time of the codec alone.

Parts (``compression.py PART``; all of them without one):

- codec: nanoseconds of processor time per element and core to encode with error feedback, and to decode.
- bytes: bytes per step and rank of each method, by the traffic counters and by the kernel's counters of the interface.
- steps: step times on a link of ``--megabits`` beside torch's DDP with its bf16 hook.
- auto: ``"auto"`` beside plain gradients, on links of 100 Mbit/s and of 10 Gbit/s.
- cells: whether a codec pays on each link, by ``deepspeed.plan.codes`` and as measured.

A method is "plain", "auto", a codec of ``communication_compression.gradients``, or "ddp". Methods take turns, a step
each, in the same processes. Ranks run in network namespaces whose links the kernel shapes (``contest/links.py``).
Without the rights for that, the project's own transport is throttled and DDP is left out. ``--help`` shows the options.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import torch
from contest import links
from contest.compression_rank import numel_of

from deepspeed.accelerator.cpu import keep_freed_memory
from deepspeed.accelerator.devices import Device
from deepspeed.comm.base.codec import coded_nbytes, decode_add, encode
from deepspeed.comm.codecs import table
from deepspeed.config.codec_names import GRADIENT_CODECS
from deepspeed.plan.codes import CodecCost, PlannedSum, bits_of, codec_seconds, coded_costs
from deepspeed.plan.machine import Machine

CODECS = {name: table.CODECS[name].codec() for name in GRADIENT_CODECS}
LINKS = {"100 Mbit": 100.0, "1 Gbit": 1_000.0, "10 Gbit": 10_000.0, "loopback": None}


def codec_times(millions: float = 4.0, rounds: int = 6) -> dict[str, tuple[float, float]]:
    """Returns by codec the ns of processor time per element to encode with feedback and to decode; least of rounds."""
    keep_freed_memory()
    torch.set_num_threads(1)
    found = {}
    for name, codec in CODECS.items():
        values = torch.randn(int(millions * 2**20))
        error, out = torch.zeros_like(values), torch.zeros_like(values)
        codes = torch.empty(coded_nbytes(codec, values.numel()), dtype=torch.uint8)
        residual = error if codec.feeds_back else None
        best = [float("inf"), float("inf")]
        for _ in range(rounds):
            marks = [time.process_time()]
            encode(codec, values, residual, codes)
            marks.append(time.process_time())
            decode_add(codec, codes, out)
            marks.append(time.process_time())
            best = [min(old, b - a) for old, a, b in zip(best, marks, marks[1:], strict=False)]
        found[name] = (best[0] / values.numel() * 1e9, best[1] / values.numel() * 1e9)
    return found


def run(options: argparse.Namespace, megabits: float | None, shaped: bool, **setup: Any) -> list[dict[str, Any]]:
    """Trains on links of ``megabits`` Mbit/s; returns the figures of each rank, by method."""
    setup = {"stage": options.stage, "millions": options.millions, "steps": options.steps, **setup}
    command = ["-m", "contest.compression_rank", json.dumps({**setup, "throttle": None if shaped else megabits})]
    if not shaped:
        return links.run_ranks(command, options.ranks)
    with links.namespaces(options.ranks, megabits) as spaces:
        return links.run_ranks(command, options.ranks, spaces)


def slowest(found: list[dict[str, Any]], method: str, figure: str) -> float:
    """Returns the largest value of a figure over the ranks."""
    return max(row[method][figure] for row in found)


def part_auto(options: argparse.Namespace, shaped: bool) -> None:
    print(f"{options.ranks} ranks, {options.millions:g}M parameters, stage {options.stage}; goal: at most 1.05")
    print("link        plain median s  auto median s  auto / plain  plain fastest  auto fastest  ratio  verdict")
    for title, megabits in (("100 Mbit", 100.0), ("10 Gbit", 10_000.0)):
        # The first 15 updates of auto are its trial; two more warm the engine up.
        found = run(options, megabits, shaped, methods={"plain": 1, "auto": 17})
        plain, auto = (slowest(found, method, "median") for method in ("plain", "auto"))
        best = [slowest(found, method, "fastest") for method in ("plain", "auto")]
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
    half = 2 * (options.ranks - 1) / options.ranks * numel_of(options.millions)  # elements that an all-reduce sends
    print(
        f"an all-reduce among {options.ranks} ranks: {2 * half / 1e6:.2f} MB of bf16, {4 * half / 1e6:.2f} MB of fp32, "
        "a step and rank"
    )
    print("method    count MB  kernel MB  differ  below bf16  below fp32")
    found = run(options, None, shaped, steps=3, methods=dict.fromkeys(options.methods, 2))
    counted = {method: sum(row[method]["counted"] for row in found) / len(found) for method in options.methods}
    for method, nbytes in counted.items():
        kernel = sum(row[method]["sent"] for row in found) / len(found)
        differ = f"{100 * (kernel / nbytes - 1):5.1f} %" if kernel else "      -"
        below = f"{2 * half / nbytes:12.2f}{4 * half / nbytes:12.2f}"
        print(f"{method:9}{nbytes / 1e6:9.3f}{kernel / 1e6:11.3f} {differ}{below}")
    if "sign" in counted:
        print("a training whose first 15 % of updates are sent in another format, the rest as signs (goal: 5 times):")
        for warm, bits in (("bf16", 2 * half), ("fp32", 4 * half), ("int8", counted.get("int8"))):
            if bits is not None:
                sent = 0.15 * bits + 0.85 * counted["sign"]
                print(f"  as {warm}: {2 * half / sent:.2f} times below bf16, {4 * half / sent:.2f} below fp32")


def part_steps(options: argparse.Namespace, shaped: bool) -> None:
    methods = [*(["ddp"] if shaped else []), *options.methods]
    print(
        f"{options.ranks} ranks, {options.millions:g}M parameters, {options.megabits:g} Mbit/s, stage {options.stage}"
    )
    found = run(options, options.megabits, shaped, methods=dict.fromkeys(methods, options.warm))
    print("method           median s  fastest s  processor s  MB/step  times the first")
    first = slowest(found, methods[0], "median")
    for method in methods:
        median, fastest, processor = (slowest(found, method, figure) for figure in ("median", "fastest", "processor"))
        sent = max(row[method]["sent"] or row[method]["counted"] for row in found) / 1e6
        title = "ddp bf16 hook" if method == "ddp" else f"ours {method}"
        print(f"{title:16}{median:9.3f}{fastest:11.3f}{processor:13.3f}{sent:9.2f}{first / median:12.2f}", flush=True)


def part_cells(options: argparse.Namespace, shaped: bool) -> None:
    numel, gathers = numel_of(options.millions), options.stage == 0
    times, right, cells = codec_times(), 0, 0
    planned_sum = PlannedSum(numel, tuple(range(options.ranks)), 0, gathers, 16, 1, 0)
    device = Device("cpu", 0, 0.0, 0.0, 0.0, 0.0, "this machine")
    # With more ranks than cores, computation takes as many times longer.
    sharing = max(options.ranks / (os.cpu_count() or 1), 1.0)
    print(f"{options.ranks} ranks on {os.cpu_count()} cores, {options.millions:g}M parameters, stage {options.stage}")
    print("link       codec  planned: plain s  coded s  pays   measured: plain s  coded s  pays")
    for title, megabits in LINKS.items():
        rate = (megabits if megabits is not None else options.loopback) * 1e6 / 8
        machine = Machine(device, options.ranks, 1, 0, network=rate)
        plain, *coded = coded_costs([planned_sum], machine, native=False, may_skip=False, codecs=list(CODECS.values()))
        on_links = {row.name: row.link_seconds for row in coded}
        found = run(options, megabits, shaped, methods=dict.fromkeys(("plain", *CODECS), 1))
        for name, codec in CODECS.items():
            encode_time, decode_time = times[name]
            cost = CodecCost(bits_of(codec), sharing * encode_time, sharing * decode_time)
            on_cores = codec_seconds(numel, options.ranks, cost, whole=gathers)
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
    parser.add_argument("--methods", nargs="*", default=["plain", "sign", "int8", "int4"])
    options = parser.parse_args()
    reason = links.can_shape()
    if reason is not None:
        print(f"links cannot be shaped here ({reason}): the transport is throttled instead, and DDP is left out")
    for name in [options.part] if options.part else PARTS:
        PARTS[name](options, reason is None)


if __name__ == "__main__":
    main()
