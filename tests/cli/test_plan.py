"""A command that takes long reports its progress: in one line on a terminal, in lines elsewhere."""

import io
import sys
import time
from types import SimpleNamespace

import pytest

from deepspeed.cli import plan


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shows_once(monkeypatch):
    """The first line comes soon, the second one never, and no second goes by."""
    monkeypatch.setattr(plan, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(plan, "_REFRESH_SECONDS", 600.0)
    monkeypatch.setattr(plan, "_LINE_SECONDS", 600.0)
    monkeypatch.setattr(plan, "time", SimpleNamespace(monotonic=lambda: 0.0))


def wait_for_text(stream):
    deadline = time.monotonic() + 60
    while not stream.getvalue() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_what_takes_long_is_shown(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    shows_once(monkeypatch)
    with plan.Progress() as shown:
        shown.doing("counting")
        wait_for_text(stream)
    if stream.isatty():
        assert stream.getvalue() == "\rds_plan: counting ... 0 s\x1b[K\r\x1b[K"
    else:
        assert stream.getvalue() == "ds_plan: counting ... 0 s\n"


def test_a_long_line_does_not_wrap(monkeypatch):
    """A line that wraps could not be taken away again."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    shows_once(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    with plan.Progress() as shown:
        shown.doing("counting " * 9)
        wait_for_text(stream)
    line, rest = stream.getvalue().removeprefix("\r").split("\x1b[K", 1)
    assert len(line) == 29 and rest == "\r\x1b[K"


def test_what_is_quick_is_not(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with plan.Progress():
        pass
    assert stream.getvalue() == ""
