"""The package logger: its level and format by the environment, and the handlers of the program."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import subprocess
import sys
from datetime import datetime

import pytest

from deepspeed.logging import log_dist, logger, name_source, set_default_log_level

_DATE = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\]"


@pytest.mark.parametrize(
    ("text", "level", "lines"),
    [("Error", logging.ERROR, 0), ("", logging.INFO, 0), ("quiet", logging.INFO, 1)],
)
def test_an_unknown_level_is_named(text, level, lines, monkeypatch, capsys):
    monkeypatch.setenv("DEEPSPEED_LOG_LEVEL", text)
    before = logger.level
    try:
        set_default_log_level()
        assert logger.level == level
    finally:
        logger.setLevel(before)
    sentence = (
        "DEEPSPEED_LOG_LEVEL=quiet: expected one of debug, info, warning, error, critical; info is used. Correct it"
    )
    assert capsys.readouterr().err.count(sentence) == lines


@pytest.fixture
def rank_3(monkeypatch):
    monkeypatch.setenv("RANK", "3")


def test_a_line_that_goes_to_a_file_has_date_and_rank_once(rank_3, capsys):
    log_dist("ready", ranks=[-1])
    logger.warning("100 %d", 7)
    assert re.fullmatch(
        rf"\[rank 3\] {_DATE} \[INFO\] ready\n\[rank 3\] {_DATE} \[WARNING\] 100 7\n", capsys.readouterr().err
    )


def test_a_command_is_named_instead_of_a_rank(capsys):
    name_source("ds_plan")
    try:
        logger.info("ready")
    finally:
        name_source(None)
    assert re.fullmatch(rf"\[ds_plan\] {_DATE} \[INFO\] ready\n", capsys.readouterr().err)


def test_a_line_on_a_terminal_is_short():
    here, there = pty.openpty()
    script = "from deepspeed.logging import log_dist; log_dist('ready', ranks=[-1])"
    environment = {**os.environ, "RANK": "3", "TERM": "dumb"}
    with os.fdopen(there, "wb") as stream:
        subprocess.run([sys.executable, "-c", script], stderr=stream, env=environment, timeout=60, check=True)
    assert re.fullmatch(rb"\[\d\d:\d\d:\d\d\] \[INFO\] \[rank 3\] ready\r\n", os.read(here, 1000))
    os.close(here)


def test_lines_of_json(rank_3, monkeypatch, capsys):
    monkeypatch.setenv("DEEPSPEED_LOG_FORMAT", "json")
    log_dist("two\nlines", ranks=[-1])
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"level": "INFO", "rank": 3, "source": "rank 3", "message": "two\nlines"}
    assert second["message"] == "failed" and second["exception"].endswith("ValueError: why")


def test_a_format_of_the_program(rank_3, monkeypatch, capsys):
    monkeypatch.setenv("DEEPSPEED_LOG_FORMAT", "%(rank)s|%(levelname)s|%(message)s")
    set_default_log_level()
    logger.info("ready")
    assert capsys.readouterr().err == "3|INFO|ready\n"


@pytest.mark.parametrize("form", ["%(nothing)s", "no place", "%(rank)q"])
def test_an_unknown_format_is_named_once(form, monkeypatch, capsys):
    monkeypatch.setenv("DEEPSPEED_LOG_FORMAT", form)
    set_default_log_level()
    logger.info("ready")
    first, second = capsys.readouterr().err.splitlines()
    assert f"DEEPSPEED_LOG_FORMAT={form}: expected terminal, file, json, or" in first
    assert re.fullmatch(rf"\[rank 0\] {_DATE} \[INFO\] ready", second)


@pytest.mark.parametrize("is_console", [True, False])
def test_handlers_of_the_root_logger_get_every_line(is_console, capsys):
    text = io.StringIO()
    handler = logging.StreamHandler(sys.stderr if is_console else text)
    handler.setFormatter(logging.Formatter("program: %(message)s"))
    logging.getLogger().addHandler(handler)
    try:
        logger.info("ready")
    finally:
        logging.getLogger().removeHandler(handler)
    err = capsys.readouterr().err
    if is_console:
        assert err == "program: ready\n", "one line on the console, in the program's format"
    else:
        assert text.getvalue() == "program: ready\n" and err.endswith("[INFO] ready\n")
