"""examples/needle: a model trained on texts that two ranks share finds the word that matters."""

import re

import pytest

from tests.examples.support import Desk, commands_of


@pytest.mark.slow
def test_needles_are_found(tmp_path):
    desk = Desk(tmp_path, "needle")
    line = "deepspeed --num_gpus 2 train.py"
    assert line in commands_of("needle")
    shown = desk.run(f"{line} --tokens 64 --steps 150")
    found = re.search(r"needles found: (\d+) of 64, in texts of 64 words of which a rank has 32", shown)
    assert found and int(found[1]) >= 48, shown
