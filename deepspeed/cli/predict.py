"""``ds_plan --predict`` and ``ds_plan --search``: predict the time of a step, and find the fastest layouts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from deepspeed.accelerator.devices import in_words
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.configs import keys_of, without_batch
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.degrees import DEGREES
from deepspeed.plan.machine import Machine
from deepspeed.plan.picture import step_picture
from deepspeed.plan.pipeline import Pipeline, pipeline_of
from deepspeed.plan.prediction.layout import RECOMPUTATIONS, layout_of
from deepspeed.plan.prediction.search import LayoutSearch, search_layouts
from deepspeed.plan.prediction.step import ERROR, PredictedStep, StepSetup, costs_turned_off, predict_step
from deepspeed.plan.show import as_text, seconds_in_words, times_table
from deepspeed.plan.timeline.predicted_streams import predicted_streams

_FLAGS = {
    "fp8": ("is_fp8", "linear layers compute in fp8; without --predict the times are those, the bytes those of bf16"),
    "compiled": ("is_compiled", "elementwise operations are fused"),
    "fused-loss": ("has_fused_loss", "one kernel computes the loss from 16-bit logits"),
    "cut-norms": ("cuts_norms", "tensor_parallel.sequence_parallel_norms, with a pipeline too"),
    "fsdp": ("is_fsdp", "stage 3 as FSDP has it: fp32 shards alone, embedding and head stay gathered"),
    "keep-outputs": ("keeps_outputs", "the last stage of a pipeline keeps the logits of all micro-batches"),
    "overlap-gather": ("overlaps_gather", "stages 1 and 2 gather updated parameters while the next forward runs"),
    "megatron": ("is_megatron", "copies, casts and recomputation as Megatron has them"),
    "sum-in-products": ("sums_in_products", "products that compute gradients of weights add to those of earlier ones"),
    "once-per-node": ("sends_once_per_node", "a token for experts crosses the network once per node, as with DeepEP"),
    "overlap-tensor": ("overlaps_tensor", "exchanges between tensor ranks overlap with matrix products, in chunks"),
}
_NUMBERS = {
    "shard-ranks": ("shard_ranks", int, "ranks over which states are sharded; default: all data ranks"),
    "lighter-ends": (
        "lighter_ends",
        int,
        "number of layers that the first and the last chunk have fewer than the others",
    ),
    "gradient-bytes": ("gradient_bytes", int, "bytes per element of the gradients, 2 or 4"),
    "imbalance": ("imbalance", float, "tokens of the busiest expert divided by the mean"),
}
_ONLY_SIMULATED = ("sweep", "longest", "write", "codes", "host-memory")
_SEARCHED = ("schedule", "num-chunks", "micro-batch", "accumulation", "recompute", "activation-checkpointing", *DEGREES)
_MOST_HELP = 4  # most improvements shown


def add_prediction_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of both to the parser of ``ds_plan``."""
    group = parser.add_argument_group("predicted time of a decoder-only transformer")
    group.add_argument("--predict", action="store_true", help="predict the time of a step, without simulating it")
    group.add_argument(
        "--search",
        type=int,
        metavar="SAMPLES",
        help="sort parallel layouts by predicted time, for a global batch of SAMPLES",
    )
    group.add_argument("--recompute", choices=RECOMPUTATIONS, help="what is recomputed in backward; default: none")
    group.add_argument("--context", type=int, help="ranks that divide sequences by ring attention")
    for name, (_, what) in _FLAGS.items():
        group.add_argument(f"--{name}", action="store_true", help=what)
    group.add_argument(
        "--whole-vocabulary", action="store_true", help="tensor ranks do not divide the embedding and the head"
    )
    group.add_argument(
        "--no-overlap", action="store_true", help="gradients are reduced after the backward, not during it"
    )
    for name, (_, kind, what) in _NUMBERS.items():
        group.add_argument(f"--{name}", type=kind, help=what)


