"""``benchmarks/gpu.py`` in its dry mode: every part runs, and prints what it found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.project.graph import ROOT


def _run(folder, parts: str, cells: str = "") -> dict[str, dict]:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--dry", "--parts", parts, "--out", str(folder)]
    command += ["--cells", cells]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    found = {letter: json.loads((folder / f"{letter}.json").read_text()) for letter in parts}
    problems = [problem for content in found.values() for problem in content["problems"]]
    assert (done.returncode, problems) == (0, []), done.stderr
    return found


def test_operations(tmp_path):
    assert [table["title"] for table in _run(tmp_path, "E")["E"]["tables"]][0] == "AdamW over one flat run"


def test_a_simulated_rank(tmp_path):
    (table,) = _run(tmp_path, "C", "ours-3 on tiny")["C"]["tables"]
    ((who, milliseconds, *_),) = table["rows"]
    assert who == "ours-3" and milliseconds > 0


@pytest.mark.slow
def test_simulated_ranks(tmp_path):
    (table,) = _run(tmp_path, "C")["C"]["tables"]
    assert [row[0] for row in table["rows"]] == ["ours-3", "fsdp2"]
    assert all(row[1] > 0 for row in table["rows"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", ["A", "B", "D", "F"])
def test_other_parts(part, tmp_path):
    assert _run(tmp_path, part)[part]["tables"]
