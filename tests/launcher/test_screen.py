"""Lines of several ranks on one screen."""

import errno
import io
import os
import time

import pytest

from deepspeed.launcher.screen import Output, RankStream, Screen
from deepspeed.logging import logger


class Recorder:
    """Takes the place of the real output."""

    def __init__(self):
        self.data = b""

    def put(self, descriptor, data):
        self.data += data


@pytest.fixture(params=["file", "terminal"])
def surface(request, monkeypatch):
    monkeypatch.setattr(os, "isatty", lambda descriptor: request.param == "terminal")
    monkeypatch.setattr("deepspeed.launcher.screen._surface", lambda descriptor: (0, 0, 0))
    recorder = Recorder()
    screen = Screen(recorder)
    streams = [RankStream(rank, 2, f"[rank {rank}] ".encode(), screen) for rank in (0, 1)]
    return request.param, recorder, screen, streams


def test_only_whole_lines_appear(surface):
    _, recorder, _, (_, one) = surface
    one.feed(b"first\nsec")
    assert recorder.data == b"[rank 1] first\n"
    one.feed(b"ond\r\nthi")
    assert recorder.data == b"[rank 1] first\n[rank 1] second\n"
    one.finish()
    assert recorder.data.endswith(b"[rank 1] thi\n")
    one.finish()
    assert recorder.data.count(b"thi") == 1


def test_progress_of_rank_0_is_live(surface):
    kind, recorder, _, (zero, _) = surface
    clear = b"\x1b[K" if kind == "terminal" else b""
    zero.feed(b"\r 10%")
    assert recorder.data == b"[rank 0]  10%"
    zero.feed(b"\r 20%")
    assert recorder.data == b"[rank 0]  10%\r[rank 0]  20%" + clear
    zero.feed(b"\r 20%|##\n")
    assert recorder.data == b"[rank 0]  10%\r[rank 0]  20%" + clear + b"|##\n"


def test_progress_with_the_return_at_the_end(surface):
    _, recorder, _, (zero, _) = surface
    zero.feed(b"10%\r")
    zero.feed(b"20%\r")
    assert recorder.data.startswith(b"[rank 0] 10%\r[rank 0] 20%")
    zero.feed(b"done\n")
    assert recorder.data.endswith(b"[rank 0] done" + (b"\x1b[K\n" if surface[0] == "terminal" else b"\n"))


def test_progress_of_other_ranks_shows_its_end_only(surface):
    _, recorder, _, (_, one) = surface
    for percent in range(0, 100, 10):
        one.feed(b"\r%d%%" % percent)
    assert recorder.data == b""
    assert len(one._pending) < 10
    one.feed(b"\r100%\n")
    assert recorder.data == b"[rank 1] 100%\n"


def test_a_line_never_lands_inside_another(surface):
    kind, recorder, _, (zero, one) = surface
    zero.feed(b"\r50%")
    one.feed(b"hello\n")
    if kind == "terminal":
        assert recorder.data == b"[rank 0] 50%\r\x1b[K[rank 1] hello\n[rank 0] 50%"
    else:
        assert recorder.data == b"[rank 0] 50%\n[rank 1] hello\n"
    before = len(recorder.data)
    zero.feed(b"\r60%")
    expected = b"\r[rank 0] 60%\x1b[K" if kind == "terminal" else b"[rank 0] 60%"
    assert recorder.data[before:] == expected


def test_stdout_and_stderr_of_rank_0_do_not_mix(surface):
    _, recorder, screen, (zero, _) = surface
    other = RankStream(0, 1, b"[rank 0] ", screen)
    zero.feed(b"\r50%")
    other.feed(b"\rbar")
    assert recorder.data == b"[rank 0] 50%\n[rank 0] bar"
    screen.close()
    assert recorder.data.endswith(b"bar\n")