def refuse_without_prediction(options: argparse.Namespace) -> None:
    """Raises DeepSpeedConfigError for options of predictions without ``--predict`` or ``--search``."""
    if options.predict or options.search is not None:
        return
    names = (*(name for name in _FLAGS if name != "fp8"), *_NUMBERS)
    if passed := passed_options(options, (*names, "recompute", "context", "whole-vocabulary", "no-overlap")):
        raise DeepSpeedConfigError(f"{passed}: only with --predict or --search; add one of them")


def refuse_beside_prediction(options: argparse.Namespace) -> None:
    """Raises DeepSpeedConfigError for ``--predict`` beside ``--search`` or for options without effect there."""
    if options.predict and options.search is not None:
        raise DeepSpeedConfigError("--predict and --search are both given; keep one")
    kind = "--predict" if options.predict else "--search"
    if passed := passed_options(options, _ONLY_SIMULATED):
        raise DeepSpeedConfigError(f"{passed}: {kind} simulates no step and does not use it; leave one of them out")
    if options.search is None:
        return
    if passed := passed_options(options, ("context", *_SEARCHED)):
        raise DeepSpeedConfigError(
            f"{passed}: --search tries all of them; leave it out, or give the whole layout and use --predict"
        )


def passed_options(options: argparse.Namespace, names: tuple[str, ...]) -> str:
    """Returns those of the options that are on the command line, as text; empty if none is."""
    values = {name: getattr(options, name.replace("-", "_")) for name in names}
    return ", ".join(f"--{name}" for name, value in values.items() if value is not None and value is not False)


@dataclass(frozen=True)
class PredictionOutput:
    """How results are printed and saved."""

    show: Callable[[str], None]  # prints a text
    width: int  # columns of the terminal
    save: Callable[[str], None]  # writes a text to the file of ``--picture``


def run_prediction(
    options: argparse.Namespace,
    shape: Any,
    machine: Machine,
    config: dict[str, Any],
    output: PredictionOutput,
) -> int:
    """Predicts or searches, and prints; returns 0 if the step, or any layout, fits; 1 if not.

    Raises:
        DeepSpeedConfigError: The model is not described by sizes, or cannot be divided so.
    """
    if not isinstance(shape, DecoderShape):
        raise DeepSpeedConfigError(
            "--predict and --search take a decoder by its sizes (--layers --hidden --heads --vocab); give these "
            "instead of --model"
        )
    if options.context is not None and options.sequence is not None:
        raise DeepSpeedConfigError("--context and --sequence are both given; keep one: --context is a ring")
    settings: dict[str, Any] = {
        field: True for name, (field, _) in _FLAGS.items() if getattr(options, name.replace("-", "_"))
    }
    settings |= {field: getattr(options, name.replace("-", "_")) for name, (field, _, _) in _NUMBERS.items()}
    settings |= {"is_ring": True} if options.context is not None else {}
    settings |= {"cuts_vocabulary": False} if options.whole_vocabulary else {}
    settings |= {"overlaps_data": False} if options.no_overlap else {}
    settings["recompute"] = options.recompute or ("full" if options.activation_checkpointing else None)
    keys_of(config)  # refuses what the engine would refuse
    if options.fp8 and not machine.device.fp8_flops:
        raise DeepSpeedConfigError(
            f"--fp8: device {machine.device.name!r} has no fp8 operations per second (fp8_flops); choose another "
            "device, give them in a file of --machine, or leave --fp8 out"
        )
    if options.search is not None:
        open_batch = {**without_batch(config), "tensor_parallel": {}, "sequence_parallel_size": 1}
        found = layout_of(open_batch, machine.ranks, pipeline=Pipeline(), tensor=1, sequence=1, ep=1, **settings)
        base = replace(found, cuts_norms=True)
        ranking = search_layouts(shape, machine, options.sequence_length, options.search, base=base)
        if options.picture:
            output.save(prediction_picture(ranking.best[0].step, is_trace=options.picture.endswith(".json")))
        text = json.dumps(_ranking_dict(ranking), indent=2) + "\n"
        output.show(text if options.json else ranking_text(ranking, output.width))
        return 0
    found = layout_of(
        config,
        machine.ranks,
        pipeline=pipeline_of(config, options.pipe or 1, options.schedule, options.num_chunks),
        tensor=options.tensor,
        sequence=options.context or options.sequence,
        ep=options.ep,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        **settings,
    )
    step = predict_step(StepSetup(shape, found, machine, options.sequence_length))
    facts = {**step.to_dict(), "would_help_seconds": dict(costs_turned_off(step))}
    if options.picture:
        output.save(prediction_picture(step, is_trace=options.picture.endswith(".json")))
    output.show(json.dumps(facts, indent=2) + "\n" if options.json else step_text(step, output.width))
    return 0 if step.fits else 1


