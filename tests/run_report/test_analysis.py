"""What is made of the lines of a run."""

from __future__ import annotations

import pytest

from deepspeed.errors import DeepSpeedError
from deepspeed.run_report.analysis import analyse
from deepspeed.run_report.run_data import read_run
from tests.run_report.runs import step_line, write_rank


def test_shares_add_up_and_name_the_axis(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, rank, [step_line(number) for number in range(1, 6)])
    found = analyse(read_run(tmp_path))
    assert sum(share.share for share in found.shares) == pytest.approx(1.0)
    assert {(s.phase, s.axis): round(s.seconds, 3) for s in found.shares} == {
        ("outside", ""): 0.6, ("forward", ""): 0.3, ("forward", "data"): 0.1,
    }  # fmt: skip
    assert (found.step_seconds, found.samples_per_second, found.tokens_per_second) == (1.0, 8.0, 256.0)
    assert found.advice[0].startswith("60% of the time lies between calls") and found.unfinished == ()


def test_the_rank_for_which_the_others_wait_is_named(tmp_path):
    for rank in range(3):
        forward, wait = (0.9, 0.0) if rank == 1 else (0.9, 0.4)
        write_rank(tmp_path, rank, [step_line(n, forward=forward, wait=wait) for n in range(1, 6)])
    found = analyse(read_run(tmp_path))
    assert [(slow.rank, slow.host, slow.phase) for slow in found.slow] == [(1, "node1", "forward")]
    assert found.slow[0].factor == pytest.approx(0.9 / 0.5)
    assert any("rank 1 (node1) takes 1.80 times as long" in text for text in found.advice)


def test_stages_of_a_pipeline_are_compared_with_their_like(tmp_path):
    for rank in range(4):
        write_rank(
            tmp_path, rank, [step_line(n, forward=0.2 + 0.5 * (rank // 2)) for n in range(1, 6)], stage=rank // 2
        )
    assert analyse(read_run(tmp_path)).slow == ()


def test_a_phase_too_short_to_matter_makes_no_rank_slow(tmp_path):
    for rank in range(3):
        line = step_line(1, forward=0.9, wait=0.0)
        line["phases"]["step"] = 1e-4 * (1 + rank)
        write_rank(tmp_path, rank, [line])
    assert analyse(read_run(tmp_path)).slow == ()


def test_a_step_that_ran_again_after_a_restart_counts_once(tmp_path):
    write_rank(tmp_path, 0, [step_line(1), step_line(2, seconds=9.0)], has_ended=False)
    write_rank(tmp_path, 0, [step_line(2), step_line(3)])
    run = read_run(tmp_path)
    assert run.step_numbers == [1, 2, 3] and run.first.steps[2]["seconds"] == 1.0 and len(run.first.starts) == 2


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(DeepSpeedError, match="expected files rank-"):
        read_run(tmp_path)


def test_a_file_whose_beginning_is_lost_is_read_all_the_same(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)])
    file = write_rank(tmp_path, 1, [step_line(1), step_line(2)])
    file.path.write_text(file.path.read_text()[10:])
    run = read_run(tmp_path)
    assert run.torn_lines == 1 and run.ranks[1].facts == {} and sorted(run.ranks[1].steps) == [1, 2]
    assert sorted(run.ranks[0].steps) == [1]
    analyse(run)


def test_a_plan_that_is_cut_off_is_named(tmp_path):
    write_rank(tmp_path, 0, [step_line(1)])
    (tmp_path / "plan.json").write_text('{"a":')
    with pytest.raises(
        DeepSpeedError, match=r"plan\.json: expected what ds_plan --json writes, found: .*Copy the file again"
    ):
        read_run(tmp_path)
