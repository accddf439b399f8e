"""Runs cells in the worker processes: the engine on all ranks, the reference on one, then the comparison."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine, initialize
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.lion import FusedLion
from tests.engine.matrix.cells import Cell
from tests.oracle.models import Batch, build, losses_of, make_batch, param_groups
from tests.oracle.optimizers import REFERENCES, muon_groups
from tests.oracle.trainer import ReferenceTrainer, Scale
from tests.zero.reading import full_masters, full_params

STEPS = 4
OVERFLOW_STEP = 1

DTYPES = {
    "bf16": torch.bfloat16,
    "bf16 sent as fp32": torch.bfloat16,
    "fp16": torch.float16,
    "fp16 static": torch.float16,
}

# Relative, in the L2 norm over the whole model: weights, and the way they have gone since the start. The second is the
# sharper one: a step that is wrong by one part in a thousand moves the weights by much less. Under 16 bit the last bit
# of a master decides now and then how a weight is rounded, and a rounded weight moves the next gradient.
TOLERANCE = {
    "fp32": (1e-6, 2e-5),
    "autocast": (1e-6, 1e-3),
    "bf16": (2e-5, 2e-3),
    "bf16 sent as fp32": (2e-5, 2e-3),
    "fp16": (2e-5, 2e-3),
    "fp16 static": (2e-5, 2e-3),
}


class Homemade(torch.optim.Optimizer):
    """A class the package cannot know: elementwise, but nobody said so."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (1 + param.grad.abs()), alpha=group["lr"])


CLIENTS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    **{name: REFERENCES[name] for name in ("AdamW", "Adam", "SGD", "Adagrad", "RMSprop")},
    "Lion": lambda groups: FusedLion(groups, lr=0.01, betas=(0.9, 0.99)),
    "Adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.01),
    "LBFGS": lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]]),
    "unknown": lambda groups: Homemade(groups, lr=0.01),
}

CONFIGURED: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-6}},
    "Adam": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-6}},
    "Adam, L2": {"type": "Adam", "params": {"lr": 0.01, "eps": 1e-6, "adam_w_mode": False}},
    "SGD": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.9}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.01, "initial_accumulator_value": 0.1}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 0.01, "eps": 1e-6, "momentum": 0.5}},
    "Lion": {"type": "Lion", "params": {"lr": 0.01, "betas": [0.9, 0.99]}},
    "Lamb": {"type": "Lamb", "params": {"lr": 0.01, "eps": 1e-6}},
    "Muon": {"type": "Muon", "params": {"lr": 0.01, "eps": 1e-6}},
}

# What the name of an optimizer in a cell means for the reference, where it is not its own name.
MEANING = {"config Adam": "AdamW", "config Adam, L2": "Adam"}


@dataclass
class Trace:
    """What one rank saw. ``losses`` are this rank's, all else is equal on all ranks."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    overflows: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[dict[str, torch.Tensor]] = field(default_factory=list)


def run_cells(cells: list[Cell]) -> list[str]:
    """Runs each cell; returns what is wrong, one text per cell that fails. The same on every rank."""
    problems = []
    for number, cell in enumerate(cells):
        try:
            found = _check(cell, checker=number % dist.get_world_size())
        except Exception as error:
            raise RuntimeError(f"cell {cell}: {type(error).__name__}: {error}") from error
        if found:
            problems.append(f"{cell}:\n    {found}")
    return problems


def _check(cell: Cell, checker: int) -> str:
    if cell.refusal is not None:
        return _check_refusal(cell)
    trace = train(cell)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (trace.losses, repr(trace.norms), [_digest(w) for w in trace.weights]))
    message = ""
    if any(rank[1:] != ranks[0][1:] for rank in ranks):
        message = f"ranks disagree: norms {[rank[1] for rank in ranks]}, weights {[rank[2] for rank in ranks]}"
    elif dist.get_rank() == checker:
        message = compare(cell, trace, reference(cell), [rank[0] for rank in ranks])
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return next((text for text in messages if text), "")


def _digest(weights: dict[str, torch.Tensor]) -> float:
    return sum(w.double().abs().sum().item() * (1 + len(name)) for name, w in weights.items())


def _check_refusal(cell: Cell) -> str:
    assert cell.refusal is not None
    try:
        start(cell)
    except DeepSpeedConfigError as error:
        return "" if re.search(cell.refusal, str(error)) else f"refused, but without {cell.refusal!r}: {error}"
    return "was accepted, but must be refused at initialize"


def start(cell: Cell) -> DeepSpeedEngine:
    """The engine of a cell on a fresh model."""
    model = build()
    kind, name = cell.optimizer.split(" ", 1)
    config = cell.config()
    groups = param_groups(model)
    if kind == "client":
        return initialize(model=model, optimizer=CLIENTS[name](groups), config=config)[0]
    return initialize(model=model, model_parameters=groups, config={**config, "optimizer": CONFIGURED[name]})[0]


def batch_at(cell: Cell, step: int, micro: int, part: int, rank: int) -> Batch:
    """Branches change from step to step; where the cell wants an overflow, the last rank's last batch has it."""
    last = micro == cell.accumulation - 1 and rank == cell.ranks - 1 and part == 0
    boost = float("inf") if cell.overflow and step == OVERFLOW_STEP and last else 1.0
    return make_batch(step, micro, part, rank, branch=step != 2, boost=boost)


