"""``ds_plan``: computes whether a job fits and what it communicates, for any number of devices, without one."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from deepspeed.accelerator.devices import DEVICES, in_words
from deepspeed.cli.command import run_command
from deepspeed.cli.measure import measure_in_ranks
from deepspeed.cli.plan_answer import add_answer_options, answer_text, place_of_gpus, refuse_without_gpus
from deepspeed.cli.predict import (
    PredictionOutput,
    add_prediction_options,
    refuse_beside_prediction,
    refuse_without_prediction,
    run_prediction,
)
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES
from deepspeed.plan.advice import advise
from deepspeed.plan.api import PlanOptions
from deepspeed.plan.configs import read_config
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.degrees import DEGREES, at_degrees
from deepspeed.plan.limits import check_count
from deepspeed.plan.longest import longest_sequence
from deepspeed.plan.machine import NETWORKS, read_machine_file, read_network
from deepspeed.plan.models import model_sizes
from deepspeed.plan.picture import step_picture, sweep_svg
from deepspeed.plan.planner import make_plan
from deepspeed.plan.result import Plan, Request
from deepspeed.plan.sweep import Point, read_axes, sweep, sweep_text

_SIZES = {
    "layers": "number of blocks",
    "hidden": "hidden size",
    "heads": "attention heads",
    "vocab": "vocabulary size",
}


def main(args: Sequence[str] | None = None) -> int:
    """Plans and prints; returns 0 if the job fits (in a sweep: if some combination does), 1 if not, 2 for an error."""
    options = _parser().parse_args(args)
    try:
        if options.list_devices:
            table = Table("name", "memory", "bf16 TFLOP/s", "memory GB/s", "link GB/s", "host GB/s", "source")
            for device in DEVICES.values():
                rates = (device.flops / 1e12, device.memory_bandwidth / 1e9, device.link / 1e9, device.host_link / 1e9)
                table.add_row(device.name, in_words(device.memory), *(f"{rate:,.0f}" for rate in rates), device.source)
            Console(width=140).print(table)
            return 0
        _check_targets(options)
        if options.measure is not None:
            _check_counts(options)
            if options.config or options.model or options.layers or options.predict or options.search or options.sweep:
                raise DeepSpeedConfigError(
                    "--measure times this machine and plans nothing; leave the model and the configuration out, and "
                    f"then plan with --machine {options.measure}"
                )
            if options.nodes > 1 or options.machine is not None or options.network is not None:
                raise DeepSpeedConfigError(
                    "--measure times one node, and neither its network nor another file; leave --nodes, --machine and "
                    "--network out, and give them when you plan"
                )
            measure_in_ranks(options.measure, options.devices)
            return 0
        if options.gpus is not None:
            return _answer(options)
        refuse_without_gpus(options)
        refuse_without_prediction(options)
        if options.predict or options.search is not None:
            _check_counts(options)
            refuse_beside_prediction(options)
            config = read_config(options.config if options.config is not None else _default_config())
            output = PredictionOutput(_show, _width(120), functools.partial(_save, "picture", options.picture))
            return run_prediction(options, _model(options), _options(options).machine(), config, output)
        return _sweep(options) if options.sweep else _plan(options)
    except DeepSpeedError as error:
        sys.stderr.write(f"ds_plan: {error}\n")
        return 2


def run() -> None:
    """Runs the command; exits with its code if that is not 0."""
    run_command("ds_plan", main, None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ds_plan", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "config", nargs="?", help="ds_config file; without one: bf16 and AdamW at stage 3. With --gpus: the model"
    )
    add_answer_options(parser)
    model = parser.add_argument_group("model, one of")
    model.add_argument("--model", help="module:callable, or a folder or JSON file with a transformers configuration")
    for name, what in _SIZES.items():
        model.add_argument(f"--{name}", type=int, help=f"{what} of a decoder-only transformer")
    model.add_argument("--kv-heads", type=int, help="key-value heads; default: as many as heads")
    model.add_argument("--intermediate", type=int, help="feed-forward width; default: 8/3 of hidden")
    model.add_argument(
        "--experts", type=int, help="experts of each block, each of the feed-forward width; default: none"
    )
    model.add_argument("--experts-per-token", type=int, help="experts to which a token is sent; default: 2")
    model.add_argument("--head-size", type=int, help="width of a head; default: hidden / heads")
    model.add_argument("--plain-mlp", action="store_true", help="two layers around a GELU, and LayerNorm, as in GPT")
    model.add_argument(
        "--plain-attention", action="store_true", help="attention that stores its scores, not a fused one"
    )
    model.add_argument("--dropout", type=float, help="probability of dropout; default: 0")
    where = parser.add_argument_group("machines")
    where.add_argument("--nodes", type=int, default=1, help="number of nodes; default: 1")
    where.add_argument("--devices", type=int, default=1, help="devices per node; default: 1")
    where.add_argument("--device", default="h100", help="a name in --list-devices, cpu, or other; default: h100")
    where.add_argument(
        "--machine", metavar="FILE.json", help="file with the figures of another device, instead of --device"
    )
    where.add_argument(
        "--measure", metavar="FILE.json", help="time --devices ranks on this machine and write such a file"
    )
    where.add_argument("--device-memory", help="memory of a device, with a unit: 80GB, 64GiB")
    where.add_argument("--host-memory", help="host memory of a node, with a unit")
    for name, what in (
        ("flops", "operations per second of a device"),
        ("link", "bytes per second and direction between devices of a node"),
        ("host-link", "bytes per second and direction between device and host"),
        ("disk", "bytes per second of a node's disk"),
        ("headroom", "share of device memory to leave for driver and fragmentation"),
    ):
        where.add_argument(f"--{name}", type=float, help=what)
    where.add_argument(
        "--network",
        help="bytes per second and direction between nodes, per device; or adapters of a node: 8xndr, 4x200 (Gb/s); "
        f"kinds: {', '.join(NETWORKS)}",
    )
    where.add_argument("--list-devices", action="store_true", help="print the table of devices and its sources")
    job = parser.add_argument_group("job")
    job.add_argument("--sequence-length", type=int, default=2048, help="tokens of a sample; default: 2048")
    job.add_argument("--micro-batch", type=int, help="samples per forward and device; default: the configuration's")
    job.add_argument("--accumulation", type=int, help="micro-batches per step and rank; default: the configuration's")
    job.add_argument("--longest", action="store_true", help="find the longest sequence that fits")
    job.add_argument("--activation-checkpointing", action="store_true", help="recompute repeated blocks in backward")
    for name, degree in DEGREES.items():
        job.add_argument(f"--{name}", type=int, help=degree.text)
    job.add_argument(
        "--schedule", help=f"pipeline schedule: {', '.join(TRAIN_SCHEDULES)}; default: the configuration's"
    )
    job.add_argument("--num-chunks", type=int, help="chunks of each stage, for schedules with several")
    job.add_argument(
        "--sweep",
        nargs="+",
        metavar="AXIS=V,V",
        help="plan combinations: world=8,64 stage=2,3 offload=none,cpu,nvme pipe=1,2 tensor=1,2 sequence=1,2 ep=1,2 "
        "micro_batch=1,2 accumulation=1,8 checkpointing=off,on",
    )
    add_prediction_options(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument("--write", metavar="FILE", help="write the cheapest configuration that fits to this file")
    out.add_argument(
        "--picture",
        metavar="FILE",
        help="draw the sweep, or the streams of the step (.svg; .json for Perfetto), with --search those of the "
        "fastest layout",
    )
    out.add_argument("--codes", action="store_true", help="show the cost of gradients with each codec")
    out.add_argument("--no-suggestions", action="store_true", help="do not search for changes with which the job fits")
    return parser


def _check_targets(options: argparse.Namespace) -> None:
    """Raises for output files that cannot be written, before anything is planned."""
    for option in ("write", "picture", "measure"):
        target = getattr(options, option)
        if target is not None:
            path = Path(target)
            if path.is_dir() or not path.name:
                raise DeepSpeedConfigError(f"--{option} {target}: expected a file, found a folder; add a file name")
            if not path.parent.is_dir():
                raise DeepSpeedConfigError(f"--{option} {target}: there is no folder {path.parent}; make it first")
    endings = (".svg",) if options.sweep else (".svg", ".json")
    if options.picture is not None and not options.picture.endswith(endings):
        raise DeepSpeedConfigError(
            f"--picture {options.picture}: expected a name that ends in {' or '.join(endings)}; change it"
        )


def _save(option: str, target: str, text: str) -> None:
    path = Path(target)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DeepSpeedConfigError(f"--{option} {target}: cannot be written ({error}); choose another place") from error


def _show(text: str) -> None:
    """Prints a text; in ASCII if the terminal's encoding requires it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = re.sub("[\u2500\u2501\u2504\u2505\u2508\u2509\u2550]", "-", text)
        text = re.sub("[\u2502\u2503\u2551]", "|", text)
        text = re.sub("[\u250c-\u257f]", "+", text)
    sys.stdout.write(text)


