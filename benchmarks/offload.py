"""Measures offload: the host's Adam, file throughput, step times with each tier.

    python benchmarks/offload.py adam [--numel N]         GB/s beside torch's fused kernel and a plain copy
    python benchmarks/offload.py files --path DIR          GB/s of the file store, beside fio where it is installed
    python benchmarks/offload.py steps [--path DIR]        seconds per step on 2 CPU ranks, by stage and tier
    python benchmarks/offload.py speculation               seconds of a step with and without super_offload, 1 rank
    python benchmarks/offload.py all --write-report        all of them

Every figure is the best of several repetitions, interleaved, because other work on the machine only ever adds time.
The command prints one JSON document.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

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
    """The update as the engine runs it, against torch's kernel on the whole tensor."""
    from deepspeed.offload.pinned import host_tensor
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    grad, copied = torch.rand(numel), torch.rand(numel)
    # Memory as the engine's tier for host states makes it; a second set in torch's own memory tells its share.
    master = host_tensor(numel, torch.float32, pin=False).copy_(grad)
    state = {key: host_tensor(numel, torch.float32, pin=False).zero_() for key in ("exp_avg", "exp_avg_sq")}
    state["step"] = torch.zeros(())
    out = host_tensor(numel, torch.bfloat16, pin=False)
    plain_master, plain_state, plain_out = torch.rand(numel), {}, torch.empty(numel, dtype=torch.bfloat16)
    ours = DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(64))], lr=1e-3)
    group = ours.param_groups[0]
    theirs_param = torch.nn.Parameter(torch.rand(numel))
    theirs_param.grad = grad
    theirs = torch.optim.AdamW([theirs_param], lr=1e-3, fused=True)

    def fused_then_cast() -> None:
        theirs.step()
        plain_out.copy_(theirs_param.detach())

    # The whole host step of a 16-bit run: a 16-bit gradient comes down and is clipped or unscaled by a factor.
    short_grad, wide_grad = grad.bfloat16(), torch.empty(numel)

    def all_in_passes() -> None:
        wide_grad.copy_(short_grad).mul_(0.5)
        theirs_param.grad = wide_grad
        fused_then_cast()

    seconds = best_of(
        {
            "ours_fp32": lambda: ours.flat_update(group, master, grad, state),
            "ours_fp32_in_torch_memory": lambda: ours.flat_update(group, plain_master, grad, plain_state),
            "torch_fused": theirs.step,
            "ours_with_bf16_copy": lambda: ours.flat_update(group, master, grad, state, out=out),
            "ours_with_bf16_copy_in_torch_memory": lambda: ours.flat_update(
                group, plain_master, grad, plain_state, out=plain_out
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
    moved |= {name: with_copy - 2 for name in seconds if "16_bit_step" in name}  # what one pass has to move
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
    """Sequential reads and writes through the store, and by fio with the same requests (``ds_io`` shows the same)."""
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


class Layer(torch.nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend_norm, self.norm = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.mix = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.rise, self.fall = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in self.qkv(self.attend_norm(x)).chunk(3, -1))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).flatten(2))
        return x + self.fall(torch.nn.functional.gelu(self.rise(self.norm(x))))


class GPT(torch.nn.Module):
    """About 30M parameters with the default sizes."""

    def __init__(self, width: int = 512, layers: int = 8, vocabulary: int = 8192) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(vocabulary, width)
        self.blocks = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x[:, :-1]).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def time_steps(every: dict[str, dict[str, Any]], steps: int, layers: int) -> dict[str, Any]:
    """Body of a rank: seconds per step of each configuration, the best of ``steps``, and the memory report."""
    import deepspeed
    from deepspeed.logging import logger

    logger.setLevel("WARNING")
    report = {}
    for name, zero in every.items():
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
        }
        model = GPT(layers=layers)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
        tokens = torch.randint(8192, (2, 128), generator=torch.Generator().manual_seed(engine.global_rank))
        shortest, shortest_update = float("inf"), float("inf")
        for _ in range(steps + 2):
            start = time.perf_counter()
            engine.backward(engine(tokens))
            before_update = time.perf_counter()
            engine.step()
            end = time.perf_counter()
            shortest, shortest_update = min(shortest, end - start), min(shortest_update, end - before_update)
        rows = [row for row in engine.memory_report() if row[1] or row[2]]
        report[name] = {
            "seconds_per_step": shortest,
            "seconds_of_the_update": shortest_update,
            "bytes": {kind: counted for kind, counted, _, _ in rows},
            "largest_deviation_from_formula": max(abs(c - f) / max(f, 1) for _, c, f, _ in rows),
        }
        engine.destroy()
        del engine, model
    return report


