"""Measures offload: the host's Adam, file throughput, step times with each tier.

    python benchmarks/offload.py adam [--numel N]          GB/s beside torch's fused kernel and a copy
    python benchmarks/offload.py files --path DIR          GB/s of the file store, beside fio where it is installed
    python benchmarks/offload.py steps [--path DIR]        seconds per step on 2 CPU ranks, by stage and tier
    python benchmarks/offload.py speculation               seconds of a step with and without super_offload, 1 rank
    python benchmarks/offload.py all --write-report        all of them

Every time is the shortest of several repetitions, because other load of the machine only adds to it. The repetitions of
what is compared alternate, except between the configurations of ``steps``. The command prints one JSON document.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.contest.workloads import gpt  # noqa: E402 - by this name workers of the test harness import it too

_FP32_BYTES = 28  # read master, gradient, two moments; write master and two moments
_BF16_EXTRA = 2  # the 16-bit copy


def best_of(contestants: dict[str, Callable[[], None]], repetitions: int) -> dict[str, float]:
    """Runs the functions in turn for several rounds; returns the shortest time of each in seconds."""
    shortest = dict.fromkeys(contestants, float("inf"))
    for each in contestants.values():
        each()
    for _ in range(repetitions):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            shortest[name] = min(shortest[name], time.perf_counter() - start)
    return shortest


def adam(numel: int, repetitions: int) -> dict[str, Any]:
    """Times the update as the engine runs it beside torch's fused kernel on the whole tensor."""
    from deepspeed.offload.pinned import host_tensor
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    grad, copied = torch.rand(numel), torch.rand(numel)
    # The engine allocates host states so; a second set in torch's own memory shows the share of the allocation.
    master = host_tensor(numel, torch.float32, pin=False).copy_(grad)
    state = {key: host_tensor(numel, torch.float32, pin=False).zero_() for key in ("exp_avg", "exp_avg_sq")}
    state["step"] = torch.zeros(())
    out = host_tensor(numel, torch.bfloat16, pin=False)
    torch_master, torch_state, torch_out = torch.rand(numel), {}, torch.empty(numel, dtype=torch.bfloat16)
    ours = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(64))], lr=1e-3)
    group = ours.param_groups[0]
    theirs_param = torch.nn.Parameter(torch.rand(numel))
    theirs_param.grad = grad
    theirs = torch.optim.AdamW([theirs_param], lr=1e-3, fused=True)

    def fused_then_cast() -> None:
        theirs.step()
        torch_out.copy_(theirs_param.detach())

    # The host's step of a 16-bit training: a 16-bit gradient arrives and is scaled by a factor.
    short_grad, wide_grad = grad.bfloat16(), torch.empty(numel)

    def all_in_passes() -> None:
        wide_grad.copy_(short_grad).mul_(0.5)
        theirs_param.grad = wide_grad
        fused_then_cast()

    seconds = best_of(
        {
            "ours_fp32": lambda: ours.flat_update(group, master, grad, state),
            "ours_fp32_in_torch_memory": lambda: ours.flat_update(group, torch_master, grad, torch_state),
            "torch_fused": theirs.step,
            "ours_with_bf16_copy": lambda: ours.flat_update(group, master, grad, state, out=out),
            "ours_with_bf16_copy_in_torch_memory": lambda: ours.flat_update(
                group, torch_master, grad, torch_state, out=torch_out
            ),
            "torch_fused_then_cast": fused_then_cast,
            "ours_16_bit_step": lambda: ours.flat_update(group, master, short_grad, state, grad_scale=0.5, out=out),
            "torch_16_bit_step_in_passes": all_in_passes,
            "copy": lambda: copied.copy_(grad),
        },
        repetitions,
    )
    with_copy = _FP32_BYTES + _BF16_EXTRA
    moved = {"copy": 8} | {name: with_copy for name in seconds if "bf16" in name or "cast" in name}
    moved |= {name: with_copy - 2 for name in seconds if "16_bit_step" in name}  # the least that one pass moves
    return {
        "numel": numel,
        "threads": torch.get_num_threads(),
        "gigabytes_per_second": {k: moved.get(k, _FP32_BYTES) * numel / s / 1e9 for k, s in seconds.items()},
        "fp32_against_torch_fused (goal 0.95)": seconds["torch_fused"] / seconds["ours_fp32"],
        "the_same_in_torch_memory": seconds["torch_fused"] / seconds["ours_fp32_in_torch_memory"],
        "bf16_against_fused_then_cast (goal 1.2)": seconds["torch_fused_then_cast"] / seconds["ours_with_bf16_copy"],
        "16_bit_gradient_scaled_and_bf16_copy_against_passes": seconds["torch_16_bit_step_in_passes"]
        / seconds["ours_16_bit_step"],
        "bf16_in_torch_memory": seconds["torch_fused_then_cast"] / seconds["ours_with_bf16_copy_in_torch_memory"],
    }


