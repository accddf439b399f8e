"""examples/experts: both models learn, and the curves and loads are drawn."""

import re
import xml.dom.minidom

import pytest

from tests.examples.support import Desk, commands_of


@pytest.mark.slow
def test_curves_and_loads_are_drawn(tmp_path):
    desk = Desk(tmp_path, "experts")
    line = "deepspeed --num_gpus 2 train.py"
    assert line in commands_of("experts")
    shown = desk.run(f"{line} --steps 30 --picture {tmp_path / 'losses.svg'}")
    rows = re.findall(r"^(?:\[rank 0\] )?(dense|8 experts): loss (\d\.\d+) at first, (\d\.\d+) after 30", shown, re.M)
    assert [name for name, _, _ in rows] == ["dense", "8 experts"]
    assert all(float(last) < float(first) for _, first, last in rows)
    for picture in ("losses.svg", "loads.svg"):
        xml.dom.minidom.parse(str(tmp_path / picture))
