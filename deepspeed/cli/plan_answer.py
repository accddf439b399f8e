"""``ds_plan MODEL --gpus 8xh100``: whether a model fits, and its best layouts, on one screen."""

from __future__ import annotations

import argparse
import json
import textwrap
from typing import Any

from rich.table import Table
from rich.text import Text

from deepspeed.cli.predict import passed_options
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.machine import Machine
from deepspeed.plan.models import ModelSizes
from deepspeed.plan.prediction.answer import ENGINES, TIGHT, LayoutReport, best_layouts, machine_sizes
from deepspeed.plan.show import as_text, seconds_in_words

_OTHERS = (
    "sweep", "longest", "codes", "predict", "picture", "measure", "micro-batch", "accumulation", "pipe", "tensor",
    "sequence", "ep", "schedule", "num-chunks", "recompute", "activation-checkpointing", "context", "machine",
)  # fmt: skip
_MOST_TOKENS = 1 << 20


def add_answer_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options to the parser of ``ds_plan``."""
    group = parser.add_argument_group("best layouts: ds_plan MODEL --gpus 8xh100")
    group.add_argument(
        "--gpus",
        metavar="NUMBERxNAME",
        help="devices: 8xh100, 64xh100 (nodes of 8), 16x4xgb200; MODEL: a folder or JSON file with a transformers "
        "configuration, or the sizes; --search SAMPLES: the samples of a step",
    )
    group.add_argument(
        "--like",
        choices=tuple(ENGINES),
        help="whose kernels and overlap; fsdp: FSDP2; default: ours",
    )
    group.add_argument("--compare", action="store_true", help="a line for FSDP2, compiled, on the same devices")


def refuse_without_gpus(options: argparse.Namespace) -> None:
    """Raises DeepSpeedConfigError for options that only go with ``--gpus``."""
    if passed := passed_options(options, ("like", "compare")):
        raise DeepSpeedConfigError(f"{passed}: only with --gpus; add it, such as --gpus 8xh100")


def place_of_gpus(options: argparse.Namespace) -> None:
    """Sets the options of machines and of the model to what ``--gpus`` and the first argument say.

    Raises:
        DeepSpeedConfigError: Another option contradicts them.
    """
    if passed := passed_options(options, _OTHERS):
        raise DeepSpeedConfigError(f"{passed}: --gpus searches layouts and simulates no step; leave one of them out")
    if options.nodes != 1 or options.devices != 1:
        raise DeepSpeedConfigError("--gpus gives nodes and devices; leave --nodes and --devices out")
    options.nodes, options.devices, options.device = machine_sizes(options.gpus)
    if options.config is not None:
        if options.model is not None:
            raise DeepSpeedConfigError(f"{options.config} and --model are both given; keep one")
        options.model, options.config = options.config, None


def answer_text(
    sizes: ModelSizes, machine: Machine, tokens: int, samples: int | None, like: str | None, *, compare: bool
) -> tuple[dict[str, Any], str]:
    """Searches; returns the result as JSON's objects, and as text of one screen."""
    if tokens > _MOST_TOKENS:
        raise DeepSpeedConfigError(
            f"--sequence-length {tokens:,}: expected at most {_MOST_TOKENS:,} with --gpus; shorten it"
        )
    answer = best_layouts(sizes.shape, machine, tokens, samples, like=like or "ours")
    other = best_layouts(sizes.shape, machine, tokens, answer.samples, like="fsdp", count=1) if compare else None
    facts: dict[str, Any] = {
        "parameters": sizes.parameters,
        "samples": answer.samples,
        "tried": answer.tried,
        "in_host_memory": answer.offloaded,
        "error": answer.error,
        "best": [each.to_dict() for each in answer.best],
    }
    if other is not None:
        facts["fsdp"] = other.best[0].to_dict()
    return facts, _text(sizes, machine, tokens, answer, other)


def _text(sizes: ModelSizes, machine: Machine, tokens: int, answer: LayoutReport, other: LayoutReport | None) -> str:
    width = 110
    verdict = "fits" if not answer.offloaded else f"fits only with {answer.offloaded}"
    lines = [
        f"{sizes.name}, {sizes.parameters / 1e9:,.3g}B parameters, on {machine.nodes:,} x {machine.devices_per_node} "
        f"{machine.device.name}: {verdict}. Steps of {answer.samples:,} x {tokens:,} tokens, {answer.tried:,} layouts."
    ]
    lines += textwrap.wrap(sizes.note, width) if sizes.note else []
    table = Table()
    for heading in ("", "tokens/s per device", "step", "memory", "layout"):
        table.add_column(heading, justify="left" if heading == "layout" else "right")
    shown = [(f"{number}", each) for number, each in enumerate(answer.best, 1)]
    shown += [("FSDP2", each) for each in (other.best if other is not None else ())]
    for name, each in shown:
        rate, step = each.tokens_per_second, each.step
        table.add_row(
            name,
            f"{rate:,.0f} ({rate / (1 + answer.error):,.0f} to {rate / (1 - answer.error):,.0f})",
            seconds_in_words(step.seconds),
            f"{each.memory_share:.0%}{' TIGHT' if each.is_tight else ''}",
            step.setup.layout.describe() + (f" (and {each.near_copies} like it)" if each.near_copies else ""),
        )
    after = [f"TIGHT: above {TIGHT:.0%} of memory."] if any(each.is_tight for _, each in shown) else []
    for number, each in enumerate(answer.best, 1):
        after += [f"{number}  change first: {each.first_change}"] if each.first_change else []
        after += textwrap.wrap(f"ds_config.json: {json.dumps(each.config)}", width, initial_indent=f"{number}  ")
        after.append(f"{number}  {each.command}")
    return as_text([Text("\n".join(lines)), table, Text("\n".join(after) + "\n")], width)
