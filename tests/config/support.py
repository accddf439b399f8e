"""What several of these tests use."""

from typing import Any

import pytest

from deepspeed.config import ParsedConfig, parse
from deepspeed.errors import DeepSpeedConfigError

BATCH = {"train_batch_size": 8}


def read(config: dict[str, Any], **options: Any) -> ParsedConfig:
    """Parses a dict to which a batch size is added."""
    return parse({**BATCH, **config}, **options)


def problems(config: Any, batch: bool = True, **options: Any) -> tuple[str, ...]:
    """The problems of a configuration, which must have some."""
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse({**BATCH, **config} if batch and isinstance(config, dict) else config, **options)
    return caught.value.problems


def only_problem(config: Any, **options: Any) -> str:
    """The problem of a configuration that has exactly one."""
    found = problems(config, **options)
    assert len(found) == 1, found
    return found[0]


def nest(path: tuple[Any, ...], value: Any) -> Any:
    """``value`` at a path of declared keys; ``[]`` makes a list of one, ``<name>`` a name."""
    for part in reversed(path):
        value = [value] if part == "[]" else {"mine" if part == "<name>" else part: value}
    return value


def written(path: tuple[Any, ...]) -> str:
    """The dotted name that messages use for a value placed by :func:`nest`."""
    text = ".".join("mine" if part == "<name>" else str(part) for part in path)
    return text.replace(".[]", "[0]")
