"""Whether few bits learn as well: the quickstart's GPT, one way and one seed at a time.

    convergence.py run --way int8 --seed 0            one curve; repeat for other ways and seeds, in any order
    convergence.py run --way all --seed 0 --steps 30  every way, to see that they run
    convergence.py show                               the table, the verdicts, and the picture of all curves so far

A curve is kept in ``--folder`` as soon as it is there, so the benchmark can be run in parts, one after another. Each
way is compared with its own reference (Adam, or LAMB for 1-bit LAMB) of the same seed, by the loss on text that no way
has trained on, in nats per byte. Goals: 0.01 for int8 and for 8-bit weights (qwZ), 0.02 for 1-bit Adam and int4, 0.03
for 0/1 Adam and 1-bit LAMB. 16-bit masters (``bf16 masters``), and moments too (``bf16 states``), are compared with
bf16 and fp32 masters; goal 0.01. Signs without error feedback are a control: a benchmark that lets them pass measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "contest"), str(HERE.parent / "examples" / "quickstart")]

GOALS = {
    "bf16 masters": 0.01,
    "bf16 states": 0.01,
    "int8": 0.01,
    "qwz": 0.01,
    "int4": 0.02,
    "onebit-adam": 0.02,
    "zero-one-adam": 0.03,
    "onebit-lamb": 0.03,
}
REFERENCES = {"onebit-lamb": "lamb", "bf16 masters": "bf16", "bf16 states": "bf16"}  # of all others it is Adam
CONTROLS = {"sign without feedback": 0.05}  # must be further away than that
WARM = 0.15  # of the steps, before anything is sent in one bit
RISE = 0.1  # of the steps, in which the learning rate rises, for all ways: before the former, as the publications ask


def settings(way: str, steps: int) -> dict[str, Any]:
    """The part of the configuration that makes the way."""
    warm = max(round(WARM * steps), 1)
    # A variance that is frozen must be a mean over many steps: the published decay of 0.999.
    adam: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}
    stage, section, zero, bf16 = 1, {}, {}, {}
    if way in ("int8", "int4"):
        section = {"gradients": way}
    elif way == "sign":
        section = {"gradients": "sign", "start_step": warm}
    elif way == "sign without feedback":
        section = {"gradients": "sign", "start_step": warm, "error_feedback": False}
    elif way == "qwz":
        stage, zero = 3, {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    elif way in ("bf16", "bf16 masters", "bf16 states"):
        narrow = {"bf16_master_weights_and_grads": way != "bf16", "bf16_optimizer_states": way == "bf16 states"}
        bf16 = {"enabled": True, **narrow}
    elif way == "lamb":
        adam, stage = {"type": "Lamb", "params": {"lr": 4e-3}}, 0
    elif way == "onebit-lamb":
        # Its trust ratios settle later than variances. The least factor is 1 instead of 0.5: the codec's errors count
        # as gradient in the variance that factors come from, and would halve all of them.
        late = max(round(0.25 * steps), 1)
        adam, stage = {"type": "OneBitLamb", "params": {"lr": 4e-3, "freeze_step": late, "factor_min": 1.0}}, 0
    elif way == "onebit-adam":
        adam["type"], stage = "OneBitAdam", 0
        adam["params"] |= {"freeze_step": warm, "bias_correction": True}
    elif way == "zero-one-adam":
        adam["type"], stage = "ZeroOneAdam", 0
        # The variance of every update until it is frozen; two steps to an exchange once the learning rate is low.
        adam["params"] |= {"var_freeze_step": warm, "var_update_scaler": warm, "bias_correction": True}
        adam["params"] |= {"local_step_scaler": max(3 * steps // 5, 1), "local_step_clipper": 2}
    elif way != "adam":
        raise SystemExit(f"no way {way!r}; there are {', '.join(WAYS)}")
    return {
        "optimizer": adam,
        "zero_optimization": {"stage": stage, **zero},
        "communication_compression": section,
        "bf16": bf16,
    }


# Those without which others have nothing to be compared with come first.
WAYS = (
    *("adam", "onebit-adam", "int8", "int4", "qwz", "lamb", "onebit-lamb", "zero-one-adam"),
    *("sign without feedback", "sign", "bf16", "bf16 masters", "bf16 states"),
)


def train(way: str, seed: int, steps: int, batch: int, width: int, depth: int) -> None:
    """One rank."""
    import torch
    from train import CONTEXT, GPT, Text

    import deepspeed
    import deepspeed.comm as dist

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = Text(Path(sysconfig.get_paths()["stdlib"]))
    held_out = len(text) * 9 // 10  # what lies behind is for validation
    model = GPT(width=width, depth=depth, heads=width // 32)
    schedule = {"total_num_steps": steps, "warmup_num_steps": max(round(RISE * steps), 1), "warmup_type": "linear"}
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupCosineLR", "params": {**schedule, "cos_min_ratio": 0.1}},
            **settings(way, steps),
        },
    )[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed(1000 * seed + rank)

    def rows(first: int, last: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        found = [text[int(i)] for i in torch.randint(first, last, (count,), generator=generator)]
        return torch.stack([seen for seen, _ in found]), torch.stack([wanted for _, wanted in found])

    @torch.no_grad()
    def validation() -> float:
        engine.eval()
        fixed = torch.Generator().manual_seed(7 + rank)
        total = sum(engine(*rows(held_out, len(text), batch, fixed)).item() for _ in range(16)) / 16
        engine.train()
        mean = torch.tensor([total])
        dist.all_reduce(mean)
        return mean.item() / ranks

    curve: list[tuple[int, float, float]] = []
    start_time, recent = time.perf_counter(), 0.0
    for step in range(1, steps + 1):
        loss = engine(*rows(0, held_out, batch, dice))
        engine.backward(loss)
        engine.step()
        recent = loss.item() if not recent else 0.95 * recent + 0.05 * loss.item()
        if step % max(steps // 30, 1) == 0 or step == steps:
            curve.append((step, recent, validation()))
    if rank == 0:
        minutes = (time.perf_counter() - start_time) / 60
        size = {"steps": steps, "batch": batch, "width": width, "depth": depth, "context": CONTEXT, "ranks": ranks}
        print(
            "RESULT " + json.dumps({"way": way, "seed": seed, **size, "curve": curve, "minutes": minutes}), flush=True
        )
    engine.destroy()


def run(options: argparse.Namespace) -> None:
    import links

    ways = WAYS if options.way == "all" else (options.way,)
    for way in ways:
        setup = {name: getattr(options, name) for name in ("seed", "steps", "batch", "width", "depth")} | {"way": way}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        started = []
        for rank in range(options.ranks):
            environment = links.environment(rank, options.ranks, port, shaped=False)
            words = [sys.executable, __file__, "rank", "--setup", json.dumps(setup)]
            paths = {**os.environ, **environment, "PYTHONPATH": str(HERE.parent)}
            pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            started.append(subprocess.Popen(words, env=paths, **pipe))
        outputs = [process.communicate()[0] for process in started]
        found = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
        if not found:
            print(f"{way}, seed {options.seed}: no result\n{outputs[0][-1500:]}")
            continue
        result = json.loads(found[0].removeprefix("RESULT "))
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / f"{way.replace(' ', '-')}-{options.seed}.json").write_text(json.dumps(result))
        last = result["curve"][-1][2]
        print(f"{way}, seed {options.seed}: {last:.4f} nats per byte, {result['minutes']:.1f} minutes", flush=True)


def show(options: argparse.Namespace) -> None:
    results = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    by = {(found["way"], found["seed"]): found for found in results}
    size = {name: results[0][name] for name in ("steps", "batch", "width", "depth", "ranks")} if results else {}
    print(", ".join(f"{name} {value}" for name, value in size.items()))
    print("way                     seeds   loss     worse than its reference, by seed      goal    verdict")
    for way in WAYS:
        runs = {seed: found for (name, seed), found in by.items() if name == way}
        if not runs:
            continue
        reference = REFERENCES.get(way, "adam")
        gaps = {
            seed: found["curve"][-1][2] - by[reference, seed]["curve"][-1][2]
            for seed, found in runs.items()
            if (reference, seed) in by and reference != way
        }
        mean = sum(found["curve"][-1][2] for found in runs.values()) / len(runs)
        listed, goal, verdict = ", ".join(f"{gap:+.4f}" for gap in gaps.values()), "", ""
        if gaps and way in GOALS:
            worst = sum(gaps.values()) / len(gaps)
            goal, verdict = f"{GOALS[way]:.2f}", "holds" if worst <= GOALS[way] else "FAILS"
        if gaps and way in CONTROLS:
            least = min(gaps.values())
            is_apart = not least <= CONTROLS[way]  # NaN is apart too
            goal, verdict = f"> {CONTROLS[way]:.2f}", "fails, as it must" if is_apart else "THE CONTROL PASSES"
        print(f"{way:24}{len(runs):5}  {mean:7.4f}  {listed:38} {goal:7} {verdict}")
    if results:
        picture(results, options.folder / "convergence.png")


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """The curves of the validation loss, and how far each is above its reference's, as means over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    losses: dict[str, dict[int, dict[int, float]]] = {}  # by way, seed and step
    for found in results:
        losses.setdefault(found["way"], {})[found["seed"]] = {step: loss for step, _, loss in found["curve"]}
    figure, (curves, gaps) = pyplot.subplots(1, 2, figsize=(12, 5))
    for number, way in enumerate(way for way in WAYS if way in losses):
        reference = losses.get(REFERENCES.get(way, "adam"), {})
        # Of runs of other lengths those that all have: a mean over others at each step would jump.
        steps = [step for step in next(iter(losses[way].values())) if all(step in one for one in losses[way].values())]
        mean = [sum(curve[step] for curve in losses[way].values()) / len(losses[way]) for step in steps]
        curves.plot(steps, mean, color=f"C{number}", linewidth=1, label=way)
        pairs = [(curve, reference[seed]) for seed, curve in losses[way].items() if seed in reference]
        if pairs and way not in ("adam", "lamb", "bf16"):
            shared = [step for step in steps if all(step in other for _, other in pairs)]
            apart = [sum(mine[step] - other[step] for mine, other in pairs) / len(pairs) for step in shared]
            gaps.plot(shared, apart, color=f"C{number}", linewidth=1)
    gaps.axhline(0.0, color="0.7", linewidth=0.5)
    gaps.set_ylim(-0.15, 0.2)
    curves.set_ylabel("validation loss, nats per byte")
    gaps.set_ylabel("above the reference")
    for axes in (curves, gaps):
        axes.set_xlabel("step")
    curves.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show", "rank"))
    parser.add_argument("--way", default="all", help="one of: all, " + ", ".join(WAYS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a rank and step")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=HERE / "results" / "convergence")
    parser.add_argument("--setup", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.command == "rank":
        train(**json.loads(options.setup))
    else:
        {"run": run, "show": show}[options.command](options)


if __name__ == "__main__":
    main()
