"""Compares the choice of ``deepspeed --autotuning tune`` with a search of the whole grid, on three models.

    python -m benchmarks.autotuning [--models quickstart thin experts] [--rounds 40] [--out FILE]

For each model, on two ranks:

1. *grid*: the script is started once for every stage with every micro-batch of the same global batch, and measured as
   the tuner measures a trial (updates 3 to 12).
2. *tuner*: the command, as a user runs it.
3. *referee*: one program with an engine of every candidate. They take turns, an update each, in a new order every
   round; after six rounds only the fastest eight and the choices of tuner and grid continue. Other load of the machine
   affects all alike and only adds time, so candidates are compared by the first quartile of their updates.

Searches are compared by the processor time of all processes that they start; wall time includes waits for other
programs.
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
    """Returns the quickstart's model: 3.3 million parameters, width 256."""
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


class ByteModel(nn.Module):
    """Predicts the next byte from the one before with a stack of blocks."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(256, width), nn.ModuleList(blocks), nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(inputs)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


MODELS = {
    "quickstart": quickstart,
    "thin": lambda: ByteModel([ThinBlock(48) for _ in range(16)], 48),
    "experts": lambda: ByteModel([ExpertBlock(128) for _ in range(2)], 128),
}
SAMPLES, LENGTH = 32, 16
"""Samples of an update over both ranks, and tokens of a sample."""


def base_config() -> dict[str, Any]:
    """Returns the configuration, with stage and micro-batch left to the tuner."""
    return {
        TOTAL: SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": "all"},
    }


def grid() -> dict[str, dict[str, Any]]:
    """Returns all candidates: name -> configuration."""
    per_rank = SAMPLES // RANKS
    return {
        f"z{stage}_gas{per_rank // micro}_tmbspg{micro}": {
            **base_config(),
            MICRO: micro,
            ACCUMULATION: per_rank // micro,
            "zero_optimization": {"stage": stage},
        }
        for stage in range(4)
        for micro in range(1, per_rank + 1)
        if per_rank % micro == 0
    }


# --- The programs of the ranks ---------------------------------------------------------------------------------------


class Training:
    """An engine with the seconds of its timed updates."""

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
    """Trains as the user's script does; the tuner replaces the configuration."""
    training = Training(model, base_config())
    for _ in range(20):
        training.update()


def referee(model: str, rounds: int, always: list[str], out: str) -> None:
    """Lets engines of all candidates take turns, then of the fastest and of ``always``; rank 0 writes their seconds."""
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
    return statistics.quantiles(seconds, n=4, method="inclusive")[0]


# --- The comparison --------------------------------------------------------------------------------------------------


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
    """Starts the script once per candidate, as the tuner starts a trial; returns its costs and the measured seconds."""
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
    """Runs the command; returns its costs, and the predictions, measurements and choice from its files."""
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
    """Runs both searches of a model and the referee; takes the grid from ``before`` if that is not None."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tuner = search_with_tuner(model, folder)
        found = search_grid(model, folder) if before is None else before["grid"]
        always = [tuner["chosen"], grid_choice(found)]
        arguments = ["--referee", model, "--rounds", str(rounds), "--always", *always]
        _run(folder, [], [*arguments, "--out", str(folder / "referee.json")])
        seconds = json.loads((folder / "referee.json").read_text(encoding="utf-8"))
    return {"tuner": tuner, "grid": found, "referee": seconds, "load": os.getloadavg()[0]}


def grid_choice(searched: dict[str, Any]) -> str:
    """Returns the candidate with the lowest measured time per step in the grid search."""
    return min(searched["seconds"], key=lambda name: searched["seconds"][name])


def report(found: dict[str, dict[str, Any]]) -> str:
    """Returns the report in Markdown."""
    loads = ", ".join(f"{results['load']:.1f}" for results in found.values())
    lines = [
        "# The choice of autotuning beside the whole grid",
        "",
        "Made by `python -m benchmarks.autotuning`, whose docstring describes the measurements. *Slower by*: the",
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
        tuner, searched = results["tuner"], results["grid"]
        fastest = min(low, key=lambda name: low[name])
        chosen, grids = tuner["chosen"], grid_choice(searched)
        lines.append(
            f"| {model} | {len(low)} | {fastest} | {chosen} | {low[chosen] / low[fastest] - 1:.1%} "
            f"| {len(tuner['measured'])} | {tuner['processor']:.0f} / {searched['processor']:.0f} = "
            f"{tuner['processor'] / searched['processor']:.2f} | {tuner['wall']:.0f} / {searched['wall']:.0f} = "
            f"{tuner['wall'] / searched['wall']:.2f} | {grids} | {low[grids] / low[fastest] - 1:.1%} |"
        )
    for model, results in found.items():
        tuner, referee_seconds = results["tuner"], results["referee"]
        lines += [
            "",
            f"## {model}",
            "",
            "Milliseconds of an update. The tuner plans smaller micro-batches until it predicts a slower one.",
            "",
            "| candidate | first quartile | median | updates | tuner predicted | tuner measured | grid measured |",
            "|---|---|---|---|---|---|---|",
        ]
        for name in sorted(referee_seconds, key=lambda name: quartile(referee_seconds[name])):
            values = referee_seconds[name]
            first, middle = quartile(values) * 1e3, statistics.median(values) * 1e3
            cells = [tuner["predicted"].get(name), tuner["measured"].get(name), results["grid"]["seconds"][name]]
            shown = " | ".join("" if cell is None else f"{cell * 1e3:.1f}" for cell in cells)
            lines.append(f"| {name} | {first:.1f} | {middle:.1f} | {len(values)} | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the comparison; with ``--script`` or ``--referee``: the program of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=40, help="rounds of the referee, the first six included")
    parser.add_argument("--keep-grid", action="store_true", help="use the grid in the JSON file beside --out")
    parser.add_argument("--out", type=Path, default=HERE / "results" / f"autotuning-{date.today()}.md")
    parser.add_argument("--script", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--referee", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--always", nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--local_rank", type=int, default=0, help="set by the launcher")
    arguments = parser.parse_args()
    if arguments.script:
        train(arguments.script)
        return
    if arguments.referee:
        referee(arguments.referee, arguments.rounds, arguments.always, arguments.out)
        return
    facts = arguments.out.with_suffix(".json")
    found: dict[str, dict[str, Any]] = json.loads(facts.read_text(encoding="utf-8")) if facts.exists() else {}
    for model in arguments.models:
        found[model] = compare(model, arguments.rounds, found[model] if arguments.keep_grid else None)
        facts.write_text(json.dumps(found), encoding="utf-8")
        arguments.out.write_text(report(found), encoding="utf-8")
    print(report(found))


if __name__ == "__main__":
    main()
