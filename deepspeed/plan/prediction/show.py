"""A predicted step as text."""

from __future__ import annotations

from rich.text import Text

from deepspeed.accelerator.devices import in_words
from deepspeed.plan.prediction.step import ERROR, PredictedStep, costs_turned_off
from deepspeed.plan.show import as_text, seconds_in_words, times_table

_MOST_HELP = 4  # lines of what would help


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
    left = machine.usable - step.device_bytes
    fit = "fits" if left >= 0 else "DOES NOT FIT"
    lines = [
        f"Device: {fit}, {in_words(step.device_bytes)} of {in_words(machine.usable)} usable "
        f"({in_words(step.state_bytes)} of states, {in_words(step.activation_bytes)} of activations)."
    ]
    helpful = costs_turned_off(step)[:_MOST_HELP]
    if helpful:
        lines.append("What would help most, each alone:")
        lines += [
            f"  - {name}: {seconds_in_words(seconds)} less ({seconds / step.seconds:.0%})" for name, seconds in helpful
        ]
    return as_text([head, table, Text("\n".join(lines) + "\n")], width)
