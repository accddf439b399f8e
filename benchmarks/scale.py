"""Compares predicted step times and memory with published results, record by record.

``benchmarks/data/scale-public.json`` has the results with their sources. The constants in
``deepspeed/accelerator/devices.py`` are fitted to every other record of each source and tested with the rest.
Run: ``python -m benchmarks.scale [--out FILE] [--fit] [--leave-out]``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.published_runs import RECORDS, PublishedRun, predicted, read_records, split
from benchmarks.scale_fit import FACTORS, constants, fit, left_out, limits_of, reached_of
from deepspeed.plan.prediction.step import PredictedStep, predict_step

_FEW_RUNS = 3  # least number of runs for a rank correlation


def _row(run: PublishedRun, step: PredictedStep, half: str) -> str:
    def pair(measured: float | None, made: float, scale: float) -> str:
        if measured is None:
            return f"| {made / scale:,.4g} | "
        return f"{measured / scale:,.4g} | {made / scale:,.4g} | {made / measured - 1:+.1%}"

    times, memory = pair(run.seconds, step.seconds, 1.0), pair(run.memory, run.memory_of(step), 2**30)
    fits = "yes" if step.fits else "NO"
    return f"| {run.name} | {half} | {times} | {memory} | {fits} | {step.setup.layout.describe()} |"


def report(runs: list[PublishedRun], refused: Mapping[str, str]) -> str:
    """Returns the table of all records, and the errors of both halves.

    Args:
        runs: The records that can be predicted.
        refused: By name of each other record, the reason.
    """
    fitted, tested = split(runs)
    names = {run.name: "fit" for run in fitted} | {run.name: "test" for run in tested}
    reached = reached_of(constants(), runs)
    steps = {run.name: predicted(run, reached, is_quick=False) for run in runs}
    lines = ["# Predicted step time and memory of published runs", "", _HOW, ""]
    lines += ["| half | records | median error | by source: median, worst |", "|---|---|---|---|"]
    for title, half in (("fit", fitted), ("test", tested)):
        errors: dict[str, list[float]] = defaultdict(list)
        for run in half:
            errors[run.source].append(abs(steps[run.name].seconds / (run.seconds or 1.0) - 1))
        everything = [error for of_source in errors.values() for error in of_source]
        if not everything:
            continue
        by_source = "; ".join(f"{name} {statistics.median(own):.1%}, {max(own):.1%}" for name, own in errors.items())
        lines.append(f"| {title} | {len(half)} | {statistics.median(everything):.1%} | {by_source} |")
    memory_errors = [abs(run.memory_of(steps[run.name]) / run.memory - 1) for run in runs if run.memory is not None]
    too_large = [run.name for run in runs if not steps[run.name].fits]
    lines += ["", "No record has a memory."]
    if memory_errors:
        lines[-1] = f"Memory of {len(memory_errors)} records: median error {statistics.median(memory_errors):.1%}, "
        lines[-1] += f"worst {max(memory_errors):.1%}."
    lines[-1] += f" Predicted not to fit, although they ran: {', '.join(too_large) or 'none'}."
    floors = {run.name: least_seconds(steps[run.name]) / run.seconds for run in runs if run.seconds}
    if floors:
        above = [name for name, share in floors.items() if share > 1]
        lines += ["", "At the maker's peak, the operations of a step take at most "]
        lines[-1] += f"{max(floors.values()):.0%} of the measured time. More than 100 %: {', '.join(above) or 'none'}."
    lines += ["", *_without_recomputation(runs)]
    pairs = [(steps[run.name], run) for run in runs if run.seconds]
    lines += ["", f"Rank correlation of predicted and measured model FLOP/s: {_rank_correlation(pairs)}; "]
    for name in dict.fromkeys(run.source for _, run in pairs):
        lines[-1] += f"{name} {_rank_correlation([pair for pair in pairs if pair[1].source == name])}, "
    lines[-1] = lines[-1].removesuffix(", ") + "."
    lines[-1] += " Of sweeps (three or more layouts of one model on one machine): "
    lines[-1] += (", ".join(f"{name} {_rank_correlation(own)}" for name, own in sweeps(pairs)) or "none") + "."
    lines += ["", *_constants(), ""]
    lines.append(
        "| record | half | measured s | predicted s | error | measured GiB | predicted GiB | error | fits | layout |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    lines += [_row(run, steps[run.name], names.get(run.name, "memory only")) for run in runs]
    if refused:
        lines += ["", "Not predicted:", "", *(f"- {name}: {why}" for name, why in refused.items())]
    return "\n".join(lines) + "\n"


def _constants() -> list[str]:
    """Returns a table of the constants with their limits."""
    lines = ["| constant | value | limits |", "|---|---|---|"]
    for name, value in constants().items():
        low, high = limits_of(name)
        lines.append(f"| {name} | {value:.3g} | {low:g} to {high:g} |")
    return lines


def least_seconds(step: PredictedStep) -> float:
    """Returns the seconds of a step's operations at the maker's peak; no step can be faster."""
    device = step.setup.machine.device
    return step.flops / max(device.flops, device.fp8_flops if step.setup.layout.is_fp8 else 0.0)


def without_recomputation(run: PublishedRun) -> PredictedStep:
    """Predicts a run without recomputation and ``cuts_norms``, for comparison with ``run.unrecomputed``."""
    setup = run.setups[0]
    return predict_step(replace(setup, layout=replace(setup.layout, recompute="none", cuts_norms=False)), is_quick=True)


def _without_recomputation(runs: list[PublishedRun]) -> list[str]:
    if all(run.unrecomputed is None for run in runs):
        return []
    lines = [
        "The same models without recomputation and with whole norms, which by their source do not fit on the devices. "
        "The source computes states and activations.",
        "",
        "| record | counted GiB | predicted GiB | error | device GiB | fits |",
        "|---|---|---|---|---|---|",
    ]
    for run in runs:
        if run.unrecomputed is not None:
            step = without_recomputation(run)
            made, device = step.state_bytes + step.activation_bytes, step.setup.machine.device_memory
            numbers = f"{run.unrecomputed / 2**30:.4g} | {made / 2**30:.4g} | {made / run.unrecomputed - 1:+.1%}"
            lines.append(f"| {run.name} | {numbers} | {device / 2**30:.4g} | {'YES' if step.fits else 'no'} |")
    return lines


def sweeps(
    pairs: Iterable[tuple[PredictedStep, PublishedRun]],
) -> list[tuple[str, list[tuple[PredictedStep, PublishedRun]]]]:
    """Returns by title the runs of a source with one model on one number of one device, if there are three or more."""
    found: dict[tuple[Any, ...], list[tuple[PredictedStep, PublishedRun]]] = defaultdict(list)
    for step, run in pairs:
        setup = run.setups[0]
        found[run.machine, setup.shape, setup.machine.ranks].append((step, run))
    return [
        (f"{machine} {shape.parameters / 1e9:.0f}B on {ranks}", own)
        for (machine, shape, ranks), own in found.items()
        if len(own) >= _FEW_RUNS
    ]


_HOW = (
    "Made by `python -m benchmarks.scale --out FILE` from `benchmarks/data/scale-public.json`. The constants of "
    "`deepspeed/accelerator/devices.py` are fitted to every other record of each source and tested with the rest. They "
    "are the rounded results of `--fit`; none is at a limit. The test is not blind: the errors of both halves with "
    "earlier versions of the model were known. Where a source leaves the micro-batch, the chunks or the recomputation "
    "open, the fastest prediction that fits is used. Memory is the most that the allocator reserves; for korthikanti, "
    "which computes its figures, states and activations. The sources leave open: torchtitan's number of micro-batches "
    "(assumed: its default, as many as stages), and the dtype of the logits that its pipelines keep (assumed: fp32); "
    "the sequence length of deepspeed-muon (34.5 GiB are published; activations and logits grow with the length, and "
    "the record assumes 512 tokens), so that record does not count; whether bridge's 70B on GB200 sent activations to "
    "the host. Rank correlations: nemo's four runs are four models with one layout each, within 6 % of each other in "
    "FLOP/s. They are no sweep, and their order is within the error. Two programs have a factor of their own: "
    + ", ".join(f"{name} {factor}" for name, factor in FACTORS.items())
    + "."
)


def _rank_correlation(pairs: list[tuple[PredictedStep, PublishedRun]]) -> str:
    """Returns Spearman's rank correlation of predicted and measured model FLOP/s, and the number of runs, as text."""
    rates = [step.model_flops for step, _ in pairs]
    measured = [step.model_flops * step.seconds / (run.seconds or 1.0) for step, run in pairs]

    def ranks(values: list[float]) -> list[float]:  # equal values share the mean of their ranks
        return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

    if min(len(set(rates)), len(set(measured))) < _FEW_RUNS:
        return f"none of {len(pairs)}"
    return f"{statistics.correlation(ranks(rates), ranks(measured)):.2f} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them; they are not written")
    parser.add_argument("--leave-out", action="store_true", help="also fit without each source and predict it")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of records to use instead")
    options = parser.parse_args()
    runs, refused = read_records(options.records)
    if options.fit:
        print(json.dumps({name: float(f"{value:.3g}") for name, value in fit(split(runs)[0]).items()}, indent=2))
        return
    text = report(runs, refused)
    if options.leave_out:
        text += "\n" + "\n".join(left_out(runs)) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