def _width(most: int) -> int:
    return min(shutil.get_terminal_size().columns, most) if sys.stdout.isatty() else most


def _check_counts(options: argparse.Namespace) -> None:
    counts = (
        "nodes", "devices", "sequence_length", "micro_batch", "accumulation", "num_chunks", "context", "search",
        "shard_ranks", *DEGREES,
    )  # fmt: skip
    for name in counts:
        check_count(name, getattr(options, name), f"--{name.replace('_', '-')}")
    check_count("lighter_ends", options.lighter_ends, "--lighter-ends", least=0)


def _options(options: argparse.Namespace) -> PlanOptions:
    given = {entry.name: getattr(options, entry.name) for entry in fields(PlanOptions) if hasattr(options, entry.name)}
    given["devices_per_node"] = options.devices
    given["device"] = options.device if options.machine is None else read_machine_file(options.machine)
    given["network"] = None if options.network is None else read_network(options.network, options.devices)
    given["fp8"] = options.fp8 and not options.predict and options.search is None
    return PlanOptions(**given)


def _request(options: argparse.Namespace) -> Request:
    _check_counts(options)
    config = options.config if options.config is not None else _default_config()
    request = _options(options).request(_model(options), config)
    return at_degrees(request, **{name: getattr(options, name) for name in DEGREES})