def train(cell: Cell) -> Trace:
    """Trains the engine and writes down what it did, after every step."""
    engine, rank, trace = start(cell), dist.get_rank(), Trace()
    if cell.stage == 3 and cell.ranks > 1 and cell.limits != "default":
        sharded = [bucket for bucket in engine._runtime.buckets if bucket.is_sharded]
        assert len(sharded) >= 4, f"{cell}: only {len(sharded)} buckets are sharded, which proves little"
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            _backward(engine, cell, step, micro, rank, trace)
            engine.step()
        trace.norms.append(engine.get_global_grad_norm())
        trace.overflows.append(engine.optimizer.overflow)
        trace.scales.append(engine.optimizer.loss_scale)
        _check_between_steps(engine, cell, trace)
    engine.destroy()
    return trace


def _backward(engine: DeepSpeedEngine, cell: Cell, step: int, micro: int, rank: int, trace: Trace) -> None:
    parts = 2 if cell.backward == "two" else 1
    for part in range(parts):
        out = losses_of(engine(batch_at(cell, step, micro, part, rank)))
        trace.losses.append(out.loss.item())
        if cell.backward in ("engine", "two"):
            engine.backward(out.loss)
        elif cell.backward == "own":
            engine.scale(out.loss / cell.accumulation).backward()
        elif cell.backward == "losses":
            engine.backward(out.loss, retain_graph=True)
            engine.backward(out.auxiliary)
        else:
            torch.autograd.backward([engine.scale(loss / cell.accumulation) for loss in (out.loss, out.auxiliary)])


def _check_between_steps(engine: DeepSpeedEngine, cell: Cell, trace: Trace) -> None:
    masters = full_masters(engine)
    for name, value in full_params(engine).items():
        if name in masters:
            assert torch.equal(value, masters[name].to(value.dtype)), f"{cell}: {name} is not its master, cast"
    for bucket in engine._runtime.buckets:
        for parameter, tile in zip(bucket.params, bucket.layout.tiles, strict=True):
            expected = (0,) if bucket.is_sharded else tile.shape
            assert tuple(parameter.shape) == expected, f"{cell}: between steps {tile.name} has {tuple(parameter.shape)}"
            assert parameter.grad is None, f"{cell}: {tile.name}.grad is left over"
    trace.weights.append(masters)


