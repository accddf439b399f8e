"""Compares predicted step times and memory with published results, record by record.

``benchmarks/data/scale-public.json`` has the results with their sources. Every other record of each source is for
fitting the constants in ``deepspeed/accelerator/devices.py``; the other half shows how good the constants are.
Run: ``python -m benchmarks.scale [--out FILE] [--fit]``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator.devices import DEVICES, Device, DeviceEfficiency, device_of_product
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.machine import Machine
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.step import PredictedStep, StepSetup, predict_step

RECORDS = Path(__file__).with_name("data") / "scale-public.json"
NEMO = ("nemo", "bridge")
OF_DEEPSPEED = ("zero", "deepspeed")
_MEGATRON = re.compile(r"Megatron|NeMo|MLPerf|Narayanan|Korthikanti|MegaScale|Llama 3", re.IGNORECASE)
"""Sources whose programs have fused elementwise kernels."""
_FUSED_ATTENTION = (2022, 6)  # year and month: results published before have none (arXiv 2205.14135)
FACTORS = {"sc a100": 1.06, "mosaic h100": 1.25}
"""Measured over predicted time of operations, of the machines whose programs are older than the constants."""
HELD = {"contention": 0.32, "a100 bandwidth": 0.86}
"""Constants that the fit behind the table of devices left at a limit. The limits of ``--fit`` are wider."""


@dataclass(frozen=True)
class PublishedRun:
    """One published result.

    Attributes:
        name: Of the record.
        source: First word of the record's name, without its digits.
        machine: Source and device; runs of the same machine share a factor.
        setups: The setups that the record may mean: several where the source leaves a number open.
        seconds: Measured seconds of a step; None: not published.
        memory: Highest bytes on a device; None: not published, or at a sequence length that is not published.
        is_counted: True: the source counts ``memory`` as states and activations, it does not measure it.
        unrecomputed: Bytes that the source counts without recomputation and without ``cuts_norms``; None: it does not.
    """

    name: str
    source: str
    machine: str
    setups: tuple[StepSetup, ...]
    seconds: float | None
    memory: float | None
    is_counted: bool = False
    unrecomputed: float | None = None

    def memory_of(self, step: PredictedStep) -> float:
        """Returns the predicted bytes that ``memory`` is compared with: what the source counts, or what is reserved."""
        return step.state_bytes + step.activation_bytes if self.is_counted else step.device_bytes


def read_runs(path: Path = RECORDS) -> list[PublishedRun]:
    """Returns the runs of a file that can be predicted; :func:`read_records` explains why the others cannot."""
    return read_records(path)[0]


def read_records(path: Path = RECORDS) -> tuple[list[PublishedRun], dict[str, str]]:
    """Returns the runs of a file, and by name of each record that cannot be predicted, the reason in a sentence."""
    runs, refused = [], {}
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        why = _why_not(record)
        if why is None:
            runs.append(run_of(record))
        else:
            refused[record["id"]] = why
    return runs, refused


def _why_not(record: Mapping[str, Any]) -> str | None:
    """Returns why a record cannot be predicted; None: it can."""
    model, batch, hardware = record["model"], record["batch"], record["hardware"]
    missing = [name for name in ("layers", "hidden", "heads", "vocab", "seq") if model.get(name) is None]
    missing += [] if _width_of(model) else ["ffn_hidden"]
    missing += [] if batch.get("global_batch_sequences") is not None else ["global batch"]
    if missing:
        return f"The source does not state {', '.join(missing)}."
    if "fp4" in (record.get("precision") or "").lower():
        return "Products in 4 bits have no rate in the table of devices."
    if device_of_product(hardware["gpu"], _memory_of(hardware)) is None:
        return f"The table of devices has no {hardware['gpu']}."
    try:
        if not layouts_of(record, _source_of(record)):
            samples, gpus = batch["global_batch_sequences"], hardware["gpus"]
            return (
                f"{samples} samples on {gpus} devices are not a multiple of the micro-batch and the ranks that share "
                "it."
            )
        run_of(record)
    except DeepSpeedConfigError as error:
        return f"{str(error)[:1].upper()}{str(error)[1:]}."
    return None


def _memory_of(hardware: Mapping[str, Any]) -> float | None:
    nbytes = hardware.get("memory_gb")
    return nbytes and nbytes * 1e9


def _source_of(record: Mapping[str, Any]) -> str:
    return record["id"].split("-")[0].rstrip("0123456789.")


def run_of(record: Mapping[str, Any]) -> PublishedRun:
    """Returns the run that a record describes, with every setup that the record may mean."""
    source = _source_of(record)
    measured, hardware = record["measured"], record["hardware"]
    shape, layouts = shape_of(record), layouts_of(record, source)
    machine = machine_of(hardware)
    memory = measured.get("memory_gib") or measured.get("memory_gib_adamw")
    setups = tuple(StepSetup(shape, layout, machine, record["model"]["seq"]) for layout in layouts)
    if "sequence length not stated" in (record.get("verified") or ""):
        memory = None
    return PublishedRun(
        record["id"],
        source,
        f"{source} {machine.device.name}",
        setups,
        _seconds_of(record, setups[0]),
        memory and memory * 2**30,
        is_counted=source == "korthikanti",
        unrecomputed=_unrecomputed(measured),
    )


def _seconds_of(record: Mapping[str, Any], setup: StepSetup) -> float | None:
    """Returns the seconds of a step: as published, or from tokens or model FLOP/s per second and device."""
    measured = record["measured"]
    named = [value for name, value in measured.items() if name.startswith("step_s") and value]
    if named:
        return float(measured.get("step_s") or named[0])
    tokens = setup.layout.samples * setup.tokens / setup.layout.ranks
    if measured.get("tokens_per_s_per_gpu"):
        return float(tokens / measured["tokens_per_s_per_gpu"])
    share, peak = measured.get("mfu_pct"), record["hardware"].get("peak_bf16_tflops")
    rate, flops = measured.get("model_tflops_per_gpu"), setup.model_flops / setup.layout.ranks / 1e12
    if not rate and share:
        rate = share / 100 * (peak or setup.machine.device.flops / 1e12)
    if not rate and setup.layout.recompute in ("full", "none"):
        rate, flops = (
            measured.get("hardware_tflops_per_gpu"),
            flops * (4 / 3 if setup.layout.recompute == "full" else 1),
        )
    return float(flops / rate) if rate else None


def _unrecomputed(measured: Mapping[str, Any]) -> float | None:
    parts = [measured.get(f"memory_{name}_gib") for name in ("param_and_optimizer", "activations_no_recompute")]
    return None if None in parts else sum(parts) * 2**30


def _width_of(model: Mapping[str, Any]) -> int | None:
    names = ("moe_ffn_hidden", "ffn_hidden") if model.get("experts") else ("ffn_hidden",)
    return next((model[name] for name in names if model.get(name)), None)


def _published(source: str) -> tuple[int, int]:
    """Returns the year and the month of a source, as far as its words say them; otherwise a late one."""
    number = re.search(r"arXiv[: ]*(\d\d)(\d\d)\.", source)
    if number:
        return 2000 + int(number[1]), int(number[2])
    year = re.search(r"\b(20[12]\d)(?:-(\d\d))?", source)
    return (int(year[1]), int(year[2] or 12)) if year else (2026, 1)


def _has_fused_attention(record: Mapping[str, Any]) -> bool:
    is_named = "flash" in (record.get("notes") or "").lower()
    return is_named or _published(record["source"]) >= _FUSED_ATTENTION


def shape_of(record: Mapping[str, Any]) -> DecoderShape:
    """Returns the model of a record."""
    model = record["model"]
    is_fused = _has_fused_attention(record)
    experts = model.get("experts") or 0
    return DecoderShape(
        layers=model["layers"],
        hidden=model["hidden"],
        heads=model["heads"],
        vocab=model["vocab"],
        kv_heads=model.get("kv_heads"),
        intermediate=_width_of(model),
        head_size=model.get("head_dim"),
        is_gated=bool(model.get("gated_mlp", True)),
        experts=experts,
        experts_per_token=model.get("experts_per_token") or 2,
        has_fused_attention=is_fused,
        dropout=0.0 if is_fused else 0.1,
    )


def machine_of(hardware: Mapping[str, Any]) -> Machine:
    """Returns the machine of a record. Where the record states no network, 400 Gb/s per device are assumed."""
    device = device_of_product(hardware["gpu"], _memory_of(hardware))
    assert device is not None  # such records are left out
    rate = (hardware.get("inter_gbps_per_gpu") or 400) / 8 * 1e9
    each = hardware.get("gpus_per_node") or 8
    return Machine(device, max(hardware["gpus"] // each, 1), min(each, hardware["gpus"]), device.memory, network=rate)


def layouts_of(record: Mapping[str, Any], source: str) -> list[ParallelLayout]:
    """Returns the layouts that a record may mean: several where it leaves out micro-batch, chunks or recomputation."""
    batch, parallel = record["batch"], record["parallel"]
    gpus = record["hardware"]["gpus"]
    tensor, pipe, context = (parallel.get(name) or 1 for name in ("tp", "pp", "cp"))
    data = gpus // (tensor * pipe * context)
    stage = parallel.get("zero_stage")
    shards = parallel.get("fsdp_group") or data * context
    notes = record.get("notes") or ""
    is_compiled = bool(_MEGATRON.search(record["source"])) or "compile" in notes
    is_of_2024 = "2024" in record["source"]
    recompute = record.get("recompute") or "not stated"
    precision = (record.get("precision") or "").lower()
    is_old = not _has_fused_attention(record)
    base = ParallelLayout(
        tensor=tensor,
        pipe=pipe,
        context=context,
        # torchtitan of 2024 gives each rank consecutive tokens.
        balances_ring=not (source == "titan" and is_of_2024),
        experts=parallel.get("ep") or 1,
        data=data,
        # A pipeline keeps the parameters that it has gathered, so that stage 3 moves what stage 1 does.
        stage=int(source in NEMO) if stage is None else min(stage, 1) if pipe > 1 else stage,
        # Scales by row made products as slow as in bf16 (torchao of 2024).
        is_fp8="fp8" in precision and "rowwise" not in precision,
        shard_ranks=shards if shards < data * context else None,
        # torchtitan compiles the loss since 2025.
        has_fused_loss=source in ("mosaic", *NEMO) or (source == "titan" and is_compiled and not is_of_2024),
        is_compiled=is_compiled,
        is_fsdp=stage == 3 and source not in OF_DEEPSPEED,
        # torch.distributed.pipelining of 2024 always returns the outputs of the last stage.
        keeps_outputs=source == "titan" and is_of_2024,
        offload="optimizer" in (parallel.get("offload") or ""),
        cuts_norms=tensor > 1 and parallel.get("sequence_parallel") is not False,
        overlaps_tensor="async TP" in notes or "async" in record["id"] or source in NEMO,
        overlaps_data=not is_old,
        overlaps_gather=not is_old and source not in OF_DEEPSPEED,
        gradient_bytes=4 if source == "titan" or (is_old and is_compiled) else 2,
        recompute=_recomputation(recompute),
    )
    chunks = [parallel.get("vpp") or 1]
    if pipe > 1 and (source == "sc" or parallel.get("vpp") is None):
        layers = record["model"]["layers"] // pipe
        chunks = [n for n in (1, 2, 3, 4) if layers % n == 0 or source != "sc"]
    micro = [batch["micro_batch"]] if batch.get("micro_batch") else [1, 2, 4, 8, 16]
    if source == "titan" and pipe > 1:
        # Unless it is told otherwise, torchtitan divides a rank's samples into as many micro-batches as stages.
        micro = [batch["global_batch_sequences"] // (data * pipe)]
    recomputes = ["none", "selective", "full"] if "not stated" in recompute else [base.recompute]
    found = []
    for each, samples, how in itertools.product(chunks, micro, recomputes):
        steps, left = divmod(batch["global_batch_sequences"], samples * data)
        if left or not steps or (each > 1 and steps % pipe):
            continue
        made = replace(base, chunks=each, schedule="interleaved" if each > 1 else "1f1b", recompute=how)
        found.append(replace(made, micro_batch=samples, accumulation=steps))
    return found


def _recomputation(text: str) -> str:
    """Returns the recomputation of a layout from a record's words."""
    if text.startswith("full"):
        return "full"
    if "attention core" in text:
        return "attention"
    return "selective" if text.startswith("selective") else "none"