def steps(path: Path, count: int, ranks: int, layers: int) -> dict[str, Any]:
    """Each tier at stages 2 and 3, and the floor of the update from files."""
    from benchmarks.offload import time_steps as body  # the workers import it by this name
    from tests.harness import run_ranks

    nvme = {"device": "nvme", "nvme_path": str(path), "pipeline_read": True, "pipeline_write": True}
    params = {"device": "nvme", "nvme_path": str(path), "max_in_cpu": 0}
    every = {
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
    report = run_ranks(body, ranks, every, count, layers, timeout=1200)[0]
    raw = files(path, 1 << 28, 3)["gigabytes_per_second"]
    for name in ("stage 2, optimizer in files",):
        held = report[name]["bytes"]
        moved = (held["master weights (file)"] + held["optimizer state (file)"]) * ranks  # the ranks share the disk
        floor = moved / raw["read"] / 1e9 + moved / raw["write"] / 1e9
        report[name]["floor_of_the_update"] = floor
        report[name]["update_against_floor (goal 1.3)"] = report[name]["seconds_of_the_update"] / floor
    return {"ranks": ranks, "raw_gigabytes_per_second": raw, "configurations": report}


def time_speculation(count: int, layers: int) -> dict[str, Any]:
    """Body of a rank: seconds of forward and backward, and of the update, with and without ``super_offload``.

    The engines take turns. "clipped" clips every gradient, so every update that starts early is repeated.
    """
    import deepspeed
    from deepspeed.logging import logger

    logger.setLevel("WARNING")
    torch.set_num_threads(1)
    engines, times = {}, {}
    for name, clip, speculates in (
        ("after the norm", 0.0, False),
        ("before the norm", 0.0, True),
        ("after the norm, clipped", 1e-3, False),
        ("before the norm, clipped", 1e-3, True),
    ):
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "gradient_clipping": clip,
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 1 << 21,
                "offload_optimizer": {"device": "cpu", "super_offload": speculates},
            },
        }
        model = GPT(layers=layers)
        engines[name] = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)[0]
        times[name] = []
    tokens = torch.randint(8192, (2, 128), generator=torch.Generator().manual_seed(0))
    for number in range(count + 2):
        for name, engine in engines.items():
            start = time.perf_counter()
            engine.backward(engine(tokens))
            before_update = time.perf_counter()
            engine.step()
            if number >= 2:  # orders are known and states are there
                times[name].append((before_update - start, time.perf_counter() - before_update))
    report = {}
    for name, engine in engines.items():
        speculation = engine.optimizer.speculation
        both = [sum(pair) for pair in times[name]]
        report[name] = {
            "forward_and_backward": min(pair[0] for pair in times[name]),
            "update": min(pair[1] for pair in times[name]),
            "step": min(both),
            "median_step": sorted(both)[len(both) // 2],
            "bytes": {kind: counted for kind, counted, _, _ in engine.memory_report() if counted},
            **({"kept": speculation.kept, "thrown_away": speculation.discarded} if speculation else {}),
        }
        engine.destroy()
    return report


def speculation(count: int, layers: int) -> dict[str, Any]:
    """Updates on the host that begin while later gradients arrive, beside those that begin after the norm."""
    from benchmarks.offload import time_speculation as body  # the workers import it by this name
    from tests.harness import run_ranks

    return {"threads": 1, "seconds": run_ranks(body, 1, count, layers, timeout=1200)[0]}


def markdown(report: dict[str, Any]) -> str:
    """The report for people: nested figures as ``name: value`` lines under a heading per measurement."""
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
        "Every figure is the best of several interleaved repetitions. Host Adam: 28 bytes per element, 30 with a bf16",
        "copy. The floor of an update from files is bytes read / read bandwidth + bytes written / write bandwidth,",
        "both of this disk through the same store in the same run. Step times beside those of the published package",
        "are in the report of `benchmarks/zero.py --workload offload`.",
        "",
    ]
    return "\n".join(lines)


MEASUREMENTS = ("adam", "files", "steps", "speculation")


def main() -> None:
    """Command line."""
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
            report["adam"] = adam(arguments.numel, 20 * arguments.repetitions)  # short, so noise is a larger part
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
