"""The helper that runs scripts written for GPUs prints its usage."""

import subprocess
import sys
from pathlib import Path

import pytest

HELPER = Path(__file__).parents[2] / "examples" / "on_cpu.py"


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [(["--help"], 0, "examples/on_cpu.py SCRIPT"), ([], 2, "SCRIPT"), (["no.py"], 1, "there is no script no.py in ")],
)
def test_how_it_is_called(words, code, text):
    done = subprocess.run([sys.executable, str(HELPER), *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and text in done.stdout + done.stderr and "Traceback" not in done.stderr
