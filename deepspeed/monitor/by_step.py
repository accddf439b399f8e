"""Events grouped by step, for services that take one dict per step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deepspeed.monitor.sink import Event


def by_step(events: Sequence[Event]) -> Iterator[tuple[int, dict[str, float]]]:
    """``(step, {name: value})`` for each stretch of events with the same step."""
    at, values = None, {}
    for name, value, step in events:
        if at is not None and step != at:
            yield at, values
            values = {}
        at = step
        values[name] = value
    if at is not None:
        yield at, values
