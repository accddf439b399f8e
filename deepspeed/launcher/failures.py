"""Finds the rank that failed first and why, and shortens the error output of the others.

When one rank fails, its peers fail a moment later because it is gone, often with longer tracebacks than the cause. So a
traceback is held back until it is known whether its rank ends because of it and whether another rank failed before: the
first traceback is then shown whole, each other one in one line.
"""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.exit_notes import LOST_PEER
from deepspeed.launcher.screen import RankStream, Screen
from deepspeed.logging import printable

# If the rank still runs after this time, the traceback was only logged, and is shown.
HOLD_SECONDS = 3.0
# If several ranks have one at once, a failure is probably spreading; on a busy machine ending takes seconds.
HOLD_SECONDS_OF_SEVERAL = 15.0
# The start of a report by Python, faulthandler or the C++ runtime.
_REPORT_START = re.compile(
    rb"Traceback \(most recent call last\):|Fatal Python error:|terminate called|"
    rb"^(\[rank\d+\]:)?\s{2}File \".*\", line \d+"
)
# torch prefixes each line of a traceback with the rank once its process group exists.
_TORCH_LABEL = re.compile(rb"^\[rank\d+\]:\s?")
_FRAME = re.compile(rb"^\s*File \"(?P<file>.*)\", line (?P<line>\d+)(, in (?P<function>.*))?")
_EXCEPTION = re.compile(rb"^[A-Za-z_][\w.<>]*(:|$)")  # a class of a function: ``f.<locals>.Error``
_GROUP_START = b"  + Exception Group Traceback"
_GROUP_MARGIN = re.compile(rb"^  [|+] ")  # before each line of the outermost group, up to its exception
_MORE = re.compile(rb"^[ \t]+[^ \t]")  # continuation lines of an error with several problems
_MOST_MORE = 40
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))).encode() + b"/"
_TAIL_LINES = 400
_CLIPPED_BYTES = 240
_CLIPPED_CAUSE_BYTES = 4000
# A traceback older than this when its rank ends is not the reason: the rank survived it.
_FRESH_SECONDS = 30.0
# The line above the traceback of an exception that Python could not raise.
_IGNORED = b"Exception ignored "
# A native error within this many lines after an exception happened while the interpreter was shutting down.
_SHUTDOWN_LINES = 4
FAILURE_FILE_VARIABLE = "DS_FAILURE_FILE"
_SAGEMAKER = Path("/opt/ml/output")


class ErrorStream(RankStream):
    """The stderr of one rank, with tracebacks held back until the first failure is known."""

    def __init__(self, rank: int, label: bytes, screen: Screen) -> None:
        super().__init__(rank, 2, label, screen)
        # when the newest traceback started (monotonic seconds); None if there was none
        self.report_time: float | None = None
        self.hold_seconds = HOLD_SECONDS  # how long a traceback is held while its rank still runs
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._held_lines: list[bytes] | None = None
        self._hold_for_good = False

    @property
    def is_reporting(self) -> bool:
        """Returns whether a traceback is being held back."""
        return self._held_lines is not None

    def emit(self, text: bytes) -> None:
        """Shows a line, or holds it."""
        if self.label:  # the launcher's own line has the same label
            text = _TORCH_LABEL.sub(b"", text)
        self._tail.append(text)
        if _REPORT_START.search(text):
            if self._held_lines is None:
                self.report_time = time.monotonic()
                self._held_lines = []
            elif b"Traceback" in text and not _is_chained(self._held_lines):
                self.report_time = time.monotonic()
        if self._held_lines is None:
            super().emit(text)
        else:
            self._held_lines.append(text)

    def emit_partial(self, text: bytes) -> None:
        """Shows an unfinished line unless lines before it are held."""
        if self._held_lines is None:
            super().emit_partial(text)

    def tick(self, now: float) -> None:
        """Shows lines held too long: the rank has survived the error."""
        super().tick(now)
        if self._held_lines is not None and not self._hold_for_good and self.report_time is not None:
            if now - self.report_time > self.hold_seconds:
                self.release()

    def release(self) -> None:
        """Shows all held lines, and from now on every line at once."""
        lines, self._held_lines, self._hold_for_good = self._held_lines or [], None, False
        for text in lines:
            super().emit(text)

    def hold(self) -> None:
        """Holds all lines from now on until :meth:`release` or :meth:`shorten`: another rank has failed."""
        self._held_lines = self._held_lines or []
        self._hold_for_good = True

    def shorten(self, reason: str, shown: bytes = b"") -> None:
        """Shows held lines, with a traceback reduced to its exception (unless shown already), place and ``reason``."""
        lines, self._held_lines, self._hold_for_good = self._held_lines or [], None, False
        start = next((number for number, text in enumerate(lines) if _REPORT_START.search(text)), len(lines))
        for text in lines[:start]:
            super().emit(text)
        if report := lines[start:]:
            what = describe(report) or Report(report[-1], None)
            place = f"at {what.place}; " if what.place else ""
            if what.exception.startswith(b"KeyboardInterrupt"):
                return  # after Ctrl-C the user needs no report
            note = f" ({place}{reason}; {len(report)} lines shortened to this one)"
            words = b"the same error" if what.exception == shown else _clip(what.exception.split(b"\n")[0])
            super().emit(words + note.encode())

    def report(self) -> Report | None:
        """Returns the newest traceback among the last lines; None if there is none."""
        return describe(list(self._tail))

    def last_line(self) -> bytes:
        """Returns the last line that is not blank."""
        return next((text for text in reversed(self._tail) if text.strip()), b"")