def predicted(
    run: PublishedRun, reached: Mapping[str, DeviceEfficiency] | None = None, *, is_quick: bool = True
) -> PredictedStep:
    """Predicts every setup of a run and returns the fastest step that fits; if no setup fits, the fastest step.

    Args:
        run: The run.
        reached: Constants to use instead of those of the table, by ``PublishedRun.machine``.
        is_quick: Use a formula for the idle time of a pipeline instead of simulating its schedule.
    """
    made = []
    for setup in run.setups:
        if reached is not None:
            device = replace(setup.machine.device, efficiency=reached[run.machine])
            setup = replace(setup, machine=replace(setup.machine, device=device))
        made.append(predict_step(setup, is_quick=is_quick))
    fitting = [step for step in made if step.fits] or made
    return min(fitting, key=lambda step: step.seconds)


def split(runs: Iterable[PublishedRun]) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """Returns the runs for fitting and the runs for testing: of each source, every other timed run."""
    timed: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.seconds is not None:
            timed[run.source].append(run)
    halves = [[run for of_source in timed.values() for run in of_source[start::2]] for start in (0, 1)]
    return halves[0], halves[1]


# -- fitting -----------------------------------------------------------------------------------------------------------

_FAMILIES = {"a100": "a100", "a100-40": "a100", "h100": "h100", "h200": "h100", "h100-500w": "h100-500w"}
_LIMITS = {
    "matmul": (0.3, 0.92),
    "fp8": (0.25, 0.9),
    "attention": (0.15, 0.8),
    "bandwidth": (0.5, 0.9),
    "half_size": (16, 300),
    "link": (0.4, 0.95),
    "network": (0.4, 0.95),
    "contention": (0.05, 0.5),
    "factor": (0.8, 1.6),
}
"""The lowest and the highest value of each constant that ``--fit`` tries."""
_SHARED = ("half_size", "link", "network", "contention")
_FEW_ROUNDS = 10
_MOVED = 0.1
_FEW_RUNS = 3  # from which a rank correlation means something


