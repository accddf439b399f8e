"""examples/pipeline: the network on two stages, and the language model on stages and tensor ranks."""

import re

import pytest

from tests.examples.support import Desk, commands_of


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path, "pipeline")


@pytest.mark.slow
def test_alexnet(desk):
    line = "deepspeed --num_gpus 2 alexnet.py --stages 2"
    assert line in commands_of("pipeline")
    shown = desk.run(f"{line} --steps 40")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d\.\d+), \d+% right", shown)]
    assert len(losses) == 2 and losses[1] < losses[0] and "evaluation: loss" in shown


@pytest.mark.slow
def test_gpt_on_three_axes(desk):
    line = "deepspeed --num_gpus 4 gpt.py --pipe 2 --tensor 2"
    assert line in commands_of("pipeline")
    losses = [float(loss) for loss in re.findall(r"step \d+: loss (\d\.\d+)", desk.run(line))]
    assert len(losses) == 3 and losses[-1] < 1.5