def _model(options: argparse.Namespace) -> Any:
    sizes = {name: getattr(options, name) for name in _SIZES}
    names = ("kv_heads", "intermediate", "experts", "experts_per_token", "head_size", "dropout")
    further = {name: getattr(options, name) for name in names}
    further["is_gated"] = False if options.plain_mlp else None
    further["has_fused_attention"] = False if options.plain_attention else None
    if options.model is not None:
        if any(value is not None for value in sizes.values()):
            raise DeepSpeedConfigError("--model and sizes (--layers, ...) are both given; keep one")
        if any(value is not None for value in further.values()):
            raise DeepSpeedConfigError(
                "--kv-heads, --intermediate, --experts, --head-size, --plain-mlp, --plain-attention and --dropout go "
                "with --layers --hidden --heads --vocab; a model given with --model has its own, so leave them out"
            )
        return options.model
    missing = [f"--{name}" for name, value in sizes.items() if value is None]
    if missing:
        raise DeepSpeedConfigError(
            f"there is no model: give --model or --layers --hidden --heads --vocab (missing: {', '.join(missing)})"
        )
    return DecoderShape(**sizes, **{name: value for name, value in further.items() if value is not None})


def _default_config() -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3},
    }


def _answer(options: argparse.Namespace) -> int:
    place_of_gpus(options)
    _check_counts(options)
    machine = _options(options).machine()
    with Progress() as shown, redirect_stdout(sys.stderr):
        shown.doing("reading the model and trying layouts")
        sizes = model_sizes(_model(options))
        tokens = options.sequence_length
        facts, text = answer_text(sizes, machine, tokens, options.search, options.like, compare=options.compare)
    if options.write:
        _save("write", options.write, json.dumps(facts["best"][0]["ds_config"], indent=2) + "\n")
    _show(json.dumps(facts, indent=2) + "\n" if options.json else text)
    return 0


