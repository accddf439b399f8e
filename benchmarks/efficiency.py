"""Compares curriculum, random-LTD and layer dropping with a plain training of equal compute.

    python benchmarks/efficiency.py train [--steps N] [--write-report]     five runs on the quickstart's text
    python benchmarks/efficiency.py theta [--write-report]                 time of a step over the keep ratio

`train`: every run has a budget of floating-point operations, that of `--steps` plain steps, and takes as many steps as
the budget allows; the learning rate falls along a cosine over these steps. The loss is measured on text that no run
trains on, with whole sequences, all layers and all tokens. One process, one thread, fp32, ZeRO stage 0. Times are
processor time of training alone. A second plain run with another seed shows the variation by chance.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from contest.curves import Panel, draw_panels

import deepspeed
from deepspeed.data.curriculum import CurriculumScheduler, shortened
from deepspeed.dropping import ProgressiveLayerDrop, RandomLTDScheduler, convert_to_random_ltd
from deepspeed.dropping.layers import LayerDrop, droppable_blocks

_HERE = Path(__file__).resolve().parent
WIDTH, DEPTH, HEADS, CONTEXT, BATCH = 128, 8, 4, 256, 8
RUNS = ("plain", "plain, other seed", "curriculum", "random-LTD", "layer dropping")
POINTS = 20  # measurements of a run
HELD_OUT = 24  # sequences

spec = importlib.util.spec_from_file_location("quickstart", _HERE.parent / "examples" / "quickstart" / "train.py")
assert spec is not None and spec.loader is not None
quickstart = importlib.util.module_from_spec(spec)
spec.loader.exec_module(quickstart)
quickstart.CONTEXT = CONTEXT  # type: ignore[attr-defined]


# -- what a step costs ------------------------------------------------------------------------------------------------


def operations(length: int, layers: list[int]) -> float:
    """Returns the FLOPs of a step, forward and backward.

    Args:
        length: Tokens of a sequence.
        layers: Tokens that each layer computes.
    """
    of_layers = sum(tokens * (24 * WIDTH**2 + 4 * tokens * WIDTH) for tokens in layers)
    return 3.0 * BATCH * (of_layers + 2 * length * WIDTH * 256)


class Kind:
    """A kind of training: its sections of the configuration, and the size of each step.

    Args:
        name: One of :data:`RUNS`.
        steps: Length of its schedule; a curriculum and random-LTD compute everything before it ends.
    """

    def __init__(self, name: str, steps: int) -> None:
        self.name = name
        self.sections: dict[str, Any] = {}
        if name == "curriculum":
            self.sections["curriculum_learning"] = {
                "enabled": True,
                "min_difficulty": 32,
                "max_difficulty": CONTEXT,
                "schedule_type": "fixed_linear",
                "schedule_config": {"total_curriculum_step": max(round(0.6 * steps), 1), "difficulty_step": 8},
            }
        if name == "random-LTD":
            ltd = {
                "enabled": True,
                "total_layer_num": DEPTH,
                "random_ltd_layer_num": DEPTH - 2,
                "random_ltd_layer_id": list(range(1, DEPTH - 1)),
                "random_ltd_schedule": {
                    "min_value": CONTEXT // 2,
                    "max_value": CONTEXT,
                    "schedule_type": "fixed_linear",
                    "schedule_config": {"require_steps": max(round(0.7 * steps), 1), "seq_per_step": 8},
                },
            }
            self.sections["data_efficiency"] = {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}}
        if name == "layer dropping":
            self.sections["progressive_layer_drop"] = {"enabled": True, "theta": 0.5, "gamma": 100 / steps}

    def shapes(self) -> Iterator[tuple[int, list[int]]]:
        """Yields for each step the length of its sequences, and the tokens that each layer computes."""
        step = 0
        whole = [CONTEXT] * DEPTH
        curriculum = CurriculumScheduler(self.sections["curriculum_learning"]) if self.name == "curriculum" else None
        tokens = None
        if self.name == "random-LTD":
            ltd = self.sections["data_efficiency"]["data_routing"]["random_ltd"]
            tokens = RandomLTDScheduler({**ltd, "global_batch_size": BATCH})
        ratio, draws = None, LayerDrop(DEPTH)
        if self.name == "layer dropping":
            section = self.sections["progressive_layer_drop"]
            ratio = ProgressiveLayerDrop(section["theta"], section["gamma"])
        while True:
            length, layers = CONTEXT, whole
            if curriculum is not None:
                length = curriculum.get_difficulty(step + 1)
                layers = [length] * DEPTH
            if tokens is not None:
                layers = [CONTEXT, *[tokens.get_value(step)] * (DEPTH - 2), CONTEXT]
            if ratio is not None:
                ratio.update_state(max(step - 1, 0))
                dropped = draws.draw(ratio.get_theta(), step, 0, 0)  # as the engine draws
                layers = [0 if layer in dropped else CONTEXT for layer in range(DEPTH)]
            yield length, layers
            step += 1

    def steps_for(self, budget: float) -> int:
        """Returns the number of steps within a budget of FLOPs, at least 1."""
        spent, steps = 0.0, 0
        for length, layers in self.shapes():
            spent += operations(length, layers)
            if spent > budget:
                return max(steps, 1)
            steps += 1
        raise AssertionError


def kind_for(name: str, budget: float) -> tuple[Kind, int]:
    """Returns the kind whose schedule spans the steps within the budget, and their number."""
    steps = Kind("plain", 1).steps_for(budget)
    for _ in range(20):  # iterates to a fixed point: with more steps the schedule is longer and each is cheaper
        kind = Kind(name, steps)
        found = kind.steps_for(budget)
        if found == steps:
            break
        steps = found
    return kind, steps


# -- the runs ---------------------------------------------------------------------------------------------------------


def batches(text: Any, seed: int, train_samples: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    dice = torch.Generator().manual_seed(seed)
    while True:
        chosen = [text[int(number)] for number in torch.randint(train_samples, (BATCH,), generator=dice)]
        yield torch.stack([seen for seen, _ in chosen]), torch.stack([wanted for _, wanted in chosen])


def engine_for(kind: Kind, steps: int) -> Any:
    model = quickstart.GPT(WIDTH, DEPTH, HEADS)
    if kind.name == "layer dropping":
        deepspeed.progressive_layer_drop(model, "blocks")
    if kind.name == "random-LTD":
        convert_to_random_ltd(model, quickstart.Block)
    schedule = {"total_num_steps": max(steps, 2), "warmup_num_steps": max(steps // 20, 2), "warmup_type": "linear"}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupCosineLR", "params": {**schedule, "cos_min_ratio": 0.1}},
        "gradient_clipping": 1.0,
        "log_level": "error",
        **kind.sections,
    }
    return deepspeed.initialize(model=model, config=config)[0]


@torch.no_grad()
def held_out_loss(engine: Any, samples: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    engine.eval()
    seen, wanted = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
    loss = sum(engine(seen[i : i + 8], wanted[i : i + 8]).item() for i in range(0, len(seen), 8)) / (len(seen) / 8)
    engine.train()
    return loss


def run(name: str, budget: float, text: Any) -> dict[str, Any]:
    """Trains one kind within its budget; returns its curve of (tokens, seconds, share of the budget, loss)."""
    seed = 1 if "other seed" in name else 0
    torch.manual_seed(seed)
    kind, steps = kind_for("plain" if "plain" in name else name, budget)
    engine = engine_for(kind, steps)
    samples = len(text)
    train_samples = samples * 95 // 100
    stride = max((samples - train_samples) // HELD_OUT, 1)
    held_out = [text[number] for number in range(train_samples, samples, stride)][:HELD_OUT]
    curve, tokens, seconds, spent = [], 0, 0.0, 0.0
    data, shapes = batches(text, seed, train_samples), kind.shapes()
    for step in range(steps):
        if step * POINTS // steps > (step - 1) * POINTS // steps:
            curve.append([tokens, seconds, spent / budget, held_out_loss(engine, held_out)])
        start = time.process_time()
        length, layers = next(shapes)
        seen, wanted = shortened(next(data), length)
        engine.backward(engine(seen, wanted))
        engine.step()
        seconds += time.process_time() - start
        if kind.name == "layer dropping":
            dropped = droppable_blocks(engine.module)[0][0].dropped
            assert layers == [0 if layer in dropped else CONTEXT for layer in range(DEPTH)], "the budget assumes it"
        tokens += BATCH * length
        spent += operations(length, layers)
    curve.append([tokens, seconds, spent / budget, held_out_loss(engine, held_out)])
    engine.destroy()
    print(f"{name}: {steps} steps, {tokens:,} tokens, {seconds:.0f} s, loss {curve[-1][3]:.4f}")
    return {"name": name, "steps": steps, "curve": curve}


# -- the report -------------------------------------------------------------------------------------------------------


def at(curve: list[list[float]], axis: int, where: float) -> float | None:
    """Returns the interpolated loss of a curve at a value of an axis; None beyond its end."""
    for before, after in zip(curve, curve[1:], strict=False):
        if before[axis] <= where <= after[axis]:
            share = (where - before[axis]) / max(after[axis] - before[axis], 1e-9)
            return before[3] + share * (after[3] - before[3])
    return None


def table(results: list[dict[str, Any]]) -> list[str]:
    plain = results[0]["curve"]
    lines = [
        "| run | steps | tokens | processor time, s | loss, equal compute | against plain | loss at half the compute |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        curve = result["curve"]
        tokens, seconds, _, loss = curve[-1]
        half = at(curve, 2, 0.5)
        lines.append(
            f"| {result['name']} | {result['steps']} | {tokens:,.0f} | {seconds:.0f} | {loss:.4f} | "
            f"{loss - plain[-1][3]:+.4f} | {half if half is not None else math.nan:.4f} |"
        )
    return lines


def verdict(results: list[dict[str, Any]]) -> str:
    """Returns a sentence about each kind: whether its loss differs from the plain run's by more than chance does."""
    final = {result["name"]: result["curve"][-1][3] for result in results}
    chance = abs(final["plain, other seed"] - final["plain"])
    words = []
    for name in RUNS[2:]:
        gain = final["plain"] - final[name]
        summary = "pays" if gain > chance else "costs" if -gain > chance else "makes no difference beyond chance"
        words.append(f"{name} {summary} ({-gain:+.4f})")
    return (
        f"Two plain runs differ by {chance:.4f}. At equal compute: {'; '.join(words)}. Each kind ran with one seed and "
        "the plain run's learning rate, and a kind whose steps are cheaper takes more of them."
    )