def _is_chained(lines: list[bytes]) -> bool:
    """Returns whether a traceback that starts now continues the one held ("During handling of ...")."""
    above = b" ".join(lines[-4:])
    return b"During handling of" in above or b"The above exception was" in above


@dataclass(frozen=True)
class Report:
    """The parsed content of a traceback."""

    exception: bytes  # its exception line, such as ``b"ValueError: no"``, and the indented lines that continue it
    # file, line and function of its innermost frame outside installed packages; if none is, of its innermost
    place: str | None
    is_native: bool = False  # whether it is an error of native code, not a Python exception


def _clip(text: bytes, most: int = _CLIPPED_BYTES) -> bytes:
    return text if len(text) <= most else text[:most] + b"..."


def describe(lines: list[bytes]) -> Report | None:
    """Returns the last exception in ``lines`` and where it was raised.

    The exception is the first line after the frames that is not indented; more lines of the same message may follow.
    Exceptions that Python ignored (in ``__del__``, in a callback) are passed over: they end no process.
    An error of native code right after a Python exception is a consequence (of threads still running when the
    interpreter ends), so the exception is returned.
    """
    found: Report | None = None
    found_at = 0
    inside = is_ignored = in_group = False
    ignored_at: int | None = None  # number of the last line that announces an ignored exception
    frame: str | None = None
    own_frame: str | None = None  # the innermost line of the user's code
    for number, raw in enumerate(lines):
        text = _TORCH_LABEL.sub(b"", raw)
        in_group = in_group or text.startswith(_GROUP_START)
        if in_group:
            text = _GROUP_MARGIN.sub(b"", text)
        if text.startswith(_IGNORED):
            ignored_at = number
        elif b"Traceback (most recent call last):" in text:
            inside, frame, own_frame = True, None, None
            is_ignored = ignored_at == number - 1  # some are announced without a traceback
        elif match := _FRAME.match(text):
            where = f"{os.path.basename(match['file'].decode(errors='replace'))}:{int(match['line'])}"
            function = match["function"]
            frame = f"{where} in {function.decode(errors='replace')}" if function else where
            own_frame = own_frame if _is_library(match["file"]) else frame
            inside = True
        elif text.startswith((b"Fatal Python error:", b"terminate called")):
            if found is None or number - found_at > _SHUTDOWN_LINES:
                found = Report(text.strip(), None, is_native=True)
        elif inside and text[:1].strip() and _EXCEPTION.match(text):
            inside = in_group = False
            if not is_ignored:
                found, found_at = Report(text.strip(), own_frame or frame), number
        elif found is not None and not inside and not found.is_native and _MORE.match(text):
            count = found.exception.count(b"\n") + 1
            if number == found_at + count and count <= _MOST_MORE:  # the lines right below it
                found = dataclasses.replace(found, exception=found.exception + b"\n" + text.rstrip())
    return found


