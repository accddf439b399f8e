"""Which candidate is measured next, and when the search is over."""

from __future__ import annotations

from deepspeed.autotuning.choice import CandidatePlan, TrialQueue


def queue(*seconds: float, **more) -> TrialQueue:
    changes = {"train_micro_batch_size_per_gpu": 1}
    return TrialQueue([CandidatePlan(f"c{i}", changes, True, value) for i, value in enumerate(seconds)], **more)


def test_the_shortest_predicted_step_is_tried_first_and_what_does_not_fit_never():
    found = queue(3.0, 1.0, 2.0)
    found.rows = [
        *found.rows,
        CandidatePlan("big", {}, False, 0.1),
        CandidatePlan("wrong", {}, False, 0.0, refusal="no"),
    ]
    assert [row.name for row in found.runnable()] == ["c1", "c2", "c0"]
    assert found.next().name == "c1"


def test_it_is_over_when_no_other_can_win_by_the_error_bar():
    found = queue(1.0, 1.2, 1.5)
    found.measured["c0"] = 1.1  # the prediction was 10 % short, so the next is expected at 1.32 +- 25 %
    assert found.next().name == "c1"
    found.measured["c1"] = 1.3
    assert found.error == 0.03 or found.error > 0.03
    assert found.next() is None and "no other candidate can be faster" in found.why_over()
    wide = queue(1.0, 1.6)
    wide.measured["c0"] = 1.0
    assert wide.next() is None  # 1.6 - 25 % is more than 1.0


def test_predictions_that_were_wrong_widen_the_bar():
    found = queue(1.0, 1.1, 1.4)
    found.measured.update(c0=1.0, c1=1.8)
    assert found.error > 0.4
    assert found.next().name == "c2"


def test_limits_of_trials_and_of_failures():
    found = queue(1.0, 1.0, 1.0, 1.0, most=2)
    found.measured.update(c0=1.0, c1=1.0)
    assert found.why_over() == "2 candidates were measured (autotuning.tuner_num_trials)"
    impatient = queue(1.0, 1.0, 1.0, 1.0, most=9, patience=1)
    impatient.measured.update(c0=1.0, c1=1.01)
    assert "1 trials brought no improvement" in impatient.why_over()
    failing = queue(*[1.0] * 9, most=1)
    failing.failed.update({f"c{i}": "x" for i in range(3)})
    assert failing.why_over() == "3 trials failed"


def test_a_script_with_a_batch_of_its_own_leaves_its_micro_batch_only():
    found = queue(1.0, 2.0)
    found.rows[1].changes["train_micro_batch_size_per_gpu"] = 1
    found.rows = [CandidatePlan("c0", {"train_micro_batch_size_per_gpu": 2}, True, 1.0), found.rows[1]]
    found.micro_batches = {1}
    assert [row.name for row in found.runnable()] == ["c1"]
    found.measured["c1"] = 2.0
    assert found.why_over() == "every candidate that fits has been tried"


def test_a_gain_that_is_too_small_is_worth_no_trial():
    found = queue(1.0, 1.001, 1.002)
    found.measured.update(c0=1.0, c1=1.001)
    assert found.next() is None and "by more than 3%" in found.why_over()


def test_of_two_that_are_measured_alike_the_one_that_was_predicted_to_be_faster_is_chosen():
    found = queue(1.28, 1.30, 3.0)
    found.measured.update(c0=1.09, c1=1.08)  # two starts of one candidate differ by more
    assert found.best == "c0"
    assert 1.07 < found.estimate("c0") < 1.09 < found.estimate("c1") < 1.10


def test_a_clear_difference_is_believed_against_the_prediction():
    found = queue(1.0, 1.1, 3.0)
    found.measured.update(c0=1.3, c1=1.0)
    assert found.best == "c1"