def picture(path: Path, results: list[dict[str, Any]]) -> None:
    """Draws the loss over tokens and over processor time."""
    losses = [point[3] for result in results for point in result["curve"][2:] or result["curve"]]  # the first are high
    panels = []
    for axis, label in ((0, "tokens"), (1, "processor seconds")):
        curves = {
            result["name"]: ([point[axis] for point in result["curve"]], [point[3] for point in result["curve"]])
            for result in results
        }
        panels.append(Panel(label, "held-out loss, nats per byte", curves, y_limits=(min(losses), max(losses))))
    draw_panels(path, panels)


def train(arguments: argparse.Namespace) -> None:
    text = quickstart.Text(arguments.text)
    budget = arguments.steps * operations(CONTEXT, [CONTEXT] * DEPTH)
    results = [run(name, budget, text) for name in RUNS]
    lines, summary = table(results), verdict(results)
    print("\n".join(["", *lines, "", summary]))
    if arguments.write_report:
        date = datetime.date.today().isoformat()
        folder = _HERE / "results"
        report = [
            f"# Training on less, {date}",
            "",
            f"Byte-level GPT of the quickstart (width {WIDTH}, {DEPTH} layers, context {CONTEXT}), batch {BATCH}, "
            f"torch {torch.__version__}, one thread, fp32. Every run has the arithmetic of {arguments.steps} plain "
            "steps. Loss in nats per byte on held-out text, of the whole model.",
            "",
            f"![curves](efficiency-{date}.svg)",
            "",
            *lines,
            "",
            summary,
            "",
        ]
        (folder / f"efficiency-{date}.md").write_text("\n".join(report))
        picture(folder / f"efficiency-{date}.svg", results)
        (folder / f"efficiency-{date}.json").write_text(json.dumps(results, indent=1) + "\n")