def files(path: Path, nbytes: int, repetitions: int) -> dict[str, Any]:
    """Measures sequential reads and writes of the file store, and of fio with the same requests, as ``ds_io`` does."""
    from deepspeed.offload.file_io import IoSettings
    from deepspeed.offload.speed import measure_files

    speed = measure_files(path, nbytes, IoSettings(), loops=repetitions)
    report: dict[str, Any] = {
        "bytes": speed.nbytes,
        "direct": speed.is_direct,
        "gigabytes_per_second": {name: value / 1e9 for name, value in speed.ours.items()},
    }
    if speed.fio:
        report["fio_gigabytes_per_second"] = {name: value / 1e9 for name, value in speed.fio.items()}
        report["against_fio (goal 0.9)"] = {name: speed.against_fio(name) for name in speed.ours}
    else:
        report["fio"] = "not installed; install it for the comparison"
    return report


def make_engine(layers: int, zero: dict[str, Any], clip: float = 1.0) -> Any:
    """Returns an engine of bf16 AdamW on the GPT of ``zero.py``, with the section ``zero_optimization`` as given."""
    import deepspeed
    from deepspeed.logging import logger

    logger.setLevel("WARNING")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": clip,
        "zero_optimization": zero,
    }
    return deepspeed.initialize(model=gpt(layers, 1).build(), config=config)[0]


def time_step(engine: Any, step: int) -> tuple[float, float]:
    """Returns the seconds of a step, and those of its update."""
    inputs, targets = gpt(1, 1).draw(engine.global_rank, step)
    start = time.perf_counter()
    engine.backward(engine(inputs, targets))
    before_update = time.perf_counter()
    engine.step()
    end = time.perf_counter()
    return end - start, end - before_update


def time_steps(sections: dict[str, dict[str, Any]], steps: int, layers: int) -> dict[str, Any]:
    """Returns, as a rank, the shortest step and the memory report of each ``zero_optimization`` section."""
    report = {}
    for name, zero in sections.items():
        engine = make_engine(layers, zero)
        times = [time_step(engine, step) for step in range(steps + 2)]
        rows = [row for row in engine.memory_report() if row[1] or row[2]]
        report[name] = {
            "seconds_per_step": min(whole for whole, _ in times),
            "seconds_of_the_update": min(update for _, update in times),
            "bytes": {kind: counted for kind, counted, _, _ in rows},
            "largest_deviation_from_formula": max(abs(c - f) / max(f, 1) for _, c, f, _ in rows),
        }
        engine.destroy()
    return report


def steps(path: Path, count: int, ranks: int, layers: int) -> dict[str, Any]:
    """Times each tier at stages 2 and 3, and computes the floor of the update from files."""
    from benchmarks.offload import time_steps as body  # the workers import it by this name
    from tests.harness import run_ranks

    nvme = {"device": "nvme", "nvme_path": str(path), "pipeline_read": True, "pipeline_write": True}
    params = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0}
    sections = {
        "stage 2": {"stage": 2},
        "stage 2, optimizer on host": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "stage 3": {"stage": 3},
        "stage 3, optimizer on host": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
        "stage 3, all on host": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        },
        "stage 2, optimizer in files": {"stage": 2, "offload_optimizer": nvme},
        "stage 3, all in files": {"stage": 3, "offload_optimizer": nvme, "offload_param": params},
    }
    report = run_ranks(body, ranks, sections, count, layers, timeout=1200)[0]
    raw = files(path, 1 << 28, 3)["gigabytes_per_second"]
    row = report["stage 2, optimizer in files"]
    moved = row["bytes"]["master weights (file)"] + row["bytes"]["optimizer state (file)"]
    row["floor_of_the_update"] = floor = ranks * moved * (1 / raw["read"] + 1 / raw["write"]) / 1e9  # of one disk
    row["update_against_floor (goal 1.3)"] = row["seconds_of_the_update"] / floor
    return {"ranks": ranks, "raw_gigabytes_per_second": raw, "configurations": report}


