"""The level of the package logger by the environment."""

from __future__ import annotations

import logging

import pytest

from deepspeed.logging import logger, set_default_log_level


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
