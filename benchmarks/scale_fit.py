"""Fits the constants of ``deepspeed/accelerator/devices.py`` to published runs.

The runs determine some constants well and others hardly: for example, an exchange during computation may be slow
because of the rate of the link, or because it slows the computation down. So each kind of constant has a prior (maximum
a posteriori): without evidence it keeps its expected value. Limits are physical: a constant at its limit means that the
model omits something or counts it twice.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from benchmarks.published_runs import PublishedRun, predicted, split
from deepspeed.accelerator.devices import DEVICES, Device, DeviceEfficiency

FACTORS = {"mosaic a100": 1.05, "mosaic h100": 1.27}
"""Measured over predicted time of operations, by source and family of devices, of programs that are slower."""


@dataclass(frozen=True)
class ConstantPrior:
    """The prior of a kind of constant: log-normal around an expected value, between physical limits.

    Attributes:
        low: Lowest physical value.
        expected: Mode of the prior; the fit keeps it where the runs do not determine the constant.
        high: Highest physical value.
        spread: Standard deviation of its logarithm.
        reason: Why these limits and this expected value.
    """

    low: float
    expected: float
    high: float
    spread: float
    reason: str


PRIORS = {
    "matmul": ConstantPrior(
        0.3, 0.7, 0.9, 0.15, "Large products reach 0.6 to 0.8 of the peak, because the power limit lowers the clock."
    ),
    "fp8": ConstantPrior(0.25, 0.55, 0.85, 0.15, "Products in fp8 reach the power limit earlier than in 16 bits."),
    "attention": ConstantPrior(
        0.15, 0.45, 0.75, 0.3, "FlashAttention reached 0.25 to 0.4 at first, and at most 0.73 on A100, 0.75 on H100."
    ),
    "bandwidth": ConstantPrior(
        0.5, 0.85, 0.92, 0.15, "Long copies reach 0.9; refreshes and turnarounds of the bus take the rest."
    ),
    "half_size": ConstantPrior(16, 64, 256, 0.4, "From the tile of one instruction to the largest tile of a kernel."),
    "link": ConstantPrior(0.4, 0.78, 0.92, 0.15, "Collectives alone reach 0.75 to 0.82; packet headers take 0.06."),
    "network": ConstantPrior(0.4, 0.7, 0.95, 0.15, "One flow alone reaches 0.95; flows of a job collide in switches."),
    "contention": ConstantPrior(
        0.05, 0.2, 0.5, 0.4, "A collective takes 16 to 32 of 108 to 132 multiprocessors, and memory bandwidth."
    ),
    "factor": ConstantPrior(0.9, 1.0, 1.6, 0.15, "Programs with the same operations differ; 1: like the others."),
}
"""Priors by kind of constant; rough figures."""
_FAMILIES = {"a100": "a100", "a100-40": "a100", "h100": "h100", "h200": "h100", "h100-500w": "h100-500w"}
_SHARED = ("half_size", "link", "network", "contention")
_RATES = ("matmul", "attention", "bandwidth")
_ERROR = 0.03  # of a run's logarithm: differences between programs that the model does not have
_ROUND = 0.02  # smaller errors count by their square, larger ones linearly
_LARGEST = 0.4  # a larger error counts as this one
_FIRST_STEP, _LAST_STEP = 0.12, 0.003  # of a constant's logarithm
_MOST_ROUNDS = 14
_LEAST_GAIN = 2e-4
_MOVED = 0.1  # relative change of a constant that a report lists


def prior_of(name: str) -> ConstantPrior:
    """Returns the prior of a constant by its name in :func:`constants`."""
    return PRIORS["factor" if name.startswith("factor") else name.split()[-1]]


def limits_of(name: str) -> tuple[float, float]:
    """Returns the lowest and the highest value that ``--fit`` tries for a constant of :func:`constants`."""
    return prior_of(name).low, prior_of(name).high


def constants() -> dict[str, float]:
    """Returns the present values of the constants that ``--fit`` changes, by names such as ``a100 matmul``.

    A constant that all devices share has no device in its name.
    """
    found = {}
    for family in dict.fromkeys(_FAMILIES.values()):
        reached = DEVICES[family].efficiency
        names = _RATES + (("fp8",) if DEVICES[family].fp8_flops else ())
        found |= {f"{family} {name}": getattr(reached, name) for name in names}
    found |= {name: getattr(DEVICES["a100"].efficiency, name) for name in _SHARED}
    return found | {f"factor {program}": factor for program, factor in FACTORS.items()}


def expected_constants() -> dict[str, float]:
    """Returns the modes of the priors of all :func:`constants`, by name."""
    return {name: prior_of(name).expected for name in constants()}


def reached_of(values: Mapping[str, float], runs: Iterable[PublishedRun]) -> dict[str, DeviceEfficiency]:
    """Returns the efficiencies of devices with other constants, by ``PublishedRun.machine``.

    Args:
        values: Constants by the names of :func:`constants`.
        runs: Runs on these machines.
    """
    found = {}
    for run in runs:
        device: Device = run.setups[0].machine.device
        family = _FAMILIES.get(device.name)
        own = {key.split()[1]: value for key, value in values.items() if key.split()[0] == family}
        own |= {name: values[name] for name in _SHARED}
        own["factor"] = values.get(f"factor {run.source} {family}", 1.0)
        found[run.machine] = replace(device.efficiency, **own)
    return found


def misfit(values: Mapping[str, float], runs: list[PublishedRun]) -> float:
    """Returns the objective of :func:`fit`: the mean error of the runs plus the penalty of the priors."""
    reached = reached_of(values, runs)
    errors = [math.log(predicted(run, reached).seconds / (run.seconds or 1.0)) for run in runs]
    error = sum(min(math.hypot(error, _ROUND) - _ROUND, _LARGEST) for error in errors)
    distances = [math.log(value / prior_of(name).expected) / prior_of(name).spread for name, value in values.items()]
    return (error + _ERROR * sum(distance**2 / 2 for distance in distances)) / len(runs)


def fit(
    runs: list[PublishedRun], start: Mapping[str, float] | None = None, *, rounds: int = _MOST_ROUNDS
) -> dict[str, float]:
    """Returns the constants with the smallest :func:`misfit`, by coordinate descent with extrapolation of each round.

    Args:
        runs: The runs.
        start: Constants to start from; None: the expected ones.
        rounds: Most rounds over all coordinates.
    """
    values = dict(start or expected_constants())
    best, width = misfit(values, runs), _FIRST_STEP
    directions = [(name,) for name in values]
    for name in values:
        if name.startswith("factor"):  # a factor together with the rates that compensate it
            family = name.split()[-1]
            directions += [(name, f"{family} matmul"), (name, *(f"{family} {rate}" for rate in _RATES))]

    def within(name: str, value: float) -> float:
        low, high = limits_of(name)
        return min(high, max(low, value))

    for _ in range(rounds):
        before, least = dict(values), best
        for names, factor in itertools.product(directions, (1 + width, 1 / (1 + width))):
            while True:
                other = {**values, **{name: within(name, values[name] * factor) for name in names}}
                if other == values or (found := misfit(other, runs)) >= best:
                    break
                best, values = found, other
        extrapolated = {name: within(name, value**2 / before[name]) for name, value in values.items()}
        if (found := misfit(extrapolated, runs)) < best:
            best, values = found, extrapolated
        if least - best < _LEAST_GAIN:
            width /= 2
        if width < _LAST_STEP:
            break
    return values


def left_out(runs: list[PublishedRun]) -> list[str]:
    """Returns a table with the errors of each source after a fit to the others, without a factor of its own."""
    timed = [run for half in split(runs) for run in half]
    lines = ["Each source with constants fitted to the others alone, without a factor of its own:", ""]
    lines += [
        "| source | records | median error | worst | constants that moved by more than 10 % |",
        "|---|---|---|---|---|",
    ]
    table = constants()
    for source in dict.fromkeys(run.source for run in timed):
        own = [run for run in timed if run.source == source]
        values = fit([run for run in timed if run.source != source], table)
        values |= {name: 1.0 for name in values if name.startswith(f"factor {source} ")}
        reached = reached_of(values, own)
        errors = [abs(predicted(run, reached).seconds / (run.seconds or 1.0) - 1) for run in own]
        moved = [
            f"{name} {table[name]:.2f} to {value:.2f}"
            for name, value in values.items()
            if abs(value / table[name] - 1) > _MOVED and not name.startswith(f"factor {source} ")
        ]
        found = f"{statistics.median(errors):.1%} | {max(errors):.1%}"
        lines.append(f"| {source} | {len(own)} | {found} | {', '.join(moved) or 'none'} |")
    return lines
