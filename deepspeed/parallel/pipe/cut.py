"""Finds the cut of the layers with the least step time that fits into memory. Plain arithmetic on layer costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from deepspeed.parallel.pipe.schedule.lists import Kind, Schedule, make_schedule
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate

# Neighbors of a cut that are simulated before it counts as the best; keeps the search within seconds.
_TRIES = 16


@dataclass(frozen=True)
class LayerCost:
    """Holds the costs of a layer for one micro-batch; times in any one unit."""

    forward: float  # time of the forward
    backward: float = 0.0  # time of the whole backward
    weight: float = 0.0  # the part of the backward that gives the weights' gradients
    state: int = 0  # bytes on a rank at all times: parameters, gradients, masters, optimizer state
    activation: int = 0  # bytes kept from the forward of one micro-batch until its backward

    def __add__(self, other: LayerCost) -> LayerCost:
        return LayerCost(
            self.forward + other.forward,
            self.backward + other.backward,
            self.weight + other.weight,
            self.state + other.state,
            self.activation + other.activation,
        )


@dataclass(frozen=True)
class Cut:
    """Describes a cut of the layers into chunks, with its step time and memory."""

    bounds: tuple[int, ...]  # chunk c holds the layers from ``bounds[c]`` up to ``bounds[c + 1]``
    step_time: float  # time of one step, in the unit of the layers' times
    peak_bytes: tuple[int, ...]  # bytes of each stage: states and the activations in flight


def best_cut(
    layers: Sequence[LayerCost],
    schedule: str,
    stages: int,
    micro_batches: int,
    num_chunks: int | None = None,
    *,
    loss: LayerCost | None = None,
    transfer: float = 0.0,
    limit: int | None = None,
) -> Cut:
    """Finds the cut with the least step time among those whose stages fit.

    The search begins with the cuts whose most expensive chunk is cheapest, in time and in bytes, and shifts
    neighboring bounds while that helps, simulating each cut. No chunk is left without a layer.

    Args:
        num_chunks: Chunks per stage, as in :func:`~deepspeed.parallel.pipe.schedule.chunks.place_chunks`.
        loss: The cost of the loss, in the last chunk.
        transfer: Time of a transfer to the next stage.
        limit: Bytes that a stage may use; None: any number.

    Raises:
        ValueError: There are fewer layers than chunks, or no cut was found that fits; the message has how much is
            missing.
    """
    costs = [*layers[:-1], layers[-1] + loss] if loss else list(layers)
    search = _Search(costs, make_schedule(schedule, stages, micro_batches, num_chunks), transfer, limit)
    chunks = search.schedule.chunks
    if len(layers) < chunks:
        raise ValueError(
            f"{len(layers)} layers cannot be cut into {chunks} chunks (stages x chunks per stage) without an empty "
            "one; use fewer stages or chunks"
        )
    starts = {
        tuple(smallest_maximum([cost.forward + cost.backward for cost in costs], chunks)),
        tuple(smallest_maximum([cost.state + cost.activation for cost in costs], chunks)),
    }
    reached = []
    for start in starts:  # the best cut that shifts reach from there, and its value
        value_and_cut = search.value(start)
        while better := search.better(value_and_cut[0], value_and_cut[1].bounds):
            value_and_cut = better
        reached.append(value_and_cut)
    best = min(reached, key=lambda value_and_cut: value_and_cut[0])[1]
    if limit is not None and max(best.peak_bytes) > limit:
        raise ValueError(
            f"no cut of the {len(layers)} layers into {chunks} chunks fits: the best found needs "
            f"{max(best.peak_bytes)} bytes on stage {best.peak_bytes.index(max(best.peak_bytes))}, and {limit} "
            "are available; use more stages, smaller micro-batches, or activation checkpointing"
        )
    return best


class _Search:
    """Steps from one cut to a better one. A value is (bytes too many, step time, squares of the stages' times)."""

    def __init__(self, costs: Sequence[LayerCost], schedule: Schedule, transfer: float, limit: int | None) -> None:
        self.schedule = schedule
        self._costs = costs
        self._transfer = transfer
        self._limit = limit
        self._in_flight = [in_flight(schedule, stage) for stage in range(schedule.stages)]
        # In the middle of a step each further micro-batch adds the slowest stage's time, so a few suffice.
        few = min(schedule.micro_batches, 3 * schedule.stages)
        per_stage = schedule.chunks // schedule.stages
        self._simulated = make_schedule(schedule.name, schedule.stages, few, per_stage)
        self._further = schedule.micro_batches - few

    def better(self, value: tuple[float, ...], bounds: tuple[int, ...]) -> tuple[tuple[float, ...], Cut] | None:
        """Returns a neighbor with a lower value, or None; the most promising ones are tried first."""
        near = sorted((self._least(shifted), shifted) for shifted in _shifted(bounds))
        for least, shifted in near[:_TRIES]:
            if least > value[:2]:
                return None
            if (found := self.value(shifted))[0] < value:
                return found
        return None

    def value(self, bounds: tuple[int, ...]) -> tuple[tuple[float, ...], Cut]:
        """Returns the value of a cut, and the cut."""
        chunks = self._chunks(bounds)
        times = [Times(chunk.forward, chunk.backward, chunk.weight, self._transfer) for chunk in chunks]
        busy = self._busy(chunks)
        step_time = simulate(self._simulated, times).makespan + self._further * max(busy)
        peaks = self._peaks(chunks)
        return (self._excess(peaks), step_time, sum(time**2 for time in busy)), Cut(bounds, step_time, peaks)

    def _least(self, bounds: tuple[int, ...]) -> tuple[float, float]:
        """Returns lower bounds of the first two members of the value, without simulating."""
        chunks = self._chunks(bounds)
        forward = [0.0, *accumulate(chunk.forward for chunk in chunks)]
        backward = [0.0, *accumulate(chunk.backward for chunk in chunks)]
        least = 0.0
        for actions, busy in zip(self.schedule.actions, self._busy(chunks), strict=True):
            # Earlier chunks come before the stage's first computation, and after its last if that is a backward.
            last = actions[-1]
            after = backward[last.chunk] if last.kind is Kind.BACKWARD else 0.0
            least = max(least, forward[actions[0].chunk] + self.schedule.micro_batches * busy + after)
        return self._excess(self._peaks(chunks)), least * (1 - 1e-9)  # tolerance, since sums are in another order

    def _chunks(self, bounds: tuple[int, ...]) -> list[LayerCost]:
        return [sum(self._costs[start + 1 : end], self._costs[start]) for start, end in pairwise(bounds)]

    def _busy(self, chunks: Sequence[LayerCost]) -> list[float]:
        """Returns the time that each stage works on one micro-batch."""
        return [
            sum(chunks[chunk].forward + chunks[chunk].backward for chunk in self.schedule.chunks_of(stage))
            for stage in range(self.schedule.stages)
        ]

    def _peaks(self, chunks: Sequence[LayerCost]) -> tuple[int, ...]:
        return tuple(peak_bytes(self._in_flight[stage], chunks) for stage in range(self.schedule.stages))

    def _excess(self, peaks: tuple[int, ...]) -> float:
        return 0.0 if self._limit is None else float(max(0, max(peaks) - self._limit))


def in_flight(schedule: Schedule, stage: int) -> set[tuple[tuple[int, int], ...]]:
    """Returns what a stage may hold at some moment: micro-batches with activations, per chunk."""
    counts = dict.fromkeys(schedule.chunks_of(stage), 0)
    found = {tuple(counts.items())}
    for action in schedule.actions[stage]:
        counts[action.chunk] += (action.kind is Kind.FORWARD) - action.kind.gives_weight_gradient
        found.add(tuple(counts.items()))
    return found


def peak_bytes(moments: set[tuple[tuple[int, int], ...]], chunks: Sequence[LayerCost]) -> int:
    """Returns the peak bytes of a stage's states and activations over the moments of :func:`in_flight`."""
    return max(
        sum(chunks[chunk].state + count * chunks[chunk].activation for chunk, count in moment) for moment in moments
    )


def _shifted(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the cuts in which some neighboring bounds are one layer earlier or later."""
    inner = len(bounds) - 1
    for first in range(1, inner):
        for end in range(first + 1, inner + 1):
            for step in (1, -1):
                moved = (*bounds[:first], *(bound + step for bound in bounds[first:end]), *bounds[end:])
                if moved[first - 1] < moved[first] and moved[end - 1] < moved[end]:
                    yield moved


def smallest_maximum(costs: Sequence[float], parts: int) -> list[int]:
    """Returns bounds of parts, none empty, that make the most expensive part as cheap as possible."""
    sums = [0.0, *accumulate(costs)]
    # worst[end]: the least cost of the most expensive part over the items below end, and where the last part begins
    worst: list[float] = sums[1:]
    worst.insert(0, 0.0)
    begins: list[list[int]] = []
    for part in range(1, parts):
        new, begin = list(worst), [0] * len(sums)
        for end in range(part + 1, len(sums)):
            new[end], begin[end] = min(
                (max(worst[start], sums[end] - sums[start]), start) for start in range(part, end)
            )
        worst = new
        begins.append(begin)
    bounds = [len(costs)]
    for begin in reversed(begins):
        bounds.append(begin[bounds[-1]])
    return [0, *reversed(bounds)]
