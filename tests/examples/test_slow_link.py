"""The example on a slow link, with few updates: both ways train alike."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "slow_link.py"


@pytest.mark.slow
def test_both_ways_train() -> None:
    text = subprocess.run(
        [sys.executable, str(EXAMPLE), "--updates", "8"], capture_output=True, text=True, check=True, timeout=300
    ).stdout
    losses = {way: float(loss) for way, loss in re.findall(r"^(plain|int4) .* last loss ([\d.]+)$", text, re.MULTILINE)}
    assert losses.keys() == {"plain", "int4"}, text
    assert abs(losses["plain"] - losses["int4"]) < 0.05 * losses["plain"]