def _is_library(file: bytes) -> bool:
    return file.startswith((b"<", _PACKAGE)) or b"/site-packages/" in file or b"/dist-packages/" in file


@dataclass
class RankState:
    """The launcher's record of one rank."""

    rank: int  # global rank
    errors: ErrorStream = field(repr=False)  # its stderr
    pid: int | None = None  # process id; None before it was started
    status: int | None = None  # as from ``subprocess``: exit code, or minus a signal's number; None while it runs
    ended: float = 0.0  # when it ended (monotonic seconds)
    refusal: str | None = None  # why it could not be started

    @property
    def has_failed(self) -> bool:
        """Returns whether it ended with an error or could not be started."""
        return self.refusal is not None or (self.status is not None and self.status != 0)

    @property
    def report(self) -> Report | None:
        """Returns the traceback with which it ended; None: it had none."""
        started = self.errors.report_time
        return self.errors.report() if started is not None and self.ended - started < _FRESH_SECONDS else None

    @property
    def failure_time(self) -> float:
        """Returns when it failed: at the start of its traceback, which may be seconds before the end of its process."""
        started = self.errors.report_time
        return self.ended if started is None or self.report is None else min(started, self.ended)

    @property
    def lost_a_peer(self) -> bool:
        """Returns whether its error is probably a consequence of another rank's end."""
        report = self.report
        return report is not None and LOST_PEER.search(report.exception.split(b"\n")[0]) is not None

    def began_before(self, other: Failure) -> bool:
        """Returns whether a traceback of the rank is held back that started before ``other``."""
        started = self.errors.report_time
        return self.errors.is_reporting and started is not None and started < other.time

    @property
    def exit_code(self) -> int:
        """Returns the exit code as a shell shows it: 128 + n for signal n."""
        if self.refusal is not None:
            return 127
        status = self.status or 0
        return status if status >= 0 else 128 - status

    def failure(self, name: str, host: str) -> Failure:
        """Returns the failure for the launchers of all machines; messages call the rank ``name``."""
        return Failure(
            f"{name} failed first on host {host}: {self.cause()}",
            self.exit_code,
            rank=self.rank,
            lost_a_peer=self.lost_a_peer,
            time=self.failure_time,
        )

    def cause(self) -> str:
        """Returns why it failed; lines that continue an error follow below."""
        if self.refusal is not None:
            return f"could not be started: {self.refusal}"
        report = self.report
        words = _clip(report.exception, _CLIPPED_CAUSE_BYTES).decode(errors="replace") if report else ""
        words, newline, rest = words.partition("\n")
        if report and report.place:
            words += f" ({report.place})"
        if self.status is not None and self.status < 0:
            end = f"ended by {signal_cause(-self.status)}"
            if report is None:
                return end
            return f"{end} [{words}]" if report.is_native else f"{words}; then {end}{newline}{rest}"
        if report:
            return words + newline + rest
        last = self.errors.last_line().decode(errors="replace").strip()
        return f"exited without a traceback; its last error line: {last}" if last else "exited without an error message"