def limits_of(name: str) -> tuple[float, float]:
    """Returns the limits between which ``--fit`` looks for a constant of :func:`constants`."""
    return _LIMITS["factor" if name.startswith("factor") else name.split()[-1]]


def constants() -> dict[str, float]:
    """Returns the constants that ``--fit`` changes, as the table of devices has them; shared ones once."""
    found = {}
    for family in dict.fromkeys(_FAMILIES.values()):
        reached = DEVICES[family].efficiency
        names = ("matmul", "attention", "bandwidth") + (("fp8",) if DEVICES[family].fp8_flops else ())
        found |= {f"{family} {name}": getattr(reached, name) for name in names}
    found |= {name: getattr(DEVICES["a100"].efficiency, name) for name in _SHARED}
    return found | {f"factor {machine}": factor for machine, factor in FACTORS.items()}


def reached_of(values: Mapping[str, float], runs: Iterable[PublishedRun]) -> dict[str, DeviceEfficiency]:
    """Returns the efficiencies of devices with other constants, by ``PublishedRun.machine``.

    Args:
        values: The constants, as :func:`constants` names them.
        runs: The runs whose machines are wanted.
    """
    found = {}
    for run in runs:
        device: Device = run.setups[0].machine.device
        family = _FAMILIES.get(device.name)
        own = {key.split()[1]: value for key, value in values.items() if key.split()[0] == family}
        own |= {name: values[name] for name in _SHARED}
        own["factor"] = values.get(f"factor {run.machine}", 1.0)
        found[run.machine] = replace(device.efficiency, **own)
    return found


