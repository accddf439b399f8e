"""Runs one program on its ranks and returns how it ended."""

import contextlib
import io
import tempfile
import time
from dataclasses import dataclass

import torch

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from tests.harness import run_ranks
from tests.harness.errors import RanksFailed
from tests.random_programs.comparison import differences
from tests.random_programs.oracle import NothingTrained, Oracle
from tests.random_programs.program import Program
from tests.random_programs.runner import run_phase

REFUSALS = (DeepSpeedConfigError, NotYetSupportedError)


@dataclass(frozen=True)
class Outcome:
    """How a program ended: "equal", "refused" (by a sentence), "undecided", "different" or "failed".

    Attributes:
        kind: One of these.
        text: The refusal, why nothing is decided, the differences, or the failure of the ranks.
        seconds: How long it took.
    """

    kind: str
    text: str
    seconds: float

    @property
    def is_finding(self) -> bool:
        return self.kind in ("different", "failed")


def attempt(program: Program, timeout: float = 90) -> Outcome:
    """Runs a program and its oracle."""
    started = time.monotonic()
    torch.set_num_threads(1)
    kind, text = _attempt(program, timeout)
    return Outcome(kind, text, time.monotonic() - started)


def _attempt(program: Program, timeout: float) -> tuple[str, str]:
    oracle = Oracle(program)
    try:
        wanted = oracle.run()
    except NothingTrained:
        return "undecided", "every parameter is frozen"
    if not oracle.is_decided:
        return "undecided", "two experts are equally good for a token, so rounding decides"
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="program-") as folder:
        for number, phase in enumerate(program.phases):
            try:
                with contextlib.redirect_stdout(io.StringIO()):  # the lines of every rank's log
                    results = run_ranks(run_phase, phase.layout.world, program, number, folder, timeout=timeout)
            except RanksFailed as error:
                return failure_of(error)
            for rank, found in enumerate(results):
                lines = differences(program, oracle.start, wanted, found)
                problems += [f"rank {rank}, {line}" for line in lines]
            if problems:
                return "different", "\n".join(problems[:40])
    return "equal", ""


def failure_of(error: RanksFailed) -> tuple[str, str]:
    """Returns how a program ended whose ranks raised: refused if each did so with an error for that, else failed."""
    exceptions = [report.exception for report in error.reports]
    if exceptions and all(isinstance(exception, REFUSALS) for exception in exceptions):
        return "refused", str(exceptions[0])
    return "failed", str(error)
