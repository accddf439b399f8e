"""When the launcher of one machine ends ranks (``launcher.local_run``), without processes."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from deepspeed.launcher.local_run import LocalRun
from deepspeed.launcher.supervisor import GRACE_AFTER_FAILURE


def test_a_rank_that_the_others_continue_without_is_killed_after_the_grace_period() -> None:
    commands: list[tuple[Any, ...]] = []
    hanging, ended = SimpleNamespace(rank=1, status=None), SimpleNamespace(rank=2, status=0)
    run: Any = SimpleNamespace(
        _do_continue=True,
        _states={1: hanging, 2: ended},
        _left_behind={},
        _is_left_behind=lambda state: True,
        _stop_at=None,
        _command=lambda *command: commands.append(command),
    )
    for now in (100.0, 100.0 + 0.9 * GRACE_AFTER_FAILURE):
        LocalRun._end_ranks_that_hang(run, now)
        assert not commands
    LocalRun._end_ranks_that_hang(run, 100.0 + 1.1 * GRACE_AFTER_FAILURE)
    assert commands == [(signal.SIGKILL, None, 1)]
