"""Compares the loss of trainings with compressed communication or narrow states with that of their references.

    convergence.py run --method int8 --seed 0            one curve; repeat for other methods and seeds, in any order
    convergence.py run --method all --seed 0 --steps 30  every method, to see that they run
    convergence.py show                                  the table, the verdicts, and the picture of all curves so far

The model is the GPT of the quickstart. Each run writes its curve to ``--folder``, so the benchmark can be run in parts.
A method is compared with its reference of the same seed (:data:`REFERENCES`; of the others it is Adam) by the loss on
text that no method has trained on, in nats per byte; :data:`GOALS` has the largest difference. ``bf16 masters`` are
16-bit masters, ``bf16 states`` 16-bit masters and moments; their reference has fp32 masters. Signs without error
feedback are a control: they must fail, or the benchmark measures nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from contest.curves import Panel, draw_panels
from contest.links import print_result, run_ranks

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "examples" / "quickstart"))

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
CONTROLS = {"sign without feedback": 0.05}  # their difference must be larger
WARM = 0.15  # share of the steps before anything is sent in one bit
RISE = 0.1  # share of the steps in which the learning rate rises; less than WARM, as the papers require


def settings(method: str, steps: int) -> dict[str, Any]:
    """Returns the sections of the configuration that differ between methods."""
    warm = max(round(WARM * steps), 1)
    # A variance that freezes must be a mean over many steps: the papers' decay of 0.999.
    adam: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.999]}}
    stage, section, zero, bf16 = 1, {}, {}, {}
    if method in ("int8", "int4"):
        section = {"gradients": method}
    elif method == "sign":
        section = {"gradients": "sign", "start_step": warm}
    elif method == "sign without feedback":
        section = {"gradients": "sign", "start_step": warm, "error_feedback": False}
    elif method == "qwz":
        stage, zero = 3, {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    elif method in ("bf16", "bf16 masters", "bf16 states"):
        narrow = {"bf16_master_weights_and_grads": method != "bf16", "bf16_optimizer_states": method == "bf16 states"}
        bf16 = {"enabled": True, **narrow}
    elif method == "lamb":
        adam, stage = {"type": "Lamb", "params": {"lr": 4e-3}}, 0
    elif method == "onebit-lamb":
        # Trust ratios converge later than variances. factor_min is 1 instead of 0.5: the codec's errors add to the
        # variance from which the factors are computed, and would halve all of them.
        late = max(round(0.25 * steps), 1)
        adam, stage = {"type": "OneBitLamb", "params": {"lr": 4e-3, "freeze_step": late, "factor_min": 1.0}}, 0
    elif method == "onebit-adam":
        adam["type"], stage = "OneBitAdam", 0
        adam["params"] |= {"freeze_step": warm, "bias_correction": True}
    elif method == "zero-one-adam":
        adam["type"], stage = "ZeroOneAdam", 0
        # Every update changes the variance until it freezes. Late, at a low learning rate, two steps share an exchange.
        adam["params"] |= {"var_freeze_step": warm, "var_update_scaler": warm, "bias_correction": True}
        adam["params"] |= {"local_step_scaler": max(3 * steps // 5, 1), "local_step_clipper": 2}
    return {
        "optimizer": adam,
        "zero_optimization": {"stage": stage, **zero},
        "communication_compression": section,
        "bf16": bf16,
    }


# In the order of the runs: a reference comes before the methods that are compared with it.
METHODS = (
    *("adam", "onebit-adam", "int8", "int4", "qwz", "lamb", "onebit-lamb", "zero-one-adam"),
    *("sign without feedback", "sign", "bf16", "bf16 masters", "bf16 states"),
)


def train(method: str, seed: int, steps: int, batch: int, width: int, depth: int) -> None:
    """Trains as one rank; rank 0 prints the result."""
    import torch
    from train import CONTEXT, GPT, Text

    import deepspeed
    import deepspeed.comm as dist

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    text = Text(Path(sysconfig.get_paths()["stdlib"]))
    held_out = len(text) * 9 // 10  # the samples from here on are for validation
    model = GPT(width=width, depth=depth, heads=width // 32)
    schedule = {"total_num_steps": steps, "warmup_num_steps": max(round(RISE * steps), 1), "warmup_type": "linear"}
    engine = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 1.0,
            "scheduler": {"type": "WarmupCosineLR", "params": {**schedule, "cos_min_ratio": 0.1}},
            **settings(method, steps),
        },
    )[0]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dice = torch.Generator().manual_seed(1000 * seed + rank)

    def rows(first: int, last: int, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        found = [text[int(i)] for i in torch.randint(first, last, (count,), generator=generator)]
        return torch.stack([inputs for inputs, _ in found]), torch.stack([targets for _, targets in found])

    @torch.no_grad()
    def validation() -> float:
        engine.eval()
        fixed = torch.Generator().manual_seed(7 + rank)
        mean = torch.tensor([sum(engine(*rows(held_out, len(text), batch, fixed)).item() for _ in range(16)) / 16])
        engine.train()
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
        print_result({"method": method, "seed": seed, **size, "curve": curve, "minutes": minutes})
    engine.destroy()


def run(options: argparse.Namespace) -> int:
    """Trains and writes the curves; returns the number of methods that failed."""
    failures = 0
    for method in METHODS if options.method == "all" else (options.method,):
        setup = {name: getattr(options, name) for name in ("seed", "steps", "batch", "width", "depth")}
        try:
            result = run_ranks([__file__, "rank", "--setup", json.dumps({**setup, "method": method})], options.ranks)[0]
        except RuntimeError as error:
            print(f"{method}, seed {options.seed}: {error}", file=sys.stderr)
            failures += 1
            continue
        options.folder.mkdir(parents=True, exist_ok=True)
        (options.folder / f"{method.replace(' ', '-')}-{options.seed}.json").write_text(json.dumps(result))
        last = result["curve"][-1][2]
        print(f"{method}, seed {options.seed}: {last:.4f} nats per byte, {result['minutes']:.1f} minutes", flush=True)
    return failures


def show(options: argparse.Namespace) -> None:
    """Prints the table and draws the picture of all curves in the folder."""
    results = [json.loads(path.read_text()) for path in sorted(options.folder.glob("*.json"))]
    by = {(found["method"], found["seed"]): found for found in results}
    size = {name: results[0][name] for name in ("steps", "batch", "width", "depth", "ranks")} if results else {}
    print(", ".join(f"{name} {value}" for name, value in size.items()))
    print("method                  seeds   loss     worse than its reference, by seed      goal    verdict")
    for method in METHODS:
        runs = {seed: found for (name, seed), found in by.items() if name == method}
        if not runs:
            continue
        reference = REFERENCES.get(method, "adam")
        gaps = {
            seed: found["curve"][-1][2] - by[reference, seed]["curve"][-1][2]
            for seed, found in runs.items()
            if (reference, seed) in by and reference != method
        }
        mean = sum(found["curve"][-1][2] for found in runs.values()) / len(runs)
        listed, goal, verdict = ", ".join(f"{gap:+.4f}" for gap in gaps.values()), "", ""
        if gaps and method in GOALS:
            mean_gap = sum(gaps.values()) / len(gaps)
            goal, verdict = f"{GOALS[method]:.2f}", "holds" if mean_gap <= GOALS[method] else "FAILS"
        if gaps and method in CONTROLS:
            least = min(gaps.values())
            has_failed = not least <= CONTROLS[method]  # NaN has failed too
            goal, verdict = f"> {CONTROLS[method]:.2f}", "fails, as it must" if has_failed else "THE CONTROL PASSES"
        print(f"{method:24}{len(runs):5}  {mean:7.4f}  {listed:38} {goal:7} {verdict}")
    if results:
        picture(results, options.folder / "convergence.png")


def picture(results: list[dict[str, Any]], path: Path) -> None:
    """Draws the validation loss, and how far it is above that of the reference, as means over the seeds."""
    losses: dict[str, dict[int, dict[int, float]]] = {}  # by method, seed and step
    for found in results:
        losses.setdefault(found["method"], {})[found["seed"]] = {step: loss for step, _, loss in found["curve"]}
    curves, gaps = {}, {}
    for method in (method for method in METHODS if method in losses):
        reference = losses.get(REFERENCES.get(method, "adam"), {})
        # Only the steps that all seeds have: a mean over other seeds at each step would jump.
        steps = [
            step for step in next(iter(losses[method].values())) if all(step in one for one in losses[method].values())
        ]
        mean = [sum(curve[step] for curve in losses[method].values()) / len(losses[method]) for step in steps]
        curves[method] = steps, mean
        pairs = [(curve, reference[seed]) for seed, curve in losses[method].items() if seed in reference]
        if pairs and method not in ("adam", "lamb", "bf16"):
            shared = [step for step in steps if all(step in other for _, other in pairs)]
            gaps[method] = shared, [sum(mine[s] - other[s] for mine, other in pairs) / len(pairs) for s in shared]
    above = Panel("step", "above the reference", gaps, y_limits=(-0.15, 0.2))
    draw_panels(path, [Panel("step", "validation loss, nats per byte", curves), above])
    print(f"curves: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("run", "show", "rank"), help="rank: used by run")
    parser.add_argument("--method", default="all", choices=("all", *METHODS))
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
    elif options.command == "run":
        sys.exit(1 if run(options) else 0)
    else:
        show(options)


if __name__ == "__main__":
    main()