def reference(cell: Cell) -> tuple[Trace, list[list[float]]]:
    """What the one-process reference says: its trace, and the losses of every rank."""
    kind, name = cell.optimizer.split(" ", 1)
    meaning = MEANING.get(cell.optimizer, name)

    def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = param_groups(model, with_empty=False)
        if meaning == "Muon":
            groups = list(muon_groups(model, groups))
        return (REFERENCES.get(meaning) or CLIENTS[meaning])(groups)

    scale = {"fp16": Scale(2.0**9, dynamic=True, window=2, hysteresis=1), "fp16 static": Scale(128, dynamic=False)}
    trainer = ReferenceTrainer(
        build(),
        build_optimizer,
        ranks=cell.ranks,
        compute_dtype=DTYPES.get(cell.precision, torch.float32),
        wire_dtype=torch.float32 if cell.precision == "bf16 sent as fp32" else None,
        reduce_each_backward=cell.stage >= 2,
        clip=cell.clipping,
        scale=scale.get(cell.precision),
        autocast=torch.bfloat16 if cell.precision == "autocast" else None,
    )
    trace, losses = Trace(), [[] for _ in range(cell.ranks)]
    for step in range(STEPS):
        for micro in range(cell.accumulation):
            boundary = micro == cell.accumulation - 1
            for part in range(2 if cell.backward == "two" else 1):
                outs = [
                    losses_of(trainer.forward(batch_at(cell, step, micro, part, rank))) for rank in range(cell.ranks)
                ]
                for rank, out in enumerate(outs):
                    losses[rank].append(out.loss.item())
                both = [
                    [out.loss / cell.accumulation for out in outs],
                    [out.auxiliary / cell.accumulation for out in outs],
                ]
                if cell.backward == "losses":
                    trainer.backward(both[0], boundary=boundary, retain_graph=True)
                    trainer.backward(both[1], boundary=boundary)
                elif cell.backward == "own losses":
                    trainer.backward([a + b for a, b in zip(*both, strict=True)], boundary=boundary)
                else:
                    trainer.backward(both[0], boundary=boundary)
        trainer.step()
        trace.norms.append(trainer.norm)
        trace.overflows.append(trainer.overflow)
        trace.scales.append(trainer.scale.value if trainer.scale else 1.0)
        trace.weights.append(trainer.weights())
    return trace, losses


def compare(cell: Cell, trace: Trace, expected: tuple[Trace, list[list[float]]], losses: list[list[float]]) -> str:
    """The first difference beyond the tolerance, in words; empty if there is none."""
    wanted, wanted_losses = expected
    weight_tolerance, way_tolerance = TOLERANCE[cell.precision]
    start_weights = {name: p.detach() for name, p in build().named_parameters() if p.requires_grad}
    for step in range(STEPS):
        if trace.overflows[step] != wanted.overflows[step]:
            return f"step {step}: overflow {trace.overflows[step]}, expected {wanted.overflows[step]}"
        if trace.scales[step] != wanted.scales[step]:
            return f"step {step}: loss scale {trace.scales[step]}, expected {wanted.scales[step]}"
        if not wanted.overflows[step]:
            gap = abs(trace.norms[step] - wanted.norms[step]) / wanted.norms[step]
            if not gap <= way_tolerance:
                return f"step {step}: norm {trace.norms[step]!r}, expected {wanted.norms[step]!r}, off by {gap:.2g}"
        if trace.weights[step].keys() != wanted.weights[step].keys():
            return f"step {step}: weights {sorted(trace.weights[step].keys() ^ wanted.weights[step].keys())} differ"
        weight_gap = distance(trace.weights[step], wanted.weights[step], wanted.weights[step])
        way = {name: wanted.weights[step][name] - start_weights[name] for name in start_weights}
        way_gap = distance(trace.weights[step], wanted.weights[step], way)
        if not (weight_gap <= weight_tolerance and way_gap <= way_tolerance):
            worst = max(
                start_weights,
                key=lambda name: (trace.weights[step][name] - wanted.weights[step][name]).double().norm().item(),
            )
            return f"step {step}: weights off by {weight_gap:.2g}, the way so far by {way_gap:.2g}, worst is {worst}"
    for rank, (found, right) in enumerate(zip(losses, wanted_losses, strict=True)):
        for index, (a, b) in enumerate(zip(found, right, strict=True)):
            same = a == b or abs(a - b) <= way_tolerance * abs(b)
            if not same:
                return f"loss {index} of rank {rank}: {a!r}, expected {b!r}"
    return ""


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], unit: dict[str, torch.Tensor]) -> float:
    """L2 distance of two models, relative to the norm of ``unit``."""
    total = sum((a[name] - b[name]).double().square().sum().item() for name in b)
    size = sum(value.double().square().sum().item() for value in unit.values())
    return (total / size) ** 0.5 if size else (0.0 if total == 0 else float("inf"))
