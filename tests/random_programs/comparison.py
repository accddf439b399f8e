"""Compares the values of the ranks with those of plain torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tests.random_programs.program import Program

Values = dict[tuple[Any, ...], Any]


@dataclass(frozen=True)
class Tolerance:
    """Largest allowed differences.

    In fp32 the sides differ by the order of sums only, a few units in the last place of each gradient. Optimizers are
    drawn with an eps that is large beside that, so that an update differs as little as the gradient does. In 16 bits
    gradients are rounded before and after the reduction, so a parameter's update may differ by some per cent.

    Attributes:
        number: Of losses, relative.
        norm: Of the gradient norm, relative.
        change: Of a parameter or state, relative to how far it has moved since the start.
        floor: Relative to the values themselves: the rounding of stored values.
        is_rough: In 16 bits: scalars are not compared.
    """

    number: float
    norm: float
    change: float
    floor: float
    is_rough: bool = False


TOLERANCES = {
    "fp32": Tolerance(number=1e-5, norm=5e-5, change=5e-4, floor=3e-6),
    "bf16": Tolerance(number=4e-2, norm=0.25, change=0.4, floor=4e-3, is_rough=True),
    "fp16": Tolerance(number=1e-2, norm=6e-2, change=0.25, floor=1e-3, is_rough=True),
}
_TINY = 1e-7


def differences(program: Program, start: dict[str, torch.Tensor], wanted: Values, found: Values) -> Iterator[str]:
    """Returns a line for each value of a rank that differs from the oracle's.

    Args:
        program: The program.
        start: First values of parameters.
        wanted: The oracle's values.
        found: The values of the rank.
    """
    tolerance = TOLERANCES[program.precision]
    for key, value in found.items():
        expected = _expected(program, wanted, key)
        text = _difference(key, value, expected, start, tolerance)
        if text:
            yield f"phase {key[0]}, step {key[1]}, {' '.join(map(str, key[2:]))}: {text}"


def _expected(program: Program, wanted: Values, key: tuple[Any, ...]) -> Any:
    number, step, what, *rest = key
    phase = program.phases[number]
    if what == "mean loss":
        losses = [
            wanted[number, step, "loss", micro, data]
            for micro in range(phase.accumulation)
            for data in range(phase.layout.data)
        ]
        return sum(losses) / len(losses)
    if what == "evaluated mean loss":
        losses = [wanted[number, step, "evaluated loss", data] for data in range(phase.layout.data)]
        return sum(losses) / len(losses)
    if what == "logits":
        return wanted[number, step, what, rest[0]][:, rest[1] : rest[2]]
    if len(rest) == 3:  # a part of stacked experts
        whole = wanted.get((number, step, what, rest[0]))
        return None if whole is None else whole.chunk(rest[2])[rest[1]]
    return wanted.get(key)


def _difference(
    key: tuple[Any, ...], value: Any, expected: Any, start: dict[str, torch.Tensor], tolerance: Tolerance
) -> str:
    what = key[2]
    if expected is None or value is None:
        given = value if expected is None else expected
        is_nothing = given is None or (isinstance(given, torch.Tensor) and not given.any())
        return "" if is_nothing else f"found {_short(value)}, expected {_short(expected)}"
    if what == "rates":
        near = len(value) == len(expected) and all(map(_near, value, expected))
        return "" if near else f"found {value}, expected {expected}"
    if not isinstance(value, torch.Tensor):
        limit = tolerance.norm if what == "norm" else tolerance.number
        return (
            "" if math.isclose(value, expected, rel_tol=limit, abs_tol=1e-6) else f"found {value}, expected {expected}"
        )
    if value.shape != expected.shape:
        return f"found shape {tuple(value.shape)}, expected {tuple(expected.shape)}"
    value, expected = value.detach().double(), expected.detach().double()
    if what == "logits":
        counts = ~expected.isnan()
        value, expected = value[counts], expected[counts]
    if tolerance.is_rough and value.dim() == 0:  # its gradient is one sum, which may cancel
        return ""
    first: Any = 0.0
    if what == "master":
        first = start[key[3]].double()
        first = first.chunk(key[5])[key[4]] if len(key) == 6 else first
    power = 2 if what in ("exp_avg_sq", "sum", "square_avg") else 1  # a mean of squares has twice the relative error
    return _distance(value, expected, first, tolerance, power)


def _distance(value: torch.Tensor, expected: torch.Tensor, first: Any, tolerance: Tolerance, power: int) -> str:
    distance = (value - expected).norm().item()
    limit = power * tolerance.change * (expected - first).norm().item() + tolerance.floor * expected.norm().item()
    limit += _TINY * math.sqrt(expected.numel())
    if distance <= limit:  # also where both are empty
        return ""
    return f"is {distance:.3g} away, allowed is {limit:.3g} (norm {expected.norm().item():.3g})"


def _near(left: float, right: float) -> bool:
    return math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-12)


def _short(value: Any) -> str:
    return f"a tensor of norm {value.norm().item():.3g}" if isinstance(value, torch.Tensor) else repr(value)
