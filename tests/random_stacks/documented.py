"""Differences that the documents state: what shows them, and why they are no faults."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.random_stacks.stack import Stack


@dataclass(frozen=True)
class Documented:
    """A known difference.

    Attributes:
        comparison: "resumed", "stage 0" or "failure".
        applies: Returns whether a stack has it, from the stack and the text of the difference or the failure.
        reason: Why it is there, and which page says so.
    """

    comparison: str
    applies: Callable[[Stack, str], bool]
    reason: str


def _at(stack: Stack, *keys: str) -> Any:
    value: Any = stack.config
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _is_static(stack: Stack, _text: str) -> bool:
    shared = _at(stack, "compression_training", "activation_quantization", "shared_parameters")
    return shared is not None and shared["range_calibration"] == "static" and stack.world > 1


def _skips_differently(stack: Stack, text: str) -> bool:
    return "fp16" in stack.config and "skipped" in text


def _forbids_unused(stack: Stack, text: str) -> bool:
    is_forbidden = _at(stack, "zero_optimization", "ignore_unused_parameters") is False
    return is_forbidden and "ignore_unused_parameters is false" in text


DOCUMENTED = (
    Documented(
        "resumed",
        lambda stack, _text: _at(stack, "communication_compression", "islands") is not None,
        "islands resume with the states of the first island (docs/guide/compressed-communication.md)",
    ),
    Documented(
        "resumed",
        lambda stack, _text: _at(stack, "zero_optimization", "load_from_fp32_weights") is False,
        "load_from_fp32_weights false begins masters again from 16-bit weights (docs/reference/config.md)",
    ),
    Documented(
        "resumed",
        _is_static,
        "each rank measures its own static ranges of activations; the checkpoint holds those of the first rank",
    ),
    Documented(
        "stage 0",
        _is_static,
        "each rank measures its own static ranges of activations, from outputs that are rounded differently",
    ),
    Documented(
        "stage 0",
        _skips_differently,
        "at the edge of fp16, a gradient overflows in one order of sums and divisions and not in another",
    ),
    Documented(
        "failure",
        lambda stack, text: _forbids_unused(stack, text) and "experts" in text,
        "an expert without tokens on any rank is an unused parameter, which the configuration forbids",
    ),
    Documented(
        "failure",
        lambda stack, text: _forbids_unused(stack, text) and "mask_scores" in text,
        "scores of masks get no gradient before schedule_offset, which the configuration forbids",
    ),
)


def reason_of(comparison: str, stack: Stack, text: str) -> str:
    """Returns the reason of a known difference, or an empty string."""
    return next(
        (known.reason for known in DOCUMENTED if known.comparison == comparison and known.applies(stack, text)), ""
    )
