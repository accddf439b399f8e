"""Runs cells in the worker processes: the engine on all ranks, the reference on one, then the comparison."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from deepspeed.engine import DeepSpeedEngine, initialize
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.lion import FusedLion
from tests.engine.matrix.cells import Cell
from tests.harness.toy_models import Batch, awkward, losses_of, make_batch, param_groups
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

# Every step of the reference starts from the engine's weights, so that what is measured is the error of one step, not
# its growth: under 16 bit the last bit of a master decides now and then how a weight is rounded, which moves the next
# gradient. From equal weights gradients are equal bit for bit, and one step differs by fp32 rounding in another order.
# Relative, in the L2 norm over the whole model.
WEIGHT_TOLERANCE = 1e-6
# Where weight decay nearly cancels a gradient, an adaptive optimizer scales what rounding left of it up to a whole
# step: such elements put the weights off by a part of the step, however long it is (RMSprop's first is 10 lr).
CANCELLATION = 2e-5  # of the length of the step
STEP_TOLERANCE = 1e-4  # of the length of the step: far sharper, a step being short
MUON_STEP_TOLERANCE = 5e-3  # its iteration makes small singular values grow, and rounding with them
NORM_TOLERANCE = 1e-6


class Homemade(torch.optim.Optimizer):
    """A class the package cannot know: elementwise, but not declared as such."""

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
        message = compare(cell, trace, [rank[0] for rank in ranks])
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
    model = awkward()
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


def reference_of(cell: Cell) -> ReferenceTrainer:
    """The one-process reference of a cell on a fresh model."""
    meaning = MEANING.get(cell.optimizer, cell.optimizer.split(" ", 1)[1])

    def build_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        groups = param_groups(model, with_empty=False)
        if meaning == "Muon":
            groups = list(muon_groups(model, groups))
        return (REFERENCES.get(meaning) or CLIENTS[meaning])(groups)

    scale = {"fp16": Scale(2.0**9, dynamic=True, window=2, hysteresis=1), "fp16 static": Scale(128, dynamic=False)}
    return ReferenceTrainer(
        awkward(),
        build_optimizer,
        ranks=cell.ranks,
        compute_dtype=DTYPES.get(cell.precision, torch.float32),
        wire_dtype=torch.float32 if cell.precision == "bf16 sent as fp32" else None,
        reduce_each_backward=cell.stage >= 2,
        clip=cell.clipping,
        scale=scale.get(cell.precision),
        autocast=torch.bfloat16 if cell.precision == "autocast" else None,
    )


def compare(cell: Cell, trace: Trace, losses: list[list[float]]) -> str:
    """Runs the reference beside ``trace``; the first difference in words, or nothing.

    Args:
        cell: The combination.
        trace: What the engine did.
        losses: Every rank's losses under the engine.
    """
    trainer = reference_of(cell)
    ahead = [iter(of_rank) for of_rank in losses]
    for step in range(STEPS):
        before = trainer.weights()
        for rank, index, right in _reference_backwards(trainer, cell, step):
            found = next(ahead[rank])
            if not (found == right or abs(found - right) <= NORM_TOLERANCE * abs(right)):
                return f"step {step}, loss {index} of rank {rank}: {found!r}, expected {right!r}"
        trainer.step()
        problem = _compare_step(cell, trace, step, trainer, before)
        if problem:
            return f"step {step}: {problem}"
        trainer.load(trace.weights[step])
    return ""


def _reference_backwards(trainer: ReferenceTrainer, cell: Cell, step: int) -> Iterator[tuple[int, int, float]]:
    """All backwards of one step; yields rank, number and value of each loss."""
    parts = 2 if cell.backward == "two" else 1
    for micro in range(cell.accumulation):
        boundary = micro == cell.accumulation - 1
        for part in range(parts):
            batches = [batch_at(cell, step, micro, part, rank) for rank in range(cell.ranks)]
            outs = [losses_of(trainer.forward(batch)) for batch in batches]
            for rank, out in enumerate(outs):
                yield rank, micro * parts + part, out.loss.item()
            first, second = ([getattr(out, n) / cell.accumulation for out in outs] for n in ("loss", "auxiliary"))
            if cell.backward == "losses":
                trainer.backward(first, boundary=boundary, retain_graph=True)
                trainer.backward(second, boundary=boundary)
            elif cell.backward == "own losses":
                trainer.backward([a + b for a, b in zip(first, second, strict=True)], boundary=boundary)
            else:
                trainer.backward(first, boundary=boundary)


def _compare_step(
    cell: Cell, trace: Trace, step: int, trainer: ReferenceTrainer, before: dict[str, torch.Tensor]
) -> str:
    scale = trainer.scale.value if trainer.scale else 1.0
    if (trace.overflows[step], trace.scales[step]) != (trainer.overflow, scale):
        return f"overflow {trace.overflows[step]}, scale {trace.scales[step]}; expected {trainer.overflow}, {scale}"
    found, expected = trace.weights[step], trainer.weights()
    if found.keys() != expected.keys():
        return f"trained are {sorted(found.keys() ^ expected.keys())} on one side only"
    if trainer.overflow:
        moved = [name for name in found if not torch.equal(found[name], before[name])]
        return f"skipped, but {moved} changed" if moved else ""
    if not abs(trace.norms[step] - trainer.norm) <= NORM_TOLERANCE * trainer.norm:
        return f"gradient norm {trace.norms[step]!r}, expected {trainer.norm!r}"
    weights_off = distance(found, expected, expected)
    step_off = distance(found, expected, {name: expected[name] - before[name] for name in expected})
    tolerance = MUON_STEP_TOLERANCE if "Muon" in cell.optimizer else STEP_TOLERANCE
    ratio = tolerance / STEP_TOLERANCE
    is_close = weights_off <= WEIGHT_TOLERANCE * ratio or step_off <= CANCELLATION * ratio
    if is_close and step_off <= tolerance:
        return ""
    worst = max(expected, key=lambda name: (found[name] - expected[name]).double().norm().item())
    return f"weights are off by {weights_off:.2g}, by {step_off:.2g} of the step, most in {worst}"


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], unit: dict[str, torch.Tensor]) -> float:
    """L2 distance of two models, relative to the norm of ``unit``."""
    total = sum((a[name] - b[name]).double().square().sum().item() for name in b)
    size = sum(value.double().square().sum().item() for value in unit.values())
    return (total / size) ** 0.5 if size else (0.0 if total == 0 else float("inf"))
