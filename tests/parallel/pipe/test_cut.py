"""Where layers are cut for the least step time."""

import random
from itertools import combinations, pairwise

import pytest

from deepspeed.parallel.pipe.cut import LayerCost, best_cut, in_flight, peak_bytes, smallest_maximum
from deepspeed.parallel.pipe.schedule import make_schedule
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate


def every_cut(layers: int, chunks: int) -> list[tuple[int, ...]]:
    return [(0, *inner, layers) for inner in combinations(range(1, layers), chunks - 1)]


def value(costs, bounds, schedule):
    chunks = [sum(costs[start + 1 : end], costs[start]) for start, end in pairwise(bounds)]
    peak = max(peak_bytes(in_flight(schedule, stage), chunks) for stage in range(schedule.stages))
    return simulate(schedule, [Times(c.forward, c.backward, c.weight) for c in chunks]).makespan, peak


def some_layers(seed: int, count: int) -> list[LayerCost]:
    draw = random.Random(seed)
    times = [draw.choice([1, 2, 3, 5, 8]) for _ in range(count)]
    return [LayerCost(t, 2 * t, t, state=draw.randrange(100), activation=draw.randrange(30)) for t in times]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"])
def test_no_cut_is_better(name):
    """Beside every other cut: within a few percent in each case, and mostly the best itself."""
    best_found = 0
    for seed in range(6):
        costs = some_layers(seed, 9)
        schedule = make_schedule(name, 2, 4)
        cut = best_cut(costs, name, 2, 4)
        least = min(value(costs, bounds, schedule)[0] for bounds in every_cut(9, schedule.chunks))
        assert cut.step_time == value(costs, cut.bounds, schedule)[0]
        assert cut.step_time <= 1.05 * least
        best_found += cut.step_time == least
    assert best_found >= 4


def test_the_loss_counter():
    equal = [LayerCost(1, 2, 1)] * 8
    assert best_cut(equal, "1f1b", 2, 8).bounds == (0, 4, 8)
    assert best_cut(equal, "1f1b", 2, 8, loss=LayerCost(2, 4, 2)).bounds == (0, 5, 8)


def test_activations_in_flight_count():
    """Stage 0 of 1F1B holds one micro-batch more than there are stages; it gets fewer layers when memory is short."""
    equal = [LayerCost(1, 2, 1, state=10, activation=20)] * 8
    free = best_cut(equal, "1f1b", 2, 8)
    assert (free.bounds, free.peak_bytes) == ((0, 4, 8), (4 * 10 + 3 * 4 * 20, 4 * 10 + 4 * 20))
    short = best_cut(equal, "1f1b", 2, 8, limit=210)
    assert (short.bounds, short.peak_bytes) == ((0, 3, 8), (3 * 70, 5 * 30))
    assert short.step_time > free.step_time
    with pytest.raises(ValueError, match=r"needs 180 bytes on stage \d, and 179 are available; use more stages"):
        best_cut(equal, "1f1b", 2, 8, limit=179)


def test_a_limit_is_kept_whenever_a_cut_keeps_it():
    for seed in range(8):
        costs, schedule = some_layers(seed, 9), make_schedule("1f1b", 3, 4)
        peaks = sorted(value(costs, bounds, schedule)[1] for bounds in every_cut(9, 3))
        limit = peaks[3]
        assert max(best_cut(costs, "1f1b", 3, 4, limit=limit).peak_bytes) <= limit


def test_many_micro_batches_are_counted_without_being_simulated():
    costs = some_layers(3, 12)
    cut = best_cut(costs, "1f1b", 3, 40)
    assert cut.step_time == pytest.approx(value(costs, cut.bounds, make_schedule("1f1b", 3, 40))[0])
    # What is held is that of all of them.
    cut = best_cut(costs, "gpipe", 3, 40)
    assert max(cut.peak_bytes) == value(costs, cut.bounds, make_schedule("gpipe", 3, 40))[1]


def test_fewer_layers_than_chunks_are_refused():
    with pytest.raises(ValueError, match="3 layers cannot be cut into 4 chunks"):
        best_cut(some_layers(0, 3), "interleaved", 2, 4)


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_smallest_maximum(parts):
    for seed in range(5):
        costs = [cost.forward for cost in some_layers(seed, 8)]
        dearest = {b: max(sum(costs[x:y]) for x, y in pairwise(b)) for b in every_cut(8, parts)}
        bounds = tuple(smallest_maximum(costs, parts))
        assert dearest[bounds] == min(dearest.values())
