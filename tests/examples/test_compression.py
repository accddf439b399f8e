"""examples/compression: a model that is right as often when half of it is gone and the rest lies in 8 bits."""

import re

import pytest

from tests.examples.support import Desk, commands_of


@pytest.mark.slow
def test_the_model_gets_smaller_and_stays_right(tmp_path):
    desk = Desk(tmp_path, "compression")
    line = "deepspeed --num_gpus 2 train.py"
    assert line in commands_of("compression")
    shown = desk.run(f"{line} --steps 300")
    found = {
        name: (float(right), int(size))
        for name, right, size in re.findall(r"(whole|compressed|clean): right in ([\d.]+)%, (\d+) KB", shown)
    }
    assert found["clean"][0] > 90, shown
    assert abs(found["clean"][0] - found["compressed"][0]) <= 0.2, shown
    assert found["clean"][1] < 0.2 * found["whole"][1], shown