def time_speculation(count: int, layers: int) -> dict[str, Any]:
    """Returns, as a rank, the seconds of a step and of its update, with and without ``super_offload``.

    The engines take turns. In "clipped" every gradient is clipped, so every update that started early is repeated.
    """
    torch.set_num_threads(1)
    engines, times = {}, {}
    for name, clip, speculates in (
        ("after the norm", 0.0, False),
        ("before the norm", 0.0, True),
        ("after the norm, clipped", 1e-3, False),
        ("before the norm, clipped", 1e-3, True),
    ):
        offload = {"device": "cpu", "super_offload": speculates}
        zero = {"stage": 2, "reduce_bucket_size": 1 << 21, "offload_optimizer": offload}
        engines[name] = make_engine(layers, zero, clip)
        times[name] = []
    for number in range(count + 2):
        for name, engine in engines.items():
            taken = time_step(engine, number)
            if number >= 2:  # before, the order of the gradients is recorded and states are allocated
                times[name].append(taken)
    report = {}
    for name, engine in engines.items():
        speculation = engine.inspect().updater.speculation
        report[name] = {
            "forward_and_backward": min(step - update for step, update in times[name]),
            "update": min(update for _, update in times[name]),
            "step": min(step for step, _ in times[name]),
            "median_step": statistics.median(step for step, _ in times[name]),
            "bytes": {kind: counted for kind, counted, _, _ in engine.memory_report() if counted},
            **({"kept": speculation.kept, "thrown_away": speculation.discarded} if speculation else {}),
        }
        engine.destroy()
    return report


def speculation(count: int, layers: int) -> dict[str, Any]:
    """Times updates on the host that start while later gradients arrive beside those that start after the norm."""
    from benchmarks.offload import time_speculation as body  # the workers import it by this name
    from tests.harness import run_ranks

    return {"threads": 1, "seconds": run_ranks(body, 1, count, layers, timeout=1200)[0]}


def markdown(report: dict[str, Any]) -> str:
    """Returns the report in Markdown: a heading per measurement, and nested figures as ``name: value`` lines."""
    lines = [
        f"# Offload benchmark, {report['date']}",
        "",
        f"Machine: {report['machine']}. torch {report['torch']}.",
        "",
    ]

    def put(value: Any, name: str, depth: int) -> None:
        if isinstance(value, dict):
            lines.append(f"{'  ' * depth}- {name}")
            for key, inner in value.items():
                put(inner, key, depth + 1)
        else:
            shown = f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
            lines.append(f"{'  ' * depth}- {name}: {shown}")

    for title in MEASUREMENTS:
        if title in report:
            lines += [f"## {title}", ""]
            for key, value in report[title].items():
                put(value, key.replace("_", " "), 0)
            lines.append("")
    lines += [
        "Every time is the shortest of several repetitions. Host Adam: 28 bytes per element, 30 with a bf16",
        "copy. The floor of an update from files is bytes read / read bandwidth + bytes written / write bandwidth,",
        "both of this disk through the same store in the same run. Step times beside those of the published package",
        "are in the report of `benchmarks/zero.py --workload offload`.",
        "",
    ]
    return "\n".join(lines)


MEASUREMENTS = ("adam", "files", "steps", "speculation")


def main() -> None:
    """Measures, prints the JSON, and writes the report if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=(*MEASUREMENTS, "all"))
    parser.add_argument("--path", type=Path, default=None, help="folder on the disk to measure")
    parser.add_argument("--numel", type=int, default=1 << 25)
    parser.add_argument("--nbytes", type=int, default=1 << 29)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--write-report", action="store_true", help="also write benchmarks/results/offload-DATE")
    arguments = parser.parse_args()
    chosen = MEASUREMENTS if arguments.what == "all" else (arguments.what,)
    before = os.getloadavg()[0]
    report: dict[str, Any] = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=arguments.path or os.getcwd()) as folder:
        if "adam" in chosen:
            report["adam"] = adam(arguments.numel, 20 * arguments.repetitions)  # more, because they are short
        if "files" in chosen:
            report["files"] = files(Path(folder), arguments.nbytes, arguments.repetitions)
        if "steps" in chosen:
            report["steps"] = steps(Path(folder), arguments.repetitions, arguments.ranks, arguments.layers)
        if "speculation" in chosen:
            report["speculation"] = speculation(4 * arguments.repetitions, arguments.layers)
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    report["machine"] = f"{os.cpu_count()} logical cores, {load}"
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if arguments.write_report:
        stem = Path(__file__).resolve().parent / "results" / f"offload-{report['date']}"
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        stem.with_suffix(".md").write_text(markdown(report))


if __name__ == "__main__":
    main()
