"""The kinds of stacks, and one attempt at a seed."""

import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from tests.random_programs.trial import Outcome
from tests.random_stacks import calls, configurations, keys, layouts, watched, worlds
from tests.random_stacks.documented import reason_of
from tests.random_stacks.stack import End, Stack


class Kind(NamedTuple):
    """How stacks of a kind are drawn, and run in a folder within a limit in seconds."""

    draw: Callable[[int], Stack]
    attempt: Callable[[Stack, str, float], End]


KINDS = {
    "configurations": Kind(configurations.draw, configurations.attempt),
    "calls": Kind(calls.draw, calls.attempt),
    "layouts": Kind(layouts.draw, layouts.attempt),
    "worlds": Kind(worlds.draw, worlds.attempt),
    "watched": Kind(watched.draw, watched.attempt),
    "keys": Kind(keys.draw, keys.attempt),
}


def attempt(stack: Stack, timeout: float = 120) -> Outcome:
    """Runs a stack on its ranks, in a temporary folder."""
    started = time.monotonic()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stack-") as folder, contextlib.redirect_stdout(io.StringIO()):
        kind, text = KINDS[stack.kind].attempt(stack, folder, timeout)
    if kind == "failed":
        reason = reason_of("failure", stack, text)
        kind, text = ("documented", reason) if reason else (kind, text)
    return Outcome(kind, text, time.monotonic() - started)
