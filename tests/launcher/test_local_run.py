"""When the launcher of one machine ends ranks (``launcher.local_run``), without processes."""

import signal
import time
from types import SimpleNamespace
from typing import Any

from deepspeed.launcher import local_run
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


def waiting(link: Any, **more: Any) -> Any:
    """A run whose ranks have ended, with these connections."""
    run = SimpleNamespace(
        _link=link,
        _done={},
        _first=None,
        _signal=None,
        _verdict=None,
        _elsewhere=[],
        _states={},
        _selector=SimpleNamespace(select=time.sleep),
        _output=SimpleNamespace(flush=lambda: None),
        _listen_to_others=lambda: None,
        _consider_failures=lambda now: None,
        _drain=lambda: None,
    )
    run.__dict__.update(more)
    return run


def test_a_launcher_that_never_connects_is_not_waited_for(monkeypatch: Any) -> None:
    monkeypatch.setattr(local_run, "_EXIT_NOTE_SECONDS", 0.1)
    lines: list[str] = []
    run = waiting(SimpleNamespace(missing=[1, 3], waits_for_others=False), _print_line=lines.append)
    LocalRun._wait_for_other_machines(run)
    assert lines == ["the launcher(s) of node(s) 1, 3 never connected to this one, which does not wait longer"]


def test_the_others_hear_of_a_signal_that_ends_the_wait_for_them() -> None:
    signals: list[int | None] = []
    run = waiting(SimpleNamespace(missing=[], waits_for_others=True))
    run._listen_to_others = lambda: signals.append(run._signal)
    run._drain = lambda: setattr(run, "_signal", signal.SIGTERM)
    LocalRun._wait_for_other_machines(run)
    assert signals[-1] == signal.SIGTERM
