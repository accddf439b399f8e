"""Compares what ``deepspeed --autotuning tune`` finds with a search of the whole grid, on three models.

    python -m benchmarks.autotuning [--models quickstart thin experts] [--rounds 12] [--out FILE]

For each model, on two ranks:

1. *grid*: every stage with every micro-batch of the same global batch, one start of the script each, measured as the
   tuner measures a trial (updates 3 to 12).
2. *tuner*: the command, as a user runs it.
3. *referee*: one program that holds an engine of every candidate and lets them take turns, an update each, in a new
   order every round; after six rounds only the fastest eight run on. Whatever else the machine does hits all alike and
   only ever lengthens an update, so the first quartile of many shows which candidate is fastest even on a busy machine.
   What the tuner chose is judged by it, and so is what the grid chose by its own measurements.

Searches are compared by their processor time (all processes that they start), since wall time is also that of others.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.moe.layer import MoE

HERE = Path(__file__).parent
RANKS, FINALISTS, FIRST_ROUNDS = 2, 8, 6
MICRO, ACCUMULATION, TOTAL = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size"


# --- The models ------------------------------------------------------------------------------------------------------


def quickstart() -> nn.Module:
    """The quickstart's model: 3.3 million parameters, width 256."""
    path = HERE.parent / "examples" / "quickstart" / "train.py"
    spec = importlib.util.spec_from_file_location("quickstart", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model: nn.Module = module.GPT()
    return model


class ThinBlock(nn.Module):
    """A residual block of little work per operation."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class ExpertBlock(nn.Module):
    """A residual block of four experts, two per rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm, self.moe = nn.LayerNorm(width), MoE(width, expert, num_experts=4, ep_size=RANKS, k=1, min_capacity=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(self.norm(x))[0]


class Bytes(nn.Module):
    """Predicts the next byte from the one before with a stack of blocks."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(256, width), nn.ModuleList(blocks), nn.Linear(width, 256)

    def forward(self, seen: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        x = self.embedding(seen)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


MODELS = {
    "quickstart": quickstart,
    "thin": lambda: Bytes([ThinBlock(48) for _ in range(16)], 48),
    "experts": lambda: Bytes([ExpertBlock(128) for _ in range(2)], 128),
}
SAMPLES, LENGTH = 32, 16
"""Samples of an update over both ranks, and tokens of a sample."""


def base_config() -> dict[str, Any]:
    """Returns the configuration that leaves stage and micro-batch open."""
    return {
        TOTAL: SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": "all"},
    }


def grid() -> dict[str, dict[str, Any]]:
    """Returns all candidates: name -> configuration."""
    own = SAMPLES // RANKS
    return {
        f"z{stage}_gas{own // micro}_tmbspg{micro}": {
            **base_config(),
            MICRO: micro,
            ACCUMULATION: own // micro,
            "zero_optimization": {"stage": stage},
        }
        for stage in range(4)
        for micro in range(1, own + 1)
        if own % micro == 0
    }


# --- What the ranks run ----------------------------------------------------------------------------------------------


class Training:
    """One engine and its updates."""

    def __init__(self, model: str, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.engine, *_ = deepspeed.initialize(model=MODELS[model](), config=config)
        self.seconds: list[float] = []

    def update(self) -> None:
        """Runs one update on random bytes."""
        for _ in range(self.engine.gradient_accumulation_steps()):
            ids = torch.randint(0, 256, (self.engine.train_micro_batch_size_per_gpu(), LENGTH + 1))
            self.engine.backward(self.engine(ids[:, :-1], ids[:, 1:]))
            self.engine.step()

    def timed_update(self) -> None:
        """Times one update, from a barrier to the end of the slowest rank."""
        comm.barrier()
        start = time.perf_counter()
        self.update()
        comm.barrier()
        self.seconds.append(time.perf_counter() - start)


def train(model: str) -> None:
    """The user's script: trains by the configuration that it is given, or that the tuner puts in its place."""
    training = Training(model, base_config())
    for _ in range(20):
        training.update()


def referee(model: str, rounds: int, always: list[str], out: str) -> None:
    """Lets engines of all candidates take turns, then of the fastest and ``always``; writes the seconds of updates."""
    comm.init_distributed()
    trainings = {name: Training(model, config) for name, config in grid().items()}
    for training in trainings.values():
        for _ in range(2):
            training.update()
    order = random.Random(0)
    names = list(trainings)
    for number in range(rounds):
        if number == FIRST_ROUNDS:
            objects = [sorted(names, key=lambda name: quartile(trainings[name].seconds))[:FINALISTS]]
            comm.broadcast_object_list(objects, src=0)
            names = sorted({*objects[0], *always})
        for name in order.sample(names, len(names)):
            trainings[name].timed_update()
    if comm.get_rank() == 0:
        Path(out).write_text(json.dumps({name: t.seconds for name, t in trainings.items()}), encoding="utf-8")


def quartile(seconds: list[float]) -> float:
    """Returns the first quartile."""
    return statistics.quantiles(seconds, n=4)[0]


# --- What compares ---------------------------------------------------------------------------------------------------


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(folder: Path, options: list[str], arguments: list[str], **variables: str) -> tuple[float, float]:
    """Runs this file under the ``deepspeed`` launcher; returns wall and processor seconds of all processes."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent), **variables}
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", str(RANKS), *options]
    before, start = _processor_seconds(), time.perf_counter()
    done = subprocess.run(
        [*command, str(Path(__file__).resolve()), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return time.perf_counter() - start, _processor_seconds() - before


def search_grid(model: str, folder: Path) -> dict[str, Any]:
    """Starts the script with every candidate and measures it, as the tuner measures a trial."""
    found: dict[str, float] = {}
    wall = processor = 0.0
    for name, config in grid().items():
        path = folder / f"grid-{name}"
        path.mkdir()
        changes = {
            MICRO: config[MICRO],
            ACCUMULATION: config[ACCUMULATION],
            "zero_optimization": config["zero_optimization"],
        }
        experiment = {"name": name, "kind": "trial", "folder": str(path), "changes": changes}
        (path / "exp.json").write_text(json.dumps(experiment), encoding="utf-8")
        took, used = _run(folder, [], ["--script", model], DS_AUTOTUNING=str(path / "exp.json"))
        wall, processor = wall + took, processor + used
        found[name] = json.loads((path / "metrics.json").read_text(encoding="utf-8"))["latency"] / 1e3
    return {"wall": wall, "processor": processor, "seconds": found}


def search_with_tuner(model: str, folder: Path) -> dict[str, Any]:
    """Runs the command, and reads what it has predicted, measured and chosen."""
    wall, processor = _run(folder, ["--autotuning", "tune"], ["--script", model])
    results = folder / "autotuning_results"
    rows = [
        row
        for path in sorted((results / "profile_model_info").glob("planned-*.json"))
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]
    measured = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))["latency"] / 1e3
        for path in results.glob("*/metrics.json")
    }
    best = json.loads((results / "ds_config_optimal.json").read_text(encoding="utf-8"))
    stage = best["zero_optimization"]["stage"]
    return {
        "wall": wall,
        "processor": processor,
        "predicted": {row["name"]: row["seconds"] for row in rows},
        "measured": measured,
        "chosen": f"z{stage}_gas{best[ACCUMULATION]}_tmbspg{best[MICRO]}",
    }


def compare(model: str, rounds: int, before: dict[str, Any] | None) -> dict[str, Any]:
    """Runs both searches of a model and the referee, with the grid of ``before`` where there is one."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tuner = search_with_tuner(model, folder)
        whole = search_grid(model, folder) if before is None else before["grid"]
        always = [tuner["chosen"], grid_choice(whole)]
        arguments = ["--referee", model, "--rounds", str(rounds), "--always", *always]
        _run(folder, [], [*arguments, "--out", str(folder / "referee.json")])
        seconds = json.loads((folder / "referee.json").read_text(encoding="utf-8"))
    return {"tuner": tuner, "grid": whole, "referee": seconds, "load": os.getloadavg()[0]}


def grid_choice(whole: dict[str, Any]) -> str:
    """Returns the candidate that was fastest in the exhaustive search's own measurements."""
    return min(whole["seconds"], key=lambda name: whole["seconds"][name])


def report(found: dict[str, dict[str, Any]]) -> str:
    """Returns the page."""
    loads = ", ".join(f"{results['load']:.1f}" for results in found.values())
    lines = [
        "# What autotuning finds, beside the whole grid",
        "",
        "Made by `python -m benchmarks.autotuning`, whose docstring describes what is measured. *Slower by*: the",
        "referee's first quartile of the chosen candidate over that of the fastest. Goals: within 3 %, a fifth of the",
        f"grid's time, at most three trials. Torch {torch.__version__}, two ranks, {os.cpu_count()} cores",
        f"(load {loads} at the ends).",
        "",
        "| model | candidates | fastest | tuner chose | slower by | trials | processor s, tuner / grid "
        "| wall s, tuner / grid | grid chose by its own measurements | slower by |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model, results in found.items():
        low = {name: quartile(values) for name, values in results["referee"].items()}
        tuner, whole = results["tuner"], results["grid"]
        fastest = min(low, key=lambda name: low[name])
        chosen, grids = tuner["chosen"], grid_choice(whole)
        lines.append(
            f"| {model} | {len(low)} | {fastest} | {chosen} | {low[chosen] / low[fastest] - 1:.1%} "
            f"| {len(tuner['measured'])} | {tuner['processor']:.0f} / {whole['processor']:.0f} = "
            f"{tuner['processor'] / whole['processor']:.2f} | {tuner['wall']:.0f} / {whole['wall']:.0f} = "
            f"{tuner['wall'] / whole['wall']:.2f} | {grids} | {low[grids] / low[fastest] - 1:.1%} |"
        )
    for model, results in found.items():
        tuner, referee_seconds = results["tuner"], results["referee"]
        lines += [
            "",
            f"## {model}",
            "",
            "Milliseconds of an update. The tuner plans smaller micro-batches until they are predicted to be slower.",
            "",
            "| candidate | first quartile | median | updates | tuner predicted | tuner measured | grid measured |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in sorted(referee_seconds, key=lambda name: quartile(referee_seconds[name])):
            values = referee_seconds[name]
            low, middle = quartile(values) * 1e3, statistics.median(values) * 1e3
            cells = [tuner["predicted"].get(name), tuner["measured"].get(name), results["grid"]["seconds"][name]]
            shown = " | ".join("" if cell is None else f"{cell * 1e3:.1f}" for cell in cells)
            lines.append(f"| {name} | {low:.1f} | {middle:.1f} | {len(values)} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the comparison, or what its ranks run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument(
        "--rounds", type=int, default=40, help="measurements of each finalist before the last comparison"
    )
    parser.add_argument("--keep-grid", action="store_true", help="use the grid in the JSON file beside --out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"autotuning-{date.today()}.md")
    parser.add_argument("--script", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--referee", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--always", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    arguments = parser.parse_args()
    if arguments.script:
        return train(arguments.script)
    if arguments.referee:
        return referee(arguments.referee, arguments.rounds, arguments.always, arguments.out)
    facts = arguments.out.with_suffix(".json")
    found: dict[str, dict[str, Any]] = json.loads(facts.read_text(encoding="utf-8")) if facts.exists() else {}
    for model in arguments.models:
        found[model] = compare(model, arguments.rounds, found[model] if arguments.keep_grid else None)
        facts.write_text(json.dumps(found), encoding="utf-8")
        arguments.out.write_text(report(found), encoding="utf-8")
    print(report(found))
    return None


if __name__ == "__main__":
    main()