def fit(runs: list[PublishedRun]) -> dict[str, float]:
    """Returns constants with a smaller mean absolute error of the logarithm on ``runs``: a descent by coordinates.

    It starts at the table of devices and ends in a local minimum.
    """

    def loss(values: Mapping[str, float]) -> float:
        reached = reached_of(values, runs)
        errors = [abs(math.log(predicted(run, reached).seconds / (run.seconds or 1.0))) for run in runs]
        return statistics.fmean(min(error, 0.4) for error in errors)

    values, width = constants(), 0.1
    best = loss(values)
    for _ in range(_FEW_ROUNDS):
        for name in values:
            low, high = limits_of(name)
            for factor in (1 + width, 1 - width):
                other = {**values, name: values[name] * factor}
                if low <= other[name] <= high and (found := loss(other)) < best:
                    best, values = found, other
                    break
        width *= 0.7
    return values


def left_out(runs: list[PublishedRun]) -> list[str]:
    """Returns a table: of each source, the errors with constants that were fitted to all runs of the others.

    The machines of the source have no factor of their own then.
    """
    timed = [run for half in split(runs) for run in half]
    lines = ["Each source with constants fitted to the others alone, without a factor of its own:", ""]
    lines += [
        "| source | records | median error | worst | constants that moved by more than 10 % |",
        "|---|---|---|---|---|",
    ]
    table = constants()
    for source in dict.fromkeys(run.source for run in timed):
        own = [run for run in timed if run.source == source]
        values = fit([run for run in timed if run.source != source])
        values |= {name: 1.0 for name in values if name.startswith(f"factor {source} ")}
        reached = reached_of(values, own)
        errors = [abs(predicted(run, reached).seconds / (run.seconds or 1.0) - 1) for run in own]
        moved = [
            f"{name} {table[name]:.2f} to {value:.2f}"
            for name, value in values.items()
            if abs(value / table[name] - 1) > _MOVED and not name.startswith(f"factor {source} ")
        ]
        found = f"{statistics.median(errors):.1%} | {max(errors):.1%}"
        lines.append(f"| {source} | {len(own)} | {found} | {', '.join(moved) or 'none'} |")
    return lines


