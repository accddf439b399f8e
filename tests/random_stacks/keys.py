"""Odd values of each key: the package trains with one, or refuses it by a message with the key's name.

The number of a program is that of a key, in the order of the schema.
"""

import contextlib
import copy
import functools
import json
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from tests.random_stacks.stack import Config, End, Stack, run_on_ranks

VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 2.5, "x", "", [], {}, True, "auto", float("nan"), float("inf"), 10**30, "1", ["a"], {"a": 1},
    [1, 2],
)  # fmt: skip
DEPTH = 5  # sections within sections
STEPS = 2
SCHEMA = Path(__file__).parents[2] / "docs/reference/ds_config.schema.json"
_ELSEWHERE = {
    "wandb": "sends to a service",
    "comet": "sends to a service",
    "autotuning": "is read by the launcher",
    "compile": "compiles with torch, which takes long",
    "weight_quantization": "freezes every layer of the model",
}
"""Sections that are left out, and why."""

_COUNTED = {("gradient_accumulation_steps",), ("train_batch_size",)}
"""Keys without the value 10**30: a loss cannot be divided by it, which the backward says by torch's OverflowError."""


@functools.cache
def keys() -> list[tuple[str, ...]]:
    """Returns the path of each key in the schema of the configuration."""
    schema = json.loads(SCHEMA.read_text())
    found: set[tuple[str, ...]] = set()
    waiting: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while waiting:
        node, path = waiting.pop()
        while "$ref" in node:
            node = schema["$defs"][node["$ref"].split("/")[-1]]
        waiting += [(other, path) for other in node.get("anyOf", []) if "$ref" in other]
        for name, child in node.get("properties", {}).items():
            found.add((*path, name))
            if len(path) < DEPTH:
                waiting.append((child, (*path, name)))
    return sorted(path for path in found if path[0] not in _ELSEWHERE)


@functools.cache
def _switched() -> frozenset[tuple[str, ...]]:
    """Returns the sections with a key ``enabled``."""
    return frozenset(path[:-1] for path in keys() if path[-1] == "enabled")


def draw(seed: int) -> Stack:
    """Returns the key with a number."""
    path = keys()[seed % len(keys())]
    return Stack("keys", seed, 1, {}, "AdamW", {"key": ".".join(path), "path": list(path)})


def config_with(path: tuple[str, ...], value: Any) -> Config:
    """Returns a configuration with a key, whose section is switched on."""
    config: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 1},
    }
    section = config
    for depth, name in enumerate(path[:-1], 1):
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
        if path[:depth] in _switched() and path[-1] != "enabled":
            section["enabled"] = True
    section[path[-1]] = copy.deepcopy(value)
    return config


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Returns how the key of a number ends."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on the rank. "refused" is a key whose values are all refused, "equal" one with values that train."""
    path = tuple(stack.options["path"])
    problems, trained = [], 0
    with _working_directory(folder):
        for value in VALUES:
            if value == 10**30 and path in _COUNTED:
                continue
            try:
                _train(config_with(path, value))
                trained += 1
            except DeepSpeedConfigError as error:
                if not any(part in str(error) for part in path):
                    problems.append(f"{value!r}: the message does not name the key: {error}")
            except Exception:  # any other error is a fault
                problems.append(f"{value!r}: {traceback.format_exc()[-600:]}")
    if problems:
        return "failed", f"{'.'.join(path)}:\n" + "\n".join(problems)
    return ("equal", f"{trained} of {len(VALUES)} values train") if trained else ("refused", "all values")


def _train(config: Config) -> None:
    import deepspeed

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    engine = deepspeed.initialize(model=model, config=config)[0]
    try:
        for _ in range(STEPS * engine.gradient_accumulation_steps()):
            inputs = torch.ones(2, 4, dtype=next(engine.module.parameters()).dtype)
            engine.backward(engine(inputs).float().square().mean())
            engine.step()
    finally:
        engine.destroy()


@contextlib.contextmanager
def _working_directory(folder: str) -> Iterator[None]:
    """Changes the working directory: some keys name files relative to it."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
