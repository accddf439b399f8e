"""What is made of the lines of a run."""

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
    assert any(
        "rank 1 (node1) takes 1.80 times as long as the others' median in forward" in text for text in found.advice
    )


def test_what_follows_from_a_slow_rank_is_no_advice_of_its_own(tmp_path):
    for rank in range(2):
        forward, wait = (0.2, 0.0) if rank == 1 else (0.9, 0.8)
        write_rank(tmp_path, rank, [step_line(n, forward=forward, wait=wait) for n in range(1, 6)])
    first, second = analyse(read_run(tmp_path)).advice
    assert "rank 1 (node1) takes 8.00 times as long as the others' median outside the engine" in first
    assert second == "40% of the time is spent waiting along the axis data, mostly for rank 1"


def test_of_two_ranks_the_slow_one_has_its_whole_score(tmp_path):
    for rank in range(2):
        write_rank(tmp_path, rank, [step_line(n, forward=0.2 + 0.4 * rank, wait=0.0) for n in range(1, 6)])
    slow = [found for found in analyse(read_run(tmp_path)).slow if found.phase == "forward"]
    assert [found.rank for found in slow] == [1]
    assert slow[0].factor == pytest.approx(3.0) and slow[0].share == pytest.approx(0.4)


def test_one_long_step_is_a_moment_and_changes_no_share(tmp_path):
    for rank in range(2):
        lines = [step_line(n, seconds=0.05, forward=0.048, wait=0.02) for n in range(1, 13)]
        if rank == 1:
            lines[6] = step_line(7, seconds=1.5, forward=0.048, wait=0.02)  # its loader stood still
        write_rank(tmp_path, rank, lines)
    found = analyse(read_run(tmp_path))
    assert {(s.phase, s.axis): round(s.share, 2) for s in found.shares}["outside", ""] == 0.04
    assert not any("lies between calls" in text for text in found.advice)
    (moment,) = found.moments
    assert (moment.step, moment.seconds, moment.rank, moment.phase) == (7, 1.5, 1, "outside")
    assert moment.factor == pytest.approx(30.0) and found.moments_share == pytest.approx(1.45 / (1.5 + 9 * 0.05))


def test_saves_count_by_their_mean_and_are_no_moments(tmp_path):
    lines = [step_line(n) for n in range(1, 13)]
    lines[5]["phases"]["save"], lines[5]["seconds"] = 10.0, 11.0
    write_rank(tmp_path, 0, lines)
    found = analyse(read_run(tmp_path))
    assert found.moments == () and any("goes into saving" in text for text in found.advice)
    assert {s.phase: s.seconds for s in found.shares}["save"] == pytest.approx(1.0)


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


def test_lines_of_another_program_are_left_out(tmp_path):
    file = write_rank(tmp_path, 0, [step_line(1)])
    with file.path.open("a") as more:
        more.write('[1]\n{"kind": "start"}\n{"kind": "step", "step": "x"}\n{"kind": "event"}\n{"other": 1}\n')
    run = read_run(tmp_path)
    assert run.torn_lines == 4 and run.step_numbers == [1] and len(run.first.starts) == 1
    analyse(run)


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
        DeepSpeedError, match=r"plan\.json: expected the output of ds_plan --json, found: .*Copy the file again"
    ):
        read_run(tmp_path)
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(DeepSpeedError, match=r"plan\.json: expected .* for one job, found list, as --sweep prints"):
        read_run(tmp_path)


def test_a_copy_of_a_file_is_named(tmp_path):
    file = write_rank(tmp_path, 0, [step_line(1)])
    (tmp_path / "rank-00000 (1).jsonl").write_bytes(file.path.read_bytes())
    with pytest.raises(DeepSpeedError, match=r"rank-00000 \(1\)\.jsonl: expected a name such as rank-00000\.jsonl"):
        read_run(tmp_path)
