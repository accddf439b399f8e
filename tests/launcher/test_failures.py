"""Who is blamed, with which words, and what is held back meanwhile."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from deepspeed.exit_notes import ExitNotes
from deepspeed.launcher.failures import (
    HOLD_SECONDS,
    ErrorStream,
    Failure,
    RankState,
    describe,
    first_failure,
    signal_cause,
)
from deepspeed.launcher.local_run import LocalRun

TRACEBACK = [
    b"Traceback (most recent call last):",
    b'  File "/job/train.py", line 9, in main',
    b"    step()",
    b'  File "/lib/model.py", line 42, in step',
    b"    raise ValueError(x)",
    b"ValueError: bad shape:",
    b"  expected 3",
]


class Lines:
    """A screen that keeps lines."""

    def __init__(self):
        self.shown = []

    def line(self, source, descriptor, text):
        self.shown.append((source.rank, text))

    def open(self, source, descriptor, text):
        self.shown.append((source.rank, b"~" + text))


def make(count=2):
    screen = Lines()
    states = [RankState(rank, ErrorStream(rank, b"", screen), pid=100 + rank) for rank in range(count)]
    return screen, states


def feed(state, lines):
    state.errors.feed(b"\n".join(lines) + b"\n")


def fail(state, at, status=1):
    state.status, state.ended = status, at


@pytest.mark.parametrize(
    ("lines", "exception", "place"),
    [
        (TRACEBACK, b"ValueError: bad shape:\n  expected 3", "model.py:42 in step"),
        ([b"[rank1]: " + line for line in TRACEBACK], b"ValueError: bad shape:\n  expected 3", "model.py:42 in step"),
        (
            [b'  File "/job/t.py", line 3', b"    x = (", b"        ^", b"SyntaxError: '(' was never closed"],
            b"SyntaxError: '(' was never closed",
            "t.py:3",
        ),
        (
            [
                *TRACEBACK,
                b"",
                b"During handling of the above exception, another exception occurred:",
                b"",
                b"Traceback (most recent call last):",
                b'  File "/a/b.py", line 1, in f',
                b"    g()",
                b"KeyboardInterrupt",
            ],
            b"KeyboardInterrupt",
            "b.py:1 in f",
        ),
        (
            [
                *TRACEBACK[:1],
                b'  File "/job/train.py", line 7, in main',
                b'  File "/venv/lib/python3.11/site-packages/torch/nn/x.py", line 3, in call',
                b"a.b.ConfigError: cannot be used; 2 problems:",
                b"  1. lr: found -1",
                b"  2. stage: found 9",
            ],
            b"a.b.ConfigError: cannot be used; 2 problems:\n  1. lr: found -1\n  2. stage: found 9",
            "train.py:7 in main",
        ),
        (
            [b"Fatal Python error: Segmentation fault", b"", b'  File "x.py", line 1 in <module>'],
            b"Fatal Python error: Segmentation fault",
            None,
        ),
    ],
)
def test_describe(lines, exception, place):
    report = describe([b"some log", *lines])
    assert (report.exception, report.place) == (exception, place)


def test_describe_what_python_prints():
    code = (
        "class A:\n  def f(self):\n    class OwnError(Exception): ...\n    raise OwnError('boom')\n"
        "try: A().f()\nexcept Exception as error:\n  first = error\n"
    )
    ends = {"raise first": (b"A.f.<locals>.OwnError: boom", "<string>:4 in f")}
    if sys.version_info >= (3, 11):
        ends["raise ExceptionGroup('several', [ValueError(1), ExceptionGroup('more', [first])])"] = (
            b"ExceptionGroup: several (2 sub-exceptions)\n"
            b"  +-+---------------- 1 ----------------\n    | ValueError: 1",
            "<string>:8 in <module>",
        )
    for end, (exception, place) in ends.items():
        done = subprocess.run([sys.executable, "-c", code + end], capture_output=True, timeout=60)
        report = describe(done.stderr.splitlines())
        assert report is not None and report.place == place
        assert report.exception.removeprefix(b"__main__.").startswith(exception)  # Python 3.10 names the module


def test_a_native_error_at_shutdown_does_not_hide_the_exception():
    native = b"terminate called without an active exception"
    assert describe([*TRACEBACK, native]).exception == b"ValueError: bad shape:\n  expected 3"
    assert describe([*TRACEBACK, *[b"log"] * 5, native]).exception == native
    _, (zero, _) = make()
    feed(zero, [*TRACEBACK, native])
    fail(zero, time.monotonic(), -signal.SIGABRT)
    assert zero.cause().startswith("ValueError: bad shape: (model.py:42 in step); then ended by signal 6 (SIGABRT)")
    assert zero.exit_code == 134


def test_an_exception_that_python_ignored_is_no_cause():
    ignored = [
        b"Exception ignored in: <function Reader.__del__ at 0x7f8b>",
        *TRACEBACK[:1],
        b'  File "/job/reader.py", line 96, in close',
        b"AttributeError: 'NoneType' object has no attribute 'close'",
    ]
    broken = [b"Exception ignored in: <_io.TextIOWrapper name='<stdout>'>", b"BrokenPipeError: [Errno 32] Broken pipe"]
    assert describe(ignored) is None and describe(broken) is None
    for lines in ([*TRACEBACK, *ignored], [*ignored, *TRACEBACK], [*broken, *TRACEBACK]):
        assert describe(lines).exception == b"ValueError: bad shape:\n  expected 3"


def test_torchs_label_is_left_out_beside_ours():
    screen, (zero, _) = make()
    zero.errors.label = b"[rank 0] "
    feed(zero, [b"[rank0]: Traceback (most recent call last):", b"[rank0]: ValueError: x"])
    zero.errors.release()
    assert [text for _, text in screen.shown] == [b"Traceback (most recent call last):", b"ValueError: x"]


def test_nothing_to_describe():
    assert describe([b"ValueError: only a log line", b"other"]) is None


def test_ordinary_lines_pass_and_tracebacks_wait():
    screen, (zero, one) = make()
    feed(one, [b"warning"])
    feed(one, TRACEBACK)
    one.errors.feed(b"\rprogress")
    assert screen.shown == [(1, b"warning")]
    one.errors.release()
    assert [text for _, text in screen.shown] == [b"warning", *TRACEBACK]


def test_a_traceback_that_is_survived_is_shown():
    screen, (zero, _) = make()
    feed(zero, TRACEBACK)
    zero.errors.tick(time.monotonic() + HOLD_SECONDS - 1)
    assert screen.shown == []
    zero.errors.tick(time.monotonic() + HOLD_SECONDS + 1)
    feed(zero, [b"step 2"])
    assert [text for _, text in screen.shown] == [*TRACEBACK, b"step 2"]


def test_what_stands_above_is_not_repeated_and_ctrl_c_needs_no_traceback():
    screen, (one, two) = make()
    for state, words in ((one, TRACEBACK), (two, [*TRACEBACK[:-2], b"KeyboardInterrupt"])):
        state.errors.hold()
        feed(state, words)
        state.errors.shorten("stopped after the failure above", b"ValueError: bad shape:\n  expected 3")
    ((rank, text),) = screen.shown
    assert rank == 0 and text.startswith(b"the same error (at model.py:42 in step; stopped after the failure above")


def test_an_error_of_many_lines_is_whole_in_the_summary():
    _, (one, _) = make()
    lines = [*TRACEBACK[:-2], b"ConfigError: 3 problems:", *(b"  %d. " % n + b"x" * 300 for n in (1, 2, 3)), b"later"]
    feed(one, lines)
    fail(one, time.monotonic())
    cause = one.cause()
    assert cause.startswith("ConfigError: 3 problems: (model.py:42 in step)\n  1. xxx")
    assert cause.count("x" * 300) == 3 and "later" not in cause


def test_after_a_failure_elsewhere_everything_waits_and_is_shortened():
    screen, (_, one) = make()
    one.errors.hold()
    feed(one, [b"a log line", *TRACEBACK])
    one.errors.tick(time.monotonic() + 100)
    assert screen.shown == []
    one.errors.shorten("stopped after the failure above")
    (_, log), (_, short) = screen.shown
    assert log == b"a log line"
    assert short == (
        b"ValueError: bad shape: "
        b"(at model.py:42 in step; stopped after the failure above; 7 lines shortened to this one)"
    )


def test_the_earlier_traceback_is_to_blame_even_if_its_process_ends_later():
    _, (zero, one) = make()
    now = time.monotonic()
    for state, began, ended in ((one, now, now + 3), (zero, now + 1, now + 2)):
        feed(state, TRACEBACK)
        state.errors.report_time = began
        fail(state, ended)
    assert first_failure([zero.failure("zero", "a"), one.failure("one", "a")]).rank == one.rank


def test_who_lost_a_peer_is_not_to_blame():
    _, (zero, one) = make()
    now = time.monotonic()
    feed(zero, [*TRACEBACK[:-2], b"RuntimeError: [gloo/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:123"])
    zero.errors.report_time = now
    fail(zero, now + 1)
    fail(one, now + 2, status=-9)
    assert zero.lost_a_peer and not one.lost_a_peer
    assert first_failure([zero.failure("zero", "a"), one.failure("one", "a")]).rank == one.rank


def test_a_failure_on_another_machine_keeps_its_age():
    failure = Failure("rank 1 failed", 5, rank=1, lost_a_peer=True, time=time.monotonic() - 2)
    heard = Failure.from_message({"event": "failed", **failure.to_message()})
    assert (heard.sentence, heard.exit_code, heard.rank, heard.lost_a_peer) == ("rank 1 failed", 5, 1, True)
    assert abs(heard.time - failure.time) < 0.1


def test_an_old_traceback_is_not_the_cause():
    _, (zero, _) = make()
    feed(zero, [*TRACEBACK, b"last words"])
    zero.errors.report_time = 0.0
    fail(zero, 1000.0, status=3)
    assert zero.report is None and zero.failure_time == 1000.0
    assert zero.cause() == "exited without a traceback; its last error line: last words"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (3, 3, "exited without an error message"),
        (-signal.SIGKILL, 137, "ran out of memory"),
        (-signal.SIGBUS, 135, "/dev/shm is full"),
        (-signal.SIGSEGV, 139, "segmentation fault"),
        (-signal.SIGABRT, 134, "native code gave up"),
        (-signal.SIGTERM, 143, "terminated from outside"),
        (-signal.SIGUSR1, 128 + signal.SIGUSR1, "SIGUSR1"),
    ],
)
def test_exit_codes_and_causes(status, code, words):
    _, (zero, _) = make()
    fail(zero, 5.0, status)
    assert zero.exit_code == code
    assert words in zero.cause()


@pytest.mark.parametrize("status", [None, 0])
def test_a_rank_that_has_not_failed_has_exit_code_0(status):
    _, (zero, _) = make()
    zero.status = status
    assert not zero.has_failed and zero.exit_code == 0


def test_a_signal_names_the_report_too():
    _, (zero, _) = make()
    feed(zero, [b"terminate called after throwing an instance of 'c10::Error'"])
    fail(zero, time.monotonic(), -signal.SIGABRT)
    assert "signal 6 (SIGABRT)" in zero.cause() and "c10::Error" in zero.cause()


def test_a_program_that_could_not_be_started():
    _, (zero, _) = make()
    zero.refusal = "nothing: No such file or directory"
    assert zero.has_failed and zero.exit_code == 127
    assert zero.cause() == "could not be started: nothing: No such file or directory"


def test_real_time_signals_have_a_number():
    assert signal_cause(signal.SIGRTMIN + 3) == f"signal {signal.SIGRTMIN + 3}"


@pytest.mark.parametrize(("pid", "status", "noted"), [(4, -9, [4]), (4, 0, []), (None, 1, [])])
def test_how_a_process_failed_is_noted_for_the_other_ranks(pid, status, noted):
    notes = []
    _, (state,) = make(1)
    state.pid = pid
    run = SimpleNamespace(
        _states={0: state}, _drain=lambda rank: None, _notes=SimpleNamespace(note_exit=lambda *note: notes.append(note))
    )
    LocalRun._handle(run, {"event": "exited", "rank": 0, "status": status, "time": 1.0})
    assert [number for number, _ in notes] == noted and all("signal 9" in cause for _, cause in notes)


def test_a_note_that_cannot_be_written_does_not_end_the_launcher(tmp_path):
    """The disk may be full, which may be why the rank has failed."""
    lines, notes = [], ExitNotes(tmp_path)
    _, (state,) = make(1)
    state.pid = 4
    (tmp_path / f".exit-4.{os.getpid()}").mkdir()
    run = SimpleNamespace(_states={0: state}, _drain=lambda rank: None, _notes=notes, _print_line=lines.append)
    LocalRun._handle(run, {"event": "exited", "rank": 0, "status": 1, "time": 1.0})
    assert len(lines) == 1 and "why rank 0 has failed" in lines[0] and notes.cause_of(4) == ""


def test_notes_do_not_depend_on_the_encoding_of_the_locale(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from deepspeed.exit_notes import ExitNotes\n"
        "notes = ExitNotes(Path(sys.argv[1])); notes.note_exit(4, 'ValueError: \\u03b1 \\udce9')\n"
        "notes.run_report_missing(Path(os.fsdecode(b'/runs/\\xe9')))\n"
        "print(ascii(notes.cause_of(4)), ascii(str(notes.missing_run_report)))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "'ValueError: \\u03b1 ?' '/runs/\\udce9'\n", done.stderr
