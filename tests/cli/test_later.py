"""Installed commands that come later: one sentence, exit code 1."""

import sys

import pytest

from deepspeed.cli import later


@pytest.mark.parametrize("command", ["ds_bench", "ds_nvme_tune"])
def test_one_sentence(monkeypatch, command):
    monkeypatch.setattr(sys, "argv", [f"/some/bin/{command}", "--io_size=1"])
    with pytest.raises(SystemExit) as stop:
        later.main()
    # A text as the code is printed to stderr by the interpreter, which then exits with 1.
    assert stop.value.code.startswith(f"{command}: comes with a later release (")
    assert "\n" not in stop.value.code and "this command" not in stop.value.code
