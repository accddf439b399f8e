"""Searches for the fastest layouts of a model on a machine.

All divisors of the ranks are tried along all axes. Layouts whose states alone do not fit are left out before
their time is computed; the idle time of pipelines is a formula in the first round, and schedules are simulated
for the best layouts only.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.plan.decoder import DecoderShape
from deepspeed.plan.machine import Machine
from deepspeed.plan.prediction.layout import ParallelLayout
from deepspeed.plan.prediction.step import PredictedStep, StepModel, StepSetup, predict_step, refuse_unknown_rates

_REFINED = 40  # layouts of the first round whose schedules are simulated
_MOST_MICRO_BATCH = 64
_MOST_TENSOR, _MOST_CONTEXT = 64, 16
_LONG = 16384  # tokens from which sequences are divided even if there are enough samples for all ranks
_LEAST_TOKENS = 2048  # of a divided sequence that a rank has
_VEE = 2  # chunks of a stage whose chunks are those at both ends
_RECOMPUTE = ("none", "selective", "full")
_RECOMPUTE_SCORES = ("none", "selective", "attention", "full")
"""Where attention writes its scores; with a fused one, running it again saves no memory."""


@dataclass(frozen=True)
class RankedLayout:
    """One of the best layouts."""

    step: PredictedStep
    reason: str  # how it differs from the fastest one


@dataclass
class LayoutSearch:
    """Holds the result of a search for layouts."""

    best: list[RankedLayout]  # the fastest layouts that fit, in order
    tried: int = 0  # number of layouts considered
    # reasons why layouts were excluded, with the number of layouts of each
    refused: Counter[str] = field(default_factory=Counter)


def search_layouts(
    shape: DecoderShape,
    machine: Machine,
    tokens: int,
    samples: int,
    *,
    base: ParallelLayout | None = None,
    count: int = 10,
    adjust: Callable[[ParallelLayout], ParallelLayout | None] | None = None,
) -> LayoutSearch:
    """Returns the ``count`` fastest layouts, fastest first, and how many others were left out for which reason.

    ``samples`` are those of a step over all ranks; ``base`` has the options that are not searched, such as fp8.
    ``adjust`` returns a layout as it would run, or None to leave it out.

    Raises:
        DeepSpeedConfigError: No layout has this many samples, or none fits.
    """
    refuse_unknown_rates(machine)
    base = base or ParallelLayout(cuts_norms=True)
    ranking = LayoutSearch([])
    kept: list[tuple[float, int, StepSetup]] = []
    slower: Counter[str] = Counter()
    best: PredictedStep | None = None
    for found in _layouts(shape, machine, tokens, samples, base):
        layout = found if adjust is None else adjust(found)
        if layout is None:
            continue
        ranking.tried += 1
        setup = StepSetup(shape, layout, machine, tokens)
        try:
            predictor = StepModel(setup, is_quick=True)
        except DeepSpeedConfigError:
            ranking.refused["layers cannot be divided among so many chunks"] += 1
            continue
        if predictor.least_bytes > machine.usable:
            ranking.refused["parameters, gradients and optimizer states alone do not fit"] += 1
            continue
        step = predictor.predict()
        if not step.fits:
            ranking.refused[f"activations do not fit (recompute {layout.recompute})"] += 1
            continue
        if best is None or step.seconds < best.seconds:
            best = step
        slower[_main_cost(step)] += 1
        heapq.heappush(kept, (-step.seconds, ranking.tried, setup))
        if len(kept) > _REFINED:
            heapq.heappop(kept)
    if best is None:
        why = ", ".join(f"{reason} ({number})" for reason, number in ranking.refused.most_common()) or "no layout"
        raise DeepSpeedConfigError(
            f"search: none of {ranking.tried} layouts of {machine.ranks} ranks and {samples} samples fits: {why}. Use "
            "more devices, another number of samples, or shorter sequences"
        )
    refined = sorted((predict_step(setup) for _, _, setup in kept), key=lambda step: step.seconds)
    ranking.best = [RankedLayout(step, _reason(step, refined[0])) for step in refined[:count]]
    for step in refined[:count]:
        slower[_main_cost(step)] -= 1
    for cost, number in slower.items():
        if number > 0:
            ranking.refused[f"slower; besides matrix products, most time goes to {cost}"] = number
    return ranking


def _layouts(
    shape: DecoderShape, machine: Machine, tokens: int, samples: int, base: ParallelLayout
) -> Iterator[ParallelLayout]:
    ranks = machine.ranks
    tensors = [n for n in _divisors(ranks) if n <= min(machine.link_domain, _MOST_TENSOR) and shape.heads % n == 0]
    most = min(_MOST_CONTEXT, tokens // _LEAST_TOKENS) if tokens >= _LONG or samples < ranks else 1
    contexts = [n for n in _divisors(ranks) if n <= most and tokens % n == 0]
    pipes = [n for n in _divisors(ranks) if n <= shape.layers]
    recomputations = _RECOMPUTE if shape.has_fused_attention else _RECOMPUTE_SCORES
    for tensor, context, pipe in product(tensors, contexts, pipes):
        data, left = divmod(ranks, tensor * context * pipe)
        if left or not data or samples % data or not (base.is_ring or shape.heads % (tensor * context) == 0):
            continue
        if base.shard_ranks is not None and data * context % base.shard_ranks:
            continue
        if base.weight_ranks is not None and (base.shard_ranks or data * context) % base.weight_ranks:
            continue
        each = samples // data
        experts = [n for n in _divisors(data) if shape.experts % n == 0] if shape.experts else [1]
        # Stage 3 gathers whole layers for every micro-batch; beside stages of a pipeline the engine has stages 0 and 1.
        stages: tuple[int, ...] = (0, 1, 2, 3) if pipe == 1 else (0, 1)
        if data * context == 1:
            stages = (0,)
        for micro in (n for n in range(1, min(each, _MOST_MICRO_BATCH) + 1) if each % n == 0):
            steps = each // micro
            if pipe > 1 and steps < pipe:
                continue
            for (schedule, chunks), ep, stage, recompute in product(
                _schedules(shape.layers, pipe, steps), experts, stages, recomputations
            ):
                yield replace(
                    base,
                    tensor=tensor,
                    pipe=pipe,
                    chunks=chunks,
                    schedule=schedule,
                    context=context,
                    experts=ep,
                    data=data,
                    stage=stage,
                    micro_batch=micro,
                    accumulation=steps,
                    recompute=recompute,
                    cuts_norms=base.cuts_norms and tensor > 1,
                )


def _schedules(layers: int, pipe: int, steps: int) -> list[tuple[str, int]]:
    """Returns the schedules and chunks of a stage; the interleaved one has micro-batches in groups of its stages."""
    if pipe == 1:
        return [("1f1b", 1)]
    most = layers // pipe
    found = [("1f1b", 1), ("zb-h1", 1)]
    if steps % pipe == 0:
        found += [("interleaved", n) for n in range(2, most + 1) if n in (2, 4, 8) or layers % (pipe * n) == 0]
    if most >= _VEE and steps >= _VEE * pipe:
        found += [("zbv", _VEE), ("dualpipev", _VEE)]
    return found


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _costs(step: PredictedStep) -> dict[str, float]:
    """Returns the seconds beyond those of one pass of matrix products, by cause."""
    found = {f"waits along {axis}": seconds for axis, seconds in step.exposed.items()}
    found["waits for other stages"] = step.bubble
    found["elementwise operations"] = step.traffic
    found["the update"] = step.update
    recompute = {"full": 1 / 4, "selective": 1 / 7}.get(step.setup.layout.recompute, 0.0)
    found["what runs again"] = recompute * step.matmul
    return found


def _main_cost(step: PredictedStep) -> str:
    costs = _costs(step)
    return max(costs, key=costs.__getitem__)


def _reason(step: PredictedStep, best: PredictedStep) -> str:
    if step is best:
        return f"the fastest; besides matrix products, most time goes to {_main_cost(step)}"
    mine, its = _costs(step), _costs(best)
    mine["products of smaller matrices"], its["products of smaller matrices"] = (
        one.matmul - _costs(one)["what runs again"] for one in (step, best)
    )
    more = {name: seconds - its.get(name, 0.0) for name, seconds in mine.items()}
    worst = max(more, key=more.__getitem__)
    least = {name: seconds - mine.get(name, 0.0) for name, seconds in its.items()}
    gain = max(least, key=least.__getitem__)
    text = f"{step.seconds / best.seconds - 1:+.1%}: {more[worst]:.2f} s more of {worst}"
    return text + (f", {least[gain]:.2f} s less of {gain}" if least[gain] > 0.005 * best.seconds else "")