# -- the table ---------------------------------------------------------------------------------------------------------


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
        refused: By name of each other record, why it cannot.
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
        each = "; ".join(f"{name} {statistics.median(of):.1%}, {max(of):.1%}" for name, of in errors.items())
        lines.append(f"| {title} | {len(half)} | {statistics.median(everything):.1%} | {each} |")
    of_memory = [abs(run.memory_of(steps[run.name]) / run.memory - 1) for run in runs if run.memory is not None]
    too_large = [run.name for run in runs if not steps[run.name].fits]
    lines += ["", "Memory is published of no record."]
    if of_memory:
        lines[-1] = f"Memory of {len(of_memory)} records: median error {statistics.median(of_memory):.1%}, worst "
        lines[-1] += f"{max(of_memory):.1%}."
    lines[-1] += f" Refused although it ran: {', '.join(too_large) or 'none'}."
    floors = {run.name: least_seconds(steps[run.name]) / run.seconds for run in runs if run.seconds}
    if floors:
        above = [name for name, share in floors.items() if share > 1]
        lines += ["", "The operations of a step at the maker's peak take at most "]
        lines[-1] += f"{max(floors.values()):.0%} of the measured time. More than it: {', '.join(above) or 'none'}."
    lines += ["", *_without_recomputation(runs)]
    pairs = [(steps[run.name], run) for run in runs if run.seconds]
    lines += ["", f"Rank correlation of predicted and measured model FLOP/s: {_rank_correlation(pairs)}; "]
    sources = dict.fromkeys(run.source for _, run in pairs)
    by_source = {name: [pair for pair in pairs if pair[1].source == name] for name in sources}
    lines[-1] += ", ".join(f"{name} {_rank_correlation(own)}" for name, own in by_source.items()) + "."
    lines[-1] += " Of sweeps, that is one model on one machine in three or more ways: "
    lines[-1] += (", ".join(f"{name} {_rank_correlation(own)}" for name, own in sweeps(pairs)) or "none") + "."
    lines.append("")
    lines += ["Constants: " + ", ".join(f"{name} {value:.3g}" for name, value in constants().items()) + ".", ""]
    lines.append(
        "| record | half | measured s | predicted s | error | measured GiB | predicted GiB | error | fits | layout |"
    )
    lines.append("|---|---|---|---|---|---|---|---|---|---|")
    lines += [_row(run, steps[run.name], names.get(run.name, "memory only")) for run in runs]
    if refused:
        lines += ["", "Not predicted:", "", *(f"- {name}: {why}" for name, why in refused.items())]
    return "\n".join(lines) + "\n"


