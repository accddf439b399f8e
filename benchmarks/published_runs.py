"""Reads published training results from ``benchmarks/data/scale-public.json``, for comparison with predictions."""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed.accelerator.devices import DeviceEfficiency, device_of_product
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
_ONCE_PER_NODE = re.compile(r"DeepEP|HybridEP", re.IGNORECASE)
"""Dispatchers of experts that send a token once to each node."""
_FUSED_ATTENTION = (2022, 6)  # year and month since which published results may have it (arXiv 2205.14135)


@dataclass(frozen=True)
class PublishedRun:
    """One published result.

    Attributes:
        name: Name of the record.
        source: First word of the record's name, without its digits.
        machine: Source and device; runs of the same machine share a factor.
        setups: Setups that fit the record: several where the source leaves a number open.
        seconds: Measured seconds of a step; None: not published.
        memory: Highest bytes on a device; None: not published, or at a sequence length that is not published.
        is_counted: Whether ``memory`` is a sum of states and activations by the source, and not measured.
        unrecomputed: Bytes that the source computes without recomputation and ``cuts_norms``; None: it does not.
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
        """Returns the predicted bytes to compare ``memory`` with: states and activations, or all on the device."""
        return step.state_bytes + step.activation_bytes if self.is_counted else step.device_bytes


def read_runs(path: Path = RECORDS) -> list[PublishedRun]:
    """Returns the runs of a file whose step times can be predicted. :func:`read_records` also explains the others."""
    return read_records(path)[0]


def read_records(path: Path = RECORDS) -> tuple[list[PublishedRun], dict[str, str]]:
    """Returns the runs of a file, and by name of each record that cannot be predicted the reason, as a sentence."""
    runs, refused = [], {}
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        reason = _reason_against(record)
        if reason is None:
            runs.append(run_of(record))
        else:
            refused[record["id"]] = reason
    return runs, refused


def _reason_against(record: Mapping[str, Any]) -> str | None:
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
    """Returns the run of a record, with every setup that fits it."""
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
    """Returns the seconds of a step: as published, or computed from published tokens/s or FLOP/s per device."""
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
    """Returns the year and month in the text of a source; December for a year alone, January 2026 for neither."""
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
    assert device is not None  # _reason_against() leaves such records out
    rate = (hardware.get("inter_gbps_per_gpu") or 400) / 8 * 1e9
    each = hardware.get("gpus_per_node") or 8
    return Machine(device, max(hardware["gpus"] // each, 1), min(each, hardware["gpus"]), device.memory, network=rate)


def layouts_of(record: Mapping[str, Any], source: str) -> list[ParallelLayout]:
    """Returns the layouts that fit a record: several where it leaves micro-batch, chunks or recomputation open."""
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
        # In torchtitan of 2024 each rank has consecutive tokens.
        balances_ring=not (source == "titan" and is_of_2024),
        experts=parallel.get("ep") or 1,
        data=data,
        # A pipeline keeps gathered parameters, so stage 3 transfers as much as stage 1.
        stage=int(source in NEMO) if stage is None else min(stage, 1) if pipe > 1 else stage,
        # With scales by row, products were as slow as in bf16 (torchao of 2024).
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
        # Megatron sums gradients in fp32 as an option and with bf16; the 18 bytes of states of korthikanti include it.
        gradient_bytes=4 if source in ("titan", "korthikanti") else 2,
        is_megatron=bool(_MEGATRON.search(record["source"])),
        # Megatron of 2021 adds gradients in a separate operation.
        sums_in_products=bool(_MEGATRON.search(record["source"])) and source != "sc",
        recompute=_recomputation(recompute),
        sends_once_per_node=bool(_ONCE_PER_NODE.search(f"{notes} {(record.get('recipe') or {}).get('dispatcher')}")),
    )
    chunks = [parallel.get("vpp") or 1]
    if pipe > 1 and (source == "sc" or parallel.get("vpp") is None):
        layers = record["model"]["layers"] // pipe
        chunks = [n for n in (1, 2, 3, 4) if layers % n == 0 or source != "sc"]
    micro = [batch["micro_batch"]] if batch.get("micro_batch") else [1, 2, 4, 8, 16]
    if source == "titan" and pipe > 1:
        # By default torchtitan divides a rank's samples into as many micro-batches as stages.
        micro = [batch["global_batch_sequences"] // (data * pipe)]
    recomputes = ["none", "selective", "full"] if "not stated" in recompute else [base.recompute]
    found = []
    for count, samples, recomputation in itertools.product(chunks, micro, recomputes):
        steps, rest = divmod(batch["global_batch_sequences"], samples * data)
        if rest or not steps or (count > 1 and steps % pipe):
            continue
        schedule = "interleaved" if count > 1 else "1f1b"
        chosen = replace(base, chunks=count, schedule=schedule, recompute=recomputation)
        found.append(replace(chosen, micro_batch=samples, accumulation=steps))
    return found


def _recomputation(text: str) -> str:
    """Returns the recomputation of a layout from the text of a record."""
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
    steps = []
    for setup in run.setups:
        if reached is not None:
            device = replace(setup.machine.device, efficiency=reached[run.machine])
            setup = replace(setup, machine=replace(setup.machine, device=device))
        steps.append(predict_step(setup, is_quick=is_quick))
    fitting = [step for step in steps if step.fits] or steps
    return min(fitting, key=lambda step: step.seconds)


def split(runs: Iterable[PublishedRun]) -> tuple[list[PublishedRun], list[PublishedRun]]:
    """Divides the timed runs of each source alternately into two halves, for fitting and for testing."""
    timed: dict[str, list[PublishedRun]] = defaultdict(list)
    for run in runs:
        if run.seconds is not None:
            timed[run.source].append(run)
    halves = [[run for of_source in timed.values() for run in of_source[start::2]] for start in (0, 1)]
    return halves[0], halves[1]