def test_a_prompt_of_rank_0_appears_after_a_moment(surface):
    kind, recorder, _, (zero, one) = surface
    zero.feed(b"name? ")
    one.feed(b"name? ")
    now = time.monotonic()
    zero.tick(now)
    assert recorder.data == b""
    for stream in (zero, one):
        stream.tick(now + 1)
    assert recorder.data == (b"[rank 0] name? " if kind == "terminal" else b"")
    zero.feed(b"yes\n")
    assert recorder.data == b"[rank 0] name? yes\n"


def test_endless_lines_are_cut(surface):
    _, recorder, _, (_, one) = surface
    for _ in range(40):
        one.feed(b"x" * 65536)
    assert recorder.data.count(b"\n") >= 2
    assert len(one._pending) <= 1 << 20


def test_a_full_pipe_does_not_block():
    reader, writer = os.pipe()
    output = Output()
    payload = os.urandom(1 << 21)
    output.put(writer, payload)  # comes back, though nobody reads
    assert output.is_full
    received = b""
    while len(received) < len(payload):
        received += os.read(reader, 1 << 16)
        output.flush()
    assert received == payload
    assert not output.is_full and not output._queue
    os.close(reader)
    assert not output.is_broken
    output.put(writer, b"more")
    assert output.is_broken
    output.put(writer, b"more")
    assert not output._queue
    os.close(writer)


def test_finishing_gives_up_on_a_stuck_reader_and_keeps_the_other():
    (stuck_reader, stuck), (reader, writer) = os.pipe(), os.pipe()
    output = Output()
    output.put(stuck, b"x" * (1 << 20))
    output.put(writer, b"summary")
    output.finish(0.1)
    assert os.read(reader, 100) == b"summary"
    for end in (stuck_reader, stuck, reader, writer):
        os.close(end)


def test_a_full_disk_loses_lines_only(monkeypatch):
    written, write = [], os.write
    is_full = True

    def write_or_fail(descriptor, data):
        if is_full and descriptor == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append((descriptor, bytes(data)))
        return len(data)

    monkeypatch.setattr("deepspeed.launcher.screen.os.write", write_or_fail)
    monkeypatch.setattr("deepspeed.launcher.screen.select.select", lambda _, ready, *rest: ([], ready, []))
    output = Output()
    for line in (b"one\n", b"two\n"):
        output.put(1, line)
    is_full = False
    output.put(1, b"three\n")
    monkeypatch.setattr("deepspeed.launcher.screen.os.write", write)
    sentence = b"deepspeed: cannot write to standard output: No space left on device; lines are lost until it can be "
    assert written == [(2, sentence + b"written\n"), (1, b"three\n")]
    assert not output._queue and output._queued == 0 and not output.is_broken


def test_warnings_have_color_on_a_terminal_only(surface, monkeypatch):
    kind, recorder, _, (_, one) = surface
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    one.feed(b"[12:00:00] [WARNING] careful\n[12:00:00] [INFO] fine\n")
    colored = b"\x1b[33m[WARNING]\x1b[0m" if kind == "terminal" else b"[WARNING]"
    assert recorder.data == b"[rank 1] [12:00:00] " + colored + b" careful\n[rank 1] [12:00:00] [INFO] fine\n"
    recorder.data = b""
    monkeypatch.setenv("NO_COLOR", "1")
    one.feed(b"[12:00:00] [ERROR] no\n")
    assert recorder.data == b"[rank 1] [12:00:00] [ERROR] no\n"


def test_lines_that_name_the_rank_get_no_second_label(surface):
    _, recorder, _, (_, one) = surface
    for line in (b"[rank 1] [2026-11-28 12:00:00] [INFO] fine\n", b'{"time": "2026-11-28T12:00:00", "rank": 1}\n'):
        one.feed(line)
        assert recorder.data == line
        recorder.data = b""
    one.feed(b"[rank 0] lost\n")
    assert recorder.data == b"[rank 1] [rank 0] lost\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_so_do_those_of_the_process_itself(is_terminal, monkeypatch):
    class Stream(io.StringIO):
        def isatty(self):
            return is_terminal

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stderr", stream := Stream())
    logger.error("no")
    assert ("\x1b[31m[ERROR]\x1b[0m no\n" in stream.getvalue()) == is_terminal and " no\n" in stream.getvalue()