def least_seconds(step: PredictedStep) -> float:
    """Returns the seconds that the operations of a step take at the maker's peak: no step is faster."""
    device = step.setup.machine.device
    return step.flops / max(device.flops, device.fp8_flops if step.setup.layout.is_fp8 else 0.0)


def without_recomputation(run: PublishedRun) -> PredictedStep:
    """Predicts a run without recomputation and without ``cuts_norms``, which ``run.unrecomputed`` is about."""
    setup = run.setups[0]
    return predict_step(replace(setup, layout=replace(setup.layout, recompute="none", cuts_norms=False)), is_quick=True)


def _without_recomputation(runs: list[PublishedRun]) -> list[str]:
    if all(run.unrecomputed is None for run in runs):
        return []
    lines = [
        "Published as too large for their devices: the same models with nothing recomputed and norms not cut. The "
        "source counts states and activations.",
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
    """Returns the runs of one model on as many devices of one kind, where a source has three or more of them."""
    found: dict[tuple[Any, ...], list[tuple[PredictedStep, PublishedRun]]] = defaultdict(list)
    for step, run in pairs:
        setup = run.setups[0]
        found[run.machine, setup.shape, setup.machine.ranks].append((step, run))
    return [
        (f"{machine} {shape.parameters / 1e9:.0f}B on {ranks}", own)
        for (machine, shape, ranks), own in found.items()
        if len(own) > 2
    ]


_HOW = (
    "Made by `python -m benchmarks.scale --out FILE` from `benchmarks/data/scale-public.json`. Every other record of "
    "each source is for fitting the constants of `deepspeed/accelerator/devices.py`; the rest test them. The "
    "constants are rounded and near a fit; `docs/design/prediction.md` has what `--fit` gives. The test is not blind: "
    "what operations cost, how records are read, and the limits of two constants ("
    + ", ".join(f"{name} {value}" for name, value in HELD.items())
    + ") were chosen with the errors of both halves in sight. Where a source leaves out the micro-batch, the chunks or "
    "what is recomputed, the fastest prediction that fits is taken. Memory is what the allocator reserves at most, "
    "and of korthikanti, whose figures are counted, states and activations. What the sources leave open: "
    "torchtitan's micro-batches beside stages (its default, as many as stages, is assumed), and the dtype of the "
    "logits that its pipelines keep (fp32 is assumed); the sequence length of deepspeed-muon (34.5 GiB are "
    "published; activations and logits grow with the length, and the record assumes 512 tokens), so that record is "
    "not counted; whether bridge's 70B on GB200 sent activations to the host. Rank correlations: nemo's four runs "
    "are four models, one way each, within 6 % of each other in FLOP/s. That is no sweep, and their order is within "
    "the error. Two machines "
    "have a factor of their own: " + ", ".join(f"{name} {factor}" for name, factor in FACTORS.items()) + "."
)


def _rank_correlation(pairs: list[tuple[PredictedStep, PublishedRun]]) -> str:
    """Returns Spearman's rank correlation of model FLOP/s, predicted and measured, and the number of runs."""
    made = [step.model_flops for step, _ in pairs]
    seen = [step.model_flops * step.seconds / (run.seconds or 1.0) for step, run in pairs]

    def ranks(values: list[float]) -> list[float]:  # equal values share the mean of their ranks
        return [sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]

    if min(len(set(made)), len(set(seen))) < _FEW_RUNS:
        return f"none of {len(pairs)}"
    return f"{statistics.correlation(ranks(made), ranks(seen)):.2f} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the table")
    parser.add_argument("--fit", action="store_true", help="fit the constants and print them; they are not written")
    parser.add_argument("--leave-out", action="store_true", help="also fit without each source and predict it")
    parser.add_argument("--records", type=Path, default=RECORDS, help="file of records to use instead")
    options = parser.parse_args()
    runs, refused = read_records(options.records)
    if options.fit:
        print(json.dumps({name: round(value, 3) for name, value in fit(split(runs)[0]).items()}, indent=2))
        return
    text = report(runs, refused)
    if options.leave_out:
        text += "\n" + "\n".join(left_out(runs)) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
