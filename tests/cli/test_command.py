"""What all commands do with mistakes, interrupts and readers that stop reading."""

import errno
import io
import os
import resource
import runpy
import sys
from contextlib import contextmanager, redirect_stdout

import pytest

from deepspeed.cli import bench, report
from deepspeed.cli.command import run_command
from deepspeed.config import __main__ as config_command
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher import runner
from deepspeed.missing_features import __main__ as missing_features


@contextmanager
def closed_pipe():
    """Replaces standard output by a pipe whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output, redirect_stdout(output):  # closing raises if the pipe is still there
        yield


@pytest.mark.parametrize(("code", "expected"), [(None, 1), (0, 1), (3, 3)])
def test_a_closed_pipe_ends_a_command_without_a_traceback(code, expected):
    def work():
        print("lines")
        return code

    with closed_pipe(), pytest.raises(SystemExit) as stop:
        run_command("ds_x", work, None)
    assert stop.value.code == expected


def test_so_does_one_that_the_help_is_written_to():
    def work():
        print("usage: ds_x")
        sys.exit(0)

    with closed_pipe(), pytest.raises(SystemExit) as stop:
        run_command("ds_x", work, None)
    assert stop.value.code == 1


def test_the_schema_goes_to_a_closed_pipe(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["config", "schema"])
    with closed_pipe(), pytest.raises(SystemExit) as stop:
        config_command.run()
    assert stop.value.code == 1


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_page_of_missing_features_goes_to_a_closed_pipe(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["missing_features"])
    with closed_pipe(), pytest.raises(SystemExit) as stop:
        runpy.run_module("deepspeed.missing_features", run_name="__main__")
    assert stop.value.code == 1


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path):
    with pytest.raises(SystemExit, match="cannot be written: Is a directory; give the name of another file"):
        missing_features.main([str(tmp_path)])


@contextmanager
def full_file(path):
    """Replaces standard output by a file that may not grow."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("w") as output, redirect_stdout(output):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("length", [1, 100_000])  # the longer text is written at once, the other one by the flush
def test_a_full_disk_is_one_sentence(tmp_path, length):
    with full_file(tmp_path / "output"):
        with pytest.raises(SystemExit, match="^ds_x: cannot write the output: File too large; make room"):
            run_command("ds_x", lambda: print("x" * length), None)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPIPE])
def test_another_file_that_cannot_be_written_keeps_its_error_and_the_output(tmp_path, number):
    def work():
        print("lines")
        raise OSError(number, "of another file")

    path = tmp_path / "output"
    with path.open("w") as output, redirect_stdout(output), pytest.raises(OSError, match="of another file"):
        run_command("ds_x", work, None)
    assert path.read_text() == "lines\n"


def test_characters_that_a_terminal_lacks_are_replaced():
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding="ascii") as output, redirect_stdout(output):
        run_command("ds_x", lambda: print("caf\xe9 \u2026"), None)
        assert raw.getvalue() == b"caf? ?\n"


def test_a_closed_output_and_one_that_ranks_inherit_stay_as_they_are(monkeypatch):
    with io.TextIOWrapper(io.BytesIO(), encoding="ascii") as output, redirect_stdout(output):
        run_command("ds_x", lambda: None, None, keeps_output=True)
        assert output.errors == "strict"
    monkeypatch.setattr(sys, "stdout", None)
    run_command("ds_x", lambda: None, None)


def test_an_interrupt_ends_a_report_as_a_shell_does(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "collect", interrupt)
    monkeypatch.setattr(sys, "argv", ["ds_report"])
    with pytest.raises(SystemExit) as stop:
        report.main()
    assert stop.value.code == 130


def test_a_launcher_that_refuses_is_one_sentence_of_the_benchmark(monkeypatch):
    def refuse(args):
        raise DeepSpeedError("there is no host file")

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(runner, "main", refuse)
    monkeypatch.setattr(sys, "argv", ["ds_bench", "--hostfile", "nowhere"])
    with pytest.raises(SystemExit, match="^ds_bench: there is no host file$"):
        bench.main()
