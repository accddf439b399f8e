"""The command that shows schedules, and its pictures."""

from xml.etree import ElementTree

import pytest

from deepspeed.parallel.pipe import show
from deepspeed.parallel.pipe.schedule import make_schedule
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.parallel.pipe.show import lines


def test_all_schedules_are_compared(capsys):
    assert show.main(["--stages", "4", "--micro-batches", "8"]) == 0
    rows = {line.split()[1]: line.split()[3:-1:2] for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert rows["1f1b"] == ["1", "1320", "27.3", "4", "1", "16"] or rows["1f1b"][:3] == ["1", "1320", "27.3"]
    assert [rows[name][1] for name in ("gpipe", "interleaved", "zb-h1", "zbv")] == ["1320", "1140", "1080", "1020"]


def test_one_schedule_is_shown_step_by_step(capsys):
    command = ["--schedule", "1f1b", "--stages", "2", "--micro-batches", "3", "--backward", "40", "--weight", "20"]
    assert show.main([*command, "--instructions", "1"]) == 0
    out = capsys.readouterr().out
    assert "stage  0 012a.b.c" in out and "stage  1 .0a1b2c." in out
    assert "RecvActivation(buffer_id=0, micro_batch=2, chunk=1, peer=0)" in out and "OptimizerStep()" in out


def test_a_line_has_the_requested_width():
    timeline = simulate(make_schedule("zbv", 4, 12), Times())
    assert {len(line) for line in lines(timeline, 30)} == {30}
    assert lines(simulate(make_schedule("zb-h1", 1, 2), Times(1, 2, 1)), 80) == ["0aA1bB"]


def test_a_picture_has_a_bar_for_each_computation(tmp_path):
    path = tmp_path / "timeline.svg"
    assert show.main(["--schedule", "zbv", "--stages", "3", "--micro-batches", "5", "--picture", str(path)]) == 0
    groups = ElementTree.parse(path).getroot().findall("{http://www.w3.org/2000/svg}g")
    assert len(groups) == 3 * 2 * 5 * 3
    assert groups[0][0].text == "forward of micro-batch 0, chunk 0"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--schedule", "1f1b", "--num-chunks", "2"], "has one chunk per stage and num_chunks is 2"),
        (["--schedule", "1f1b", "--instructions", "4"], "stage_id from 0 to below stages"),
        (["--instructions", "0"], "give --schedule too"),
        (["--weight", "90"], "weight a part of backward"),
        (["--micro-batches", "0"], "a step of 0 micro-batches"),
        (["--picture", "no/such/folder.svg"], "cannot be written"),
    ],
)
def test_what_is_not_possible_is_refused_in_a_sentence(args, message, capsys):
    assert show.main(args) == 2
    assert message in capsys.readouterr().err
