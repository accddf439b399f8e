"""Which layers each stage, or each chunk of a stage, gets. Plain arithmetic on numbers per layer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.partition import partition_balanced, partition_uniform

Method = str | Sequence[int]


def chunk_bounds(method: Method, parameters: Sequence[int], names: Sequence[str], parts: int) -> list[int]:
    """Cuts a row of layers.

    Args:
        method: ``uniform``: as many layers each. ``parameters``: as many trainable elements each. ``type:regex``: as
            many layers each whose class name the expression is found in, whatever the case; ``type:a=2,b=1`` gives
            kinds a weight. Or the bounds themselves. (``plan`` is found by ``cut``.)
        parameters: Trainable elements of each layer.
        names: Class name of each layer.
        parts: Parts to cut into.

    Returns:
        ``parts + 1`` bounds. No part is empty.

    Raises:
        DeepSpeedConfigError: There are fewer layers than parts, nothing matches, or the bounds given are none.
    """
    layers = len(names)
    if layers < parts:
        raise DeepSpeedConfigError(
            f"PipelineModule: {layers} layers cannot be cut into {parts} parts (stages x chunks per stage) without an "
            "empty one; use fewer stages or chunks, or more layers"
        )
    if not isinstance(method, str):
        return _given(list(method), layers, parts)
    kind, _, expression = method.partition(":")
    kind = kind.strip().lower()
    if kind == "uniform":
        return partition_uniform(layers, parts)
    if kind == "parameters":
        return balanced(parameters, parts)
    if kind == "type" and expression:
        return balanced(_weights(expression, names), parts)
    raise DeepSpeedConfigError(
        f"PipelineModule(partition_method={method!r}): expected 'uniform', 'parameters', 'plan', 'type:regex', or a "
        "list of bounds"
    )


def is_plan(method: Method | None) -> bool:
    """Returns whether the cut is to be the one with the least step time."""
    return isinstance(method, str) and method.strip().lower() == "plan"


def _given(bounds: list[int], layers: int, parts: int) -> list[int]:
    fits = len(bounds) == parts + 1 and bounds[0] == 0 and bounds[-1] == layers
    if not fits or any(a >= b for a, b in zip(bounds, bounds[1:], strict=False)):
        raise DeepSpeedConfigError(
            f"PipelineModule(partition_method={bounds}): expected {parts + 1} bounds that begin with 0, end with the "
            f"number of layers, {layers}, and rise, so that no part is empty"
        )
    return bounds


def _weights(expression: str, names: Sequence[str]) -> list[float]:
    kinds: list[tuple[str, float]] = []
    if "=" in expression:
        for entry in expression.split(","):
            pattern, _, weight = entry.rpartition("=")
            kinds.append((pattern, float(weight)))
    else:
        kinds.append((expression, 1.0))
    weights = [sum(weight for pattern, weight in kinds if re.search(pattern, name, re.IGNORECASE)) for name in names]
    if not any(weights):
        raise DeepSpeedConfigError(
            f"PipelineModule(partition_method='type:{expression}'): no layer's class name matches; the layers are "
            f"{', '.join(dict.fromkeys(names))}"
        )
    return weights


def balanced(weights: Sequence[float], parts: int) -> list[int]:
    """Parts whose weights differ little; none is empty, though many layers may weigh nothing."""
    bounds = partition_balanced(weights, parts)
    return without_empty(bounds, len(weights))


def without_empty(bounds: list[int], layers: int) -> list[int]:
    """Returns the bounds moved as little as needed, so that every part has a layer."""
    moved = list(bounds)
    for part in range(1, len(moved) - 1):
        moved[part] = max(moved[part], moved[part - 1] + 1)
    for part in range(len(moved) - 2, 0, -1):
        moved[part] = min(moved[part], layers - (len(moved) - 1 - part))
    return moved
