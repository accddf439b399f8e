"""Compares a run that is saved and resumed with the straight one, and with plain stage 0."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from tests.random_stacks.documented import reason_of
from tests.random_stacks.stack import Config, End, Stack

STEPS, SAVED = 5, 2
REFUSALS = (DeepSpeedConfigError, NotYetSupportedError)

Build = Callable[[Config, int], Any]
"""Returns an engine for a configuration; the number is the seed of its initial values."""

Train = Callable[[Any, int, int], list[float]]
"""Trains an engine from a step to another one; returns the losses of its micro-batches, or batches."""


@dataclass(frozen=True)
class Straight:
    """The results of the straight run."""

    losses: list[float]
    rates: list[float]
    counts: tuple[int, int]
    norm: float


def counts_of(engine: Any) -> tuple[int, int]:
    """Returns the skipped steps and all steps."""
    return engine.skipped_steps, engine.global_steps


def train_and_resume(config: Config, folder: str, build: Build, train: Train) -> tuple[Straight, list[str]]:
    """Trains, saves on the way, and trains again from there with an engine of other values.

    Returns:
        The straight run, and a line for each difference of the resumed one, which must be equal bit for bit.
    """
    engine = build(config, 5)
    losses = train(engine, 0, SAVED)
    before = len(losses)
    engine.save_checkpoint(folder)
    losses += train(engine, SAVED, STEPS)
    straight = Straight(losses, engine.get_lr(), counts_of(engine), float(engine.get_global_grad_norm() or 0))
    engine.destroy()
    engine = build(config, 99)
    problems = []
    path, _ = engine.load_checkpoint(folder)
    if path is None:
        problems.append("the checkpoint was not found")
    resumed = losses[:before] + train(engine, SAVED, STEPS)
    if str(resumed) != str(losses):  # as text, NaN equals NaN
        problems.append(f"losses after resuming: {resumed}, straight: {losses}")
    if engine.get_lr() != straight.rates:
        problems.append(f"learning rates after resuming: {engine.get_lr()}, straight: {straight.rates}")
    if counts_of(engine) != straight.counts:
        problems.append(f"skipped and all steps after resuming: {counts_of(engine)}, straight: {straight.counts}")
    engine.destroy()
    return straight, problems


def at_stage_zero(config: Config) -> Config:
    """Returns a configuration without sharding and without what only changes how gradients are summed."""
    plain = copy.deepcopy(config)
    plain["zero_optimization"] = {"stage": 0}
    for key in ("sparse_gradients", "prescale_gradients", "gradient_predivide_factor"):
        plain.pop(key, None)
    return plain


def differs_from(
    straight: Straight, plain: Config, build: Build, train: Train, tolerance: float, saved: str | None = None
) -> list[str]:
    """Returns a line for each difference from a run with the configuration ``plain``; none if that is refused.

    Args:
        straight: The results to compare.
        plain: The configuration.
        build: Returns an engine.
        train: Trains it.
        tolerance: Largest relative difference of a loss.
        saved: Folder of the straight run's checkpoint, to begin with it; None to begin as the straight run.
    """
    try:
        engine = build(plain, 5)
    except REFUSALS:
        return []
    if saved is None:
        losses = train(engine, 0, STEPS)
    else:
        engine.load_checkpoint(saved)
        losses = train(engine, SAVED, STEPS)
        losses = straight.losses[: len(straight.losses) - len(losses)] + losses
    problems = []
    pairs = zip(straight.losses, losses, strict=False)
    if len(losses) != len(straight.losses) or any(not abs(x - y) <= tolerance * abs(y) for x, y in pairs):
        start = "from the start" if saved is None else "from the checkpoint"
        problems.append(f"losses: {straight.losses}, plain {start}: {losses}")
    if counts_of(engine) != straight.counts:
        problems.append(f"skipped and all steps: {straight.counts}, plain: {counts_of(engine)}")
    engine.destroy()
    return problems


def end_of(stack: Stack, resumed: list[str], plain: list[str], losses: list[float]) -> End:
    """Returns the end of a program by its differences."""
    reasons = []
    for comparison, problems in (("resumed", resumed), ("stage 0", plain)):
        text = "\n".join(problems)
        if problems:
            reason = reason_of(comparison, stack, text)
            if not reason:
                return "different", text
            reasons.append(reason)
    if any(loss != loss for loss in losses):
        return "different", f"losses are not numbers: {losses}"
    if len(set(losses)) < 2:
        return "different", f"the loss does not change: {losses}"
    return ("documented", "; ".join(reasons)) if reasons else ("equal", "")