@dataclass(frozen=True)
class Failure:
    """Describes the failure that ended a run; all machines of the run report it."""

    sentence: str  # who failed, where and why
    exit_code: int  # exit code of every launcher of the run
    rank: int = -1  # global rank; -1 if it was no rank
    lost_a_peer: bool = False  # whether it looks like the consequence of another failure
    time: float = field(default_factory=time.monotonic)  # when it happened, in monotonic seconds of this machine
    # reported by another machine, as no launcher was left on the machine of the failure
    was_seen_from_outside: bool = False

    def to_message(self) -> dict[str, Any]:
        """Returns a dict for the launchers of other machines, whose clocks differ: the age instead of the time."""
        message = dataclasses.asdict(self)
        message["age"] = time.monotonic() - message.pop("time")
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Failure:
        """Reads the message of another launcher's :meth:`to_message`, in the time of this machine.

        Raises:
            ValueError: A value is missing or has a wrong type.
        """
        sentence, code, rank, age = (message.get(name) for name in ("sentence", "exit_code", "rank", "age"))
        flags = [message.get(name) for name in ("lost_a_peer", "was_seen_from_outside")]
        if not isinstance(sentence, str) or type(code) is not int or not 0 <= code <= 255 or type(rank) is not int:
            raise ValueError("expected a failure with sentence, exit_code (0 to 255) and rank")
        if (
            not isinstance(age, (int, float))
            or not 0 <= age < float("inf")
            or not all(type(flag) is bool for flag in flags)
        ):
            raise ValueError("expected a failure with age, lost_a_peer and was_seen_from_outside")
        lost, outside = map(bool, flags)
        return cls(printable(sentence), code, rank, lost, time.monotonic() - age, outside)


def first_failure(failed: Iterable[Failure]) -> Failure:
    """Returns the failure to blame: the earliest, or the earliest that did not just lose a peer if there is one."""
    return min(failed, key=lambda failure: (failure.lost_a_peer, failure.time))


_SIGNAL_CAUSES = {
    signal.SIGKILL: "killed from outside; usually the system ran out of memory (see dmesg, or the container's limit)",
    signal.SIGSEGV: "segmentation fault in native code; PYTHONFAULTHANDLER=1 shows the Python line it came from",
    signal.SIGABRT: "native code gave up; its reason is in the lines above",
    signal.SIGILL: "illegal instruction: a library was built for a newer processor",
    signal.SIGFPE: "arithmetic error in native code",
    signal.SIGTERM: "terminated from outside, by a scheduler, an administrator or another program",
    signal.SIGINT: "interrupted",
    signal.SIGHUP: "its terminal or connection was closed",
    signal.SIGPIPE: "wrote to a pipe whose reader has gone",
    signal.SIGXCPU: "used more processor time than its limit (ulimit -t)",
    signal.SIGXFSZ: "wrote a file larger than its limit (ulimit -f)",
}


def signal_cause(number: int) -> str:
    """Names a signal and its likely cause."""
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    if number == signal.SIGBUS:
        return f"signal {number} (SIGBUS): {_bus_error_cause()}"
    cause = _SIGNAL_CAUSES.get(signal.Signals(number))
    return f"signal {number} ({name}): {cause}" if cause else f"signal {number} ({name})"


def _bus_error_cause() -> str:
    advice = "usually /dev/shm is full: give it more room (docker: --shm-size) or use fewer data-loader workers"
    if not os.path.isdir("/dev/shm"):
        return advice
    shm = os.statvfs("/dev/shm")
    free, total = shm.f_bavail * shm.f_frsize / 2**20, shm.f_blocks * shm.f_frsize / 2**20
    return f"{advice}; now {free:.0f} of {total:.0f} MiB are free"


def find_failure_file(environ: Mapping[str, str]) -> Path | None:
    """Returns where to write why a run has failed; None if nothing reads such a file.

    ``DS_FAILURE_FILE`` names it (in a pod: ``/dev/termination-log``). On SageMaker it is ``/opt/ml/output/failure``.
    """
    if environ.get(FAILURE_FILE_VARIABLE):
        return Path(environ[FAILURE_FILE_VARIABLE])
    if environ.get("SM_HOSTS") and _SAGEMAKER.is_dir():
        return _SAGEMAKER / "failure"
    return None


def write_failure(path: Path, lines: Sequence[str]) -> str | None:
    """Writes why the run has failed, over an earlier reason; returns why it cannot, None if it did."""
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return (
            f"{FAILURE_FILE_VARIABLE}: cannot write the reason of the failure to {path}: {error}; name a file in a "
            "folder"
        )
    return None