def prediction_picture(step: PredictedStep, *, is_trace: bool) -> str:
    """Returns a picture of the streams of a predicted step. ``is_trace``: as a trace for Perfetto instead of SVG."""
    setup = step.setup
    title = (
        f"decoder of {setup.shape.parameters:,} parameters, {setup.machine.ranks:,} x {setup.machine.device.name}, "
        f"{setup.layout.describe()}"
    )
    return step_picture(step, predicted_streams(step), title, is_trace=is_trace)


def _ranking_dict(ranking: LayoutSearch) -> dict[str, Any]:
    return {
        "tried": ranking.tried,
        "best": [{**each.step.to_dict(), "reason": each.reason} for each in ranking.best],
        "others": dict(ranking.refused.most_common()),
    }


def ranking_text(ranking: LayoutSearch, width: int) -> str:
    """Returns the table of a search: the best layouts, and why the others are not among them."""
    table = Table(title=f"The best of {ranking.tried:,} layouts", title_justify="left")
    for heading in ("step", "tokens/s", "device", "layout", "why here"):
        table.add_column(heading, justify="left" if heading in ("layout", "why here") else "right")
    for each in ranking.best:
        step = each.step
        table.add_row(
            seconds_in_words(step.seconds),
            f"{step.tokens_per_second:,.0f}",
            in_words(step.device_bytes),
            step.setup.layout.describe(),
            each.reason,
        )
    lines = [f"{number:,}: {reason}" for reason, number in ranking.refused.most_common()]
    return as_text([table, Text("The others:\n" + "\n".join(lines) + "\n")], width)


def step_text(step: PredictedStep, width: int) -> str:
    """Returns the table of a predicted step: where its time goes, its memory, and what would help most."""
    setup = step.setup
    machine = setup.machine
    head = Text(
        f"decoder of {setup.shape.layers} layers, {setup.shape.parameters:,} parameters, sequences of "
        f"{setup.tokens:,} tokens\n{machine.ranks:,} ranks: {machine.nodes:,} x {machine.devices_per_node} "
        f"{machine.device.name}\n{setup.layout.describe()}\n"
    )
    table = times_table("Predicted time of a step, busiest stage", step, f"+- {ERROR:.0%}")
    table.add_row("tokens per second of all ranks", f"{step.tokens_per_second:,.0f}", "")
    table.add_row("TFLOP/s of a device, without recomputation", f"{step.model_flops / 1e12:,.0f}", "")
    lines = [
        f"Device: {'fits' if step.fits else 'DOES NOT FIT'}, {in_words(step.needed_bytes)} needed of "
        f"{in_words(machine.device_memory)}."
    ]
    helpful = costs_turned_off(step)[:_MOST_HELP]
    if helpful:
        lines.append("What would help most, each alone:")
        lines += [
            f"  - {name}: {seconds_in_words(seconds)} less ({seconds / step.seconds:.0%})" for name, seconds in helpful
        ]
    return as_text([head, table, _memory_table(step), Text("\n".join(lines) + "\n")], width)


def _memory_table(step: PredictedStep) -> Table:
    parts, machine = step.memory, step.setup.machine
    table = Table(title="Memory of the stage that needs most, at its peak", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for name, nbytes in parts.rows():
        table.add_row(name, in_words(nbytes))
    spare = step.needed_bytes - sum(parts.tensors.values()) - parts.gaps - parts.context - parts.communicators
    if spare > 0:
        table.add_row(f"rest of the headroom of {machine.headroom:.0%} (--headroom)", in_words(spare))
    table.add_row("reserved by the allocator", in_words(step.device_bytes), style="bold")
    table.add_row("needed", in_words(step.needed_bytes), style="bold")
    return table