def _plan(options: argparse.Namespace) -> int:
    # The output of the model's own code is not part of the result.
    with Progress() as shown, redirect_stdout(sys.stderr):
        shown.doing("building the model and simulating a training step, without devices")
        plan = longest_sequence(_request(options)) if options.longest else make_plan(_request(options))
        if not plan.fits and not options.no_suggestions:
            shown.doing("it does not fit; simulating other settings that may")
            plan.take_advice(advise(plan))
    if options.picture:
        _save("picture", options.picture, _picture(plan, options.picture))
    if options.write:
        chosen = plan if plan.fits or not plan.suggestions else plan.suggestions[0][1]
        _save("write", options.write, chosen.config_text())
        if not chosen.fits:
            sys.stderr.write(f"ds_plan: {options.write}: written as it is, although it does not fit\n")
        elif chosen.request.checkpointing and not plan.request.checkpointing:
            sys.stderr.write(f"ds_plan: {options.write}: the model itself has to checkpoint its activations\n")
    _show(json.dumps(plan.to_dict(), indent=2) + "\n" if options.json else plan.table(_width(100), codes=options.codes))
    return 0 if plan.fits else 1


def _picture(plan: Plan, target: str) -> str:
    step, streams = plan.timed_step, plan.streams
    if step is None or streams is None:
        raise DeepSpeedConfigError(
            "--picture: the rates of the device are not known, so that there is no timeline; choose a --device of the "
            "table, or give a --machine file"
        )
    title = f"{plan.request.source.name}, rank {plan.rank} of {plan.machine.ranks:,}"
    return step_picture(step, streams, title, is_trace=target.endswith(".json"))


def _sweep(options: argparse.Namespace) -> int:
    axes = read_axes(options.sweep)
    total = math.prod(map(len, axes.values()))
    points: list[Point] = []
    with Progress() as shown, redirect_stdout(sys.stderr):
        shown.doing(f"simulating combination 1 of {total}")
        for point in sweep(_request(options), axes, longest=options.longest):
            points.append(point)
            shown.doing(f"simulating combination {min(len(points) + 1, total)} of {total}")
    fitting = [p.plan for p in points if p.plan is not None and p.plan.fits]
    _show(
        json.dumps([_point(point) for point in points], indent=2) + "\n"
        if options.json
        else sweep_text(points, _width(110))
    )
    if options.picture:
        _save("picture", options.picture, sweep_svg(points))
    if options.write:
        if not fitting:
            raise DeepSpeedConfigError(
                f"--write {options.write}: expected a combination that fits, found none, so the file was not written; "
                "sweep more ranks or offload"
            )
        best = min(fitting, key=lambda plan: (plan.machine.ranks, -(plan.tokens_per_second or 0)))
        _save("write", options.write, best.config_text())
    return 0 if fitting else 1


def _point(point: Point) -> dict[str, Any]:
    if point.plan is None:
        return {**point.place, "refused": point.refusal}
    return {**point.place, **point.plan.to_dict()}


PATIENCE_SECONDS = 2.0
_REFRESH_SECONDS = 0.5
_LINE_SECONDS = 10.0  # between two lines if the output is not a terminal


class Progress:
    """Shows progress on stderr if a block takes longer than two seconds; a context manager.

    On a terminal in one rewritten line, in a file in a new line every few seconds.
    """

    def __init__(self) -> None:
        self._what = ""
        self._started = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, name="progress", daemon=True)

    def doing(self, what: str) -> None:
        """Sets the text that the progress line shows from now on."""
        self._what = what

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _show(self) -> None:
        stream = sys.stderr
        on_terminal = stream.isatty()
        pause = PATIENCE_SECONDS
        while not self._is_over.wait(pause):
            text = f"ds_plan: {self._what} ... {time.monotonic() - self._started:.0f} s"
            if on_terminal:  # a wrapped line could not be removed
                text = text[: shutil.get_terminal_size().columns - 1]
            stream.write(f"\r{text}\x1b[K" if on_terminal else f"{text}\n")
            stream.flush()
            pause = _REFRESH_SECONDS if on_terminal else _LINE_SECONDS
        if on_terminal and pause == _REFRESH_SECONDS:
            stream.write("\r\x1b[K")
            stream.flush()


if __name__ == "__main__":
    run()