def theta(arguments: argparse.Namespace) -> None:
    """Measures the processor time of a step at fixed keep ratios; the ratios take turns."""
    ratios = (1.0, 0.75, 0.5, 0.25)
    kind = Kind("layer dropping", 100)
    engine = engine_for(kind, 100)
    drop = droppable_blocks(engine.module)[0][0]
    data = batches(quickstart.Text(arguments.text), 0, 1000)
    spent, layers = dict.fromkeys(ratios, 0.0), dict.fromkeys(ratios, 0)
    for turn in range(arguments.turns + 1):
        for ratio in ratios:
            engine.progressive_layer_drop.gamma, engine.progressive_layer_drop.theta = 1e9, ratio
            engine.global_steps = max(engine.global_steps, 2)  # the first two steps drop nothing
            seen, wanted = next(data)
            start = time.process_time()
            engine.backward(engine(seen, wanted))
            engine.step()
            if turn:  # the first one warms up
                spent[ratio] += time.process_time() - start
                layers[ratio] += DEPTH - len(drop.dropped)
    lines = ["| theta | layers kept, mean | time of a step against theta 1 |", "| --- | --- | --- |"]
    lines += [
        f"| {ratio:g} | {layers[ratio] / arguments.turns:.2f} of {DEPTH} | {spent[ratio] / spent[1.0]:.2f} |"
        for ratio in ratios
    ]
    print("\n".join(lines))
    if arguments.write_report:
        date = datetime.date.today().isoformat()
        path = _HERE / "results" / f"efficiency-theta-{date}.md"
        head = f"# Time of a step against the keep ratio, {date}\n\n{arguments.turns} steps each, in turns.\n\n"
        path.write_text(head + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "theta"])
    parser.add_argument("--steps", type=int, default=300, help="every run gets the operations of this many plain steps")
    parser.add_argument("--turns", type=int, default=30, help="steps of each keep ratio")
    parser.add_argument("--text", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder to learn from")
    parser.add_argument("--write-report", action="store_true", help="write benchmarks/results/efficiency-DATE.*")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    {"train": train, "theta": theta}[arguments.what](arguments)


if __name__ == "__main__":
    main()
