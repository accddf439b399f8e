"""``preemption``: a run that a scheduler may end and start again."""

from __future__ import annotations

import signal
from typing import ClassVar

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, Int, TextList

CATCHABLE = tuple(
    sorted(each.name for each in signal.Signals if each.name not in ("SIGKILL", "SIGSTOP", "SIGCHLD", "SIGSEGV"))
)
"""Names of the signals that a program can wait for."""

SIGNAL_VARIABLE = "DEEPSPEED_PREEMPTION_SIGNAL"
"""The environment variable by which ``deepspeed --signal`` names one more signal."""


class Preemption(Section):
    """A run that a scheduler may end and start again: a signal finishes the step, saves, and leaves with a code."""

    _feature: ClassVar[str] = "deepspeed.preemption.feature"

    enabled: Bool = key(
        False,
        "Look after each update whether a rank has got one of the signals; then all ranks save and exit. Costs one "
        "exchange of a few bytes between all ranks per update.",
    )
    save_dir: str | None = key(
        None, "Folder of checkpoints to save to and to go on from; required when enabled.", null_means="none"
    )
    signals: TextList = key(
        None,
        "Signals by which the scheduler says that it will end the process; deepspeed --signal adds one. A second one "
        "of the same kind ends it at once.",
        factory=lambda: ["SIGTERM", "SIGUSR1"],
    )
    exit_code: Int = key(
        75,
        "Exit code after saving, for the scheduler to start the run again; 75 is what sysexits.h calls a temporary "
        "failure.",
        minimum=1,
        maximum=255,
    )
    resume: Bool = key(True, "Let initialize load the last checkpoint in save_dir, if there is one.")
