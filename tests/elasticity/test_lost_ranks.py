"""Ranks that are killed, and ranks that join: the losses are those of plain torch on whole batches."""

import pytest

from deepspeed.run_report.page import all_events
from deepspeed.run_report.run_data import read_run
from tests.elasticity.jobs import JobResult, run_job
from tests.elasticity.program import CUT, make_config, plain_losses

pytestmark = pytest.mark.timeout(300)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


TOTAL = 8
DEATHS = {"r3": [(1, "forward")], "r0": [(3, "start")], "r1": [(5, "backward")]}


def check(result: JobResult, total: int = TOTAL, tolerance: float = 1e-6, kind: str = "plain", first: int = 0) -> None:
    """Every step has the loss of plain torch, and the ranks that are left came to the end."""
    expected = plain_losses(total, kind)[first:]
    assert sorted(result.losses) == list(range(first, total)), result.errors
    losses = [result.losses[step] for step in range(first, total)]
    assert losses == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert all(lines[-1]["steps"] == total for lines in result.lines.values())


def check_precise(broken: JobResult, calm: JobResult, death: int, tolerance: float) -> None:
    """The losses of a run with a death in a step are those of one without; later ones up to a relative tolerance."""
    allowed = {step: 0.0 if step < death else 1e-6 if step == death else tolerance for step in range(TOTAL)}
    differs = {step: abs(broken.losses[step] / calm.losses[step] - 1.0) for step in allowed}
    assert all(differs[step] <= allowed[step] for step in allowed), differs


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_three_of_five_are_killed_one_after_the_other(tmp_path, stage):
    """In a forward, before a step (rank 0, which holds the store), and in a backward.

    Five ranks have different numbers of the twelve micro-batches. What forwards change is as if no step had been broken
    off.
    """
    config = make_config(stage, run_report={"path": str(tmp_path / "report")})
    result = run_job(tmp_path, 5, {"config": config, "total": TOTAL, "die": DEATHS, "model": "awkward"})
    assert result.codes == {"r0": -9, "r1": -9, "r2": 0, "r3": -9, "r4": 0}, result.errors
    check(result, kind="awkward")
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(5, 4), (4, 3), (3, 2)]
    for lines in result.lines.values():
        ranks = {line["step"]: line["ranks"] for line in lines if line.get("done")}
        assert lines[-1]["buffers"] == {"forwards": sum(-(-12 // count) for count in ranks.values())}
    assert all(r["repeated"] <= 1 for r in result.recoveries)  # 1: not all ranks had copied yet
    assert "pid" in result.recoveries[0]["words"][0] and "host" in result.recoveries[0]["words"][0]
    seen = [event for event in all_events(read_run(tmp_path / "report")) if event["name"] == "recovery"]
    assert [(event["ranks_before"], event["ranks_now"]) for event in seen] == [(5, 4), (4, 3), (3, 2)]


@pytest.mark.parametrize(
    ("stage", "more", "tolerance"),
    [
        (3, {"bf16": {"enabled": True}}, 1e-3),
        slow(1, {"fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1}}, 1e-3),
        slow(2, {"zero": {"offload_optimizer": {"device": "cpu"}}}, 1e-6),
    ],
)
def test_precisions_and_offload(tmp_path, stage, more, tolerance):
    """A run with a loss goes through the very losses and scales of one without, but for the order of sums.

    Up to the death all bits are equal. The step of the death begins with equal weights, so its loss differs by the
    order of a sum in fp32. Later losses differ as those of runs on 2 and 3 ranks do, by gradients that are summed in
    another order in 16 bits: up to 3e-4 here in both cases. In fp16 the step of the death overflows.
    """
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}
    arguments = {"config": make_config(stage, scheduler=schedule, **more), "total": TOTAL}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    calm = run_job(tmp_path / "a", 3, arguments)
    broken = run_job(tmp_path / "b", 3, {**arguments, "die": {"r1": [(2, "backward")]}})
    assert broken.codes["r1"] == -9
    check_precise(broken, calm, 2, tolerance)
    scales, rates = (
        [{line["step"]: line[name] for line in job.lines["r0"] if line.get("done")} for job in (calm, broken)]
        for name in ("scale", "rates")
    )
    assert scales[0] == scales[1]
    assert rates[0] == rates[1]


@pytest.mark.parametrize("precision", [{}, slow({"bf16": {"enabled": True}})])
def test_a_whole_group_of_mics_is_lost(tmp_path, precision):
    """Ranks 0 and 1, which no buddy would survive: the other group has the same slices.

    Then three ranks share the parameters where two did, and no other rank has what the next lost one held but its
    buddy.
    """
    die = {"r0": [(2, "start")], "r1": [(2, "start")], "r4": [(4, "backward")]}
    config = make_config(3, zero={"mics_shard_size": 2}, **precision)
    result = run_job(tmp_path, 6, {"config": config, "total": 6, "die": die, "model": "awkward"})
    assert result.codes == {"r0": -9, "r1": -9, "r2": 0, "r3": 0, "r4": -9, "r5": 0}, result.errors
    check(result, 6, kind="awkward", tolerance=1e-6 if not precision else 2e-2)
    assert result.recoveries[-1]["ranks"][1] == 3
    assert "mics_shard_size: 2 does not divide the 3 ranks" in "".join(result.errors.values())


@pytest.mark.slow
def test_hpz(tmp_path):
    config = make_config(3, zero={"zero_hpz_partition_size": 2})
    result = run_job(tmp_path, 4, {"config": config, "total": 4, "die": {"r3": [(2, "backward")]}, "model": "awkward"})
    check(result, 4, kind="awkward")


@pytest.mark.parametrize("stage", [2, slow(3)])
def test_states_on_disk(tmp_path, stage):
    """Optimizer states of ranks that are left come from their files' copies in memory."""
    offload = {"device": "nvme", "nvme_path": str(tmp_path / "states")}
    config = make_config(stage, zero={"offload_optimizer": offload})
    result = run_job(tmp_path, 3, {"config": config, "total": 5, "die": {"r1": [(2, "backward")]}, "model": "awkward"})
    check(result, 5, kind="awkward")


@pytest.mark.parametrize("stage", [2, slow(0)])
def test_a_loss_right_after_a_checkpoint_was_loaded(tmp_path, stage):
    """The run continues from what was loaded, not from the states before."""
    arguments = {"config": make_config(stage), "total": 2, "save": 2, "checkpoints": str(tmp_path / "saved")}
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
    run_job(tmp_path / "a", 2, arguments)
    again = {**arguments, "total": 4, "load": True, "save": 0, "die": {"r1": [(2, "forward")]}}
    result = run_job(tmp_path / "b", 3, again)
    check(result, 4, first=2)
    assert [r["repeated"] for r in result.recoveries] == [0]


def test_a_loss_in_the_second_loop_over_steps(tmp_path):
    arguments = {"config": make_config(2), "total": 5, "pauses": [2], "die": {"r0": [(3, "forward")]}}
    result = run_job(tmp_path, 3, arguments)
    check(result, 5)
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(3, 2)]


def test_a_rank_that_raises_is_lost_too(tmp_path):
    """Its error is shown; the others see its end before they take their own waits for failures."""
    arguments = {"config": make_config(2), "total": 5, "die": {"r1": [(2, "error update")]}}
    result = run_job(tmp_path, 3, arguments)
    assert result.codes == {"r0": 0, "r1": 1, "r2": 0}, result.errors
    assert "RuntimeError: an error on r1" in result.errors["r1"]
    check(result, 5)


@pytest.mark.slow
def test_a_rank_that_is_stopped_is_lost_by_its_silence(tmp_path):
    """Its sockets stay open. The other one of two sees that it was stopped, and that no network is broken."""
    config = make_config(2, elasticity={"heartbeat": 15.0})
    result = run_job(tmp_path, 2, {"config": config, "total": 4, "die": {"r1": [(2, "stop backward")]}})
    assert result.codes == {"r0": 0, "r1": -9}, result.errors
    check(result, 4)
    words = result.recoveries[0]["words"][0]
    assert "no heartbeat for 15 s (elasticity.heartbeat); its process was stopped by a signal" in words


def test_two_at_once_whose_copies_lie_elsewhere(tmp_path):
    """Ranks 0 and 2 of four: their buddies are 1 and 3."""
    die = {"r0": [(2, "start")], "r2": [(2, "start")]}
    result = run_job(tmp_path, 4, {"config": make_config(2), "total": 4, "die": die})
    check(result, 4)
    assert result.recoveries[-1]["ranks"][1] == 2


def test_copies_every_few_updates_cost_repeated_updates(tmp_path):
    config = make_config(2, elasticity={"copy_every": 3})
    result = run_job(tmp_path, 3, {"config": config, "total": 6, "die": {"r1": [(5, "backward")]}})
    check(result, 6)
    assert [r["repeated"] for r in result.recoveries] == [2]


def test_a_rank_and_its_buddy_at_once_go_back_to_the_checkpoint(tmp_path):
    die = {"r0": [(3, "start")], "r1": [(3, "start")]}
    arguments = {
        "config": make_config(3), "total": 5, "die": die, "save": 2, "checkpoints": str(tmp_path / "saved"),
    }  # fmt: skip
    result = run_job(tmp_path, 4, arguments)
    check(result, 5)
    words = "global_step2, after step 2: 1 finished step(s) are repeated"
    assert words in "".join(result.errors.values())
    assert [(tuple(r["ranks"]), r["lost"], r["repeated"]) for r in result.recoveries] == [((4, 2), 2, 1)]


def test_a_process_joins_between_two_copies(tmp_path):
    """It takes part from the next step on: copies are made for it, and nothing is done again."""
    config = make_config(2, elasticity={"copy_every": 7})
    result = run_job(tmp_path, 2, {"config": config, "total": 30, "pause": 0.1}, joins=["new"])
    check(result, 30)
    assert [(tuple(r["ranks"]), r["repeated"]) for r in result.recoveries] == [((2, 3), 0)]


@pytest.mark.slow
def test_a_checkpoint_that_another_run_has_left_is_not_taken(tmp_path):
    saved = str(tmp_path / "saved")
    (tmp_path / "a").mkdir()
    run_job(tmp_path / "a", 2, {"config": make_config(1), "total": 2, "save": 2, "checkpoints": saved})
    die = {"r0": [(1, "start")], "r1": [(1, "start")]}
    result = run_job(tmp_path, 4, {"config": make_config(1), "total": 3, "die": die, "checkpoints": saved})
    assert [result.codes[name] for name in ("r2", "r3")] == [1, 1]
    assert "this run has neither saved a checkpoint to" in result.errors["r2"]


def test_a_rank_and_its_buddy_without_a_checkpoint_end_the_run(tmp_path):
    die = {"r0": [(1, "start")], "r1": [(1, "start")]}
    result = run_job(tmp_path, 4, {"config": make_config(1), "total": 3, "die": die})
    assert [result.codes[name] for name in ("r2", "r3")] == [1, 1]
    assert "and no checkpoint folder was given or saved to, so the run" in result.errors["r2"]


@pytest.mark.parametrize("stage", [0, slow(3)])
def test_a_rank_joins_and_another_one_is_killed(tmp_path, stage):
    """Three become four; then rank 0, at which the new one had knocked, is killed."""
    arguments = {"config": make_config(stage), "total": 30, "die": {"r0": [(28, "backward")]}, "pause": 0.1}
    result = run_job(tmp_path, 3, arguments, joins=["new"])
    assert result.codes == {"r0": -9, "r1": 0, "r2": 0, "new": 0}, result.errors
    check(result, 30)
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(3, 4), (4, 3)]


@pytest.mark.parametrize(
    ("stage", "ranks", "kills", "seed"),
    [(3, 3, 20, 0), slow(0, 5, 25, 1), slow(1, 5, 25, 2), slow(2, 5, 25, 3), slow(3, 5, 25, 4)],
)
def test_kills_at_random_moments(tmp_path, stage, ranks, kills, seed):
    """A process joins for each one that is killed; some die while the others are still recovering from a death."""
    total = 10 + 2 * kills
    arguments = {
        "config": make_config(stage), "total": total, "checkpoints": str(tmp_path / "saved"), "save": 4,
        "kills": kills, "seed": seed,
    }  # fmt: skip
    result = run_job(tmp_path, ranks, arguments, replaces=True, timeout=280)
    assert len(list(tmp_path.glob("kill-*"))) == kills, result.errors
    assert sum(code == 0 for code in result.codes.values()) >= 1, result.errors
    check(result, total, 2e-5)


# -- deaths while the others recover, or save --------------------------------------------------------------------------


def test_a_rank_is_killed_in_each_phase_of_a_recovery(tmp_path):
    """Each breaks off the recovery from the one before; the last of six continues alone."""
    aimed = {"r1": "regroup", "r2": "form", "r3": "build", "r4": "fill"}
    arguments = {"config": make_config(0), "total": 4, "die": {"r0": [(2, "start")]}, "aimed": aimed}
    result = run_job(tmp_path, 6, arguments)
    assert result.codes == {**dict.fromkeys(("r0", *aimed), -9), "r5": 0}, result.errors
    check(result, 4)
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(6, 1)]
    assert result.recoveries[0]["lost"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("moment", ["regroup", "form", "build", "fill", "end"])
def test_a_second_rank_is_killed_in_a_recovery(tmp_path, stage, moment):
    """Not the buddy of the first one."""
    arguments = {"config": make_config(stage), "total": 4, "die": {"r0": [(2, "backward")]}, "aimed": {"r2": moment}}
    result = run_job(tmp_path, 4, {**arguments, "model": "awkward"})
    assert result.codes == {"r0": -9, "r1": 0, "r2": -9, "r3": 0}, result.errors
    check(result, 4, kind="awkward")
    assert result.recoveries[-1]["ranks"][1] == 2


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["regroup", "form", "build", "load", "end"])
def test_a_rank_is_killed_while_others_take_its_part_of_the_layers(tmp_path, moment):
    """The three ranks with part 0 of six are killed; during the recovery also one that takes over that part."""
    die = dict.fromkeys(("r0", "r2", "r4"), [(3, "start")])
    arguments = {
        "config": make_config(2, tensor_parallel=CUT), "total": 6, "save": 2, "model": "awkward", "die": die,
        "checkpoints": str(tmp_path / "saved"), "aimed": {"r3": moment},
    }  # fmt: skip
    result = run_job(tmp_path, 6, arguments)
    assert {name for name, code in result.codes.items() if code == 0} == {"r1", "r5"}, result.errors
    check(result, 6, kind="awkward")


@pytest.mark.parametrize(
    ("stage", "victim", "moment", "more"),
    [
        (2, "r1", "write", {}),
        slow(2, "r0", "commit", {}),
        slow(0, "r0", "write", {}),
        slow(3, "r1", "write", {"checkpoint": {"async_save": True}}),
        slow(2, "r0", "commit", {"checkpoint": {"async_save": True}}),
    ],
)
def test_a_rank_is_killed_while_all_save(tmp_path, stage, victim, moment, more):
    """The run continues, later saves succeed, and another run continues from what is there."""
    arguments = {"total": 6, "save": 2, "checkpoints": str(tmp_path / "saved"), "aimed": {victim: moment}}
    (tmp_path / "a").mkdir()
    result = run_job(tmp_path / "a", 3, {"config": make_config(stage, **more), **arguments})
    assert result.codes == {**dict.fromkeys(("r0", "r1", "r2"), 0), victim: -9}, result.errors
    check(result, 6)
    saved = {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()}
    assert (tmp_path / "saved" / "latest").read_text() == "global_step6"
    assert {"global_step4", "global_step6"} <= saved <= {"global_step2", "global_step4", "global_step6"}


# -- ranks that share layers -------------------------------------------------------------------------------------------


def cut_job(folder, ranks, stage, die, total=TOTAL, more=None, **options) -> JobResult:
    """Two ranks share the layers of each copy of the awkward model."""
    config = make_config(stage, tensor_parallel=CUT, **(more or {}))
    return run_job(folder, ranks, {"config": config, "total": total, "die": die, "model": "awkward"}, **options)


@pytest.mark.parametrize("stage", [3, slow(0), slow(1), slow(2)])
def test_a_rank_that_shares_layers_is_killed_and_a_spare_takes_the_next_ones_place(tmp_path, stage):
    """Two copies of the model become one and a spare process, which continues where a rank of that one is killed."""
    result = cut_job(tmp_path, 4, stage, {"r0": [(2, "backward")], "r3": [(5, "forward")]})
    assert result.codes == {"r0": -9, "r1": 0, "r2": 0, "r3": -9}, result.errors
    check(result, kind="awkward")
    assert sorted(result.lines) == ["r1", "r2"]
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(4, 2), (2, 2)]
    assert all(r["repeated"] <= 1 for r in result.recoveries)
    assert "this process is a spare: the new job has 2 ranks without it" in result.errors["r1"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_spare_that_is_not_needed_ends_with_the_others(tmp_path, stage):
    """A whole copy of the model, then a rank of another one. Nothing of the buffers is counted twice."""
    die = {"r2": [(2, "start")], "r3": [(2, "start")], "r4": [(4, "update")]}
    result = cut_job(tmp_path, 6, stage, die)
    assert result.codes == {"r0": 0, "r1": 0, "r2": -9, "r3": -9, "r4": -9, "r5": 0}, result.errors
    check(result, kind="awkward")
    assert result.recoveries[-1]["ranks"][1] == 2
    assert len(result.lines) == 2
    for lines in result.lines.values():
        ranks = {line["step"]: line["ranks"] for line in lines if line.get("done")}
        assert lines[-1]["buffers"] == {"forwards": sum(-(-12 // (count // 2)) for count in ranks.values())}


@pytest.mark.slow
def test_what_is_left_of_two_copies_makes_one(tmp_path):
    result = cut_job(tmp_path, 6, 2, {"r0": [(2, "start")], "r3": [(2, "start")]})
    assert result.codes == {"r0": -9, "r1": 0, "r2": 0, "r3": -9, "r4": 0, "r5": 0}, result.errors
    check(result, kind="awkward")
    assert result.recoveries[-1]["ranks"][1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more", "tolerance"),
    [
        (3, {"bf16": {"enabled": True}}, 1e-3),
        # Between 20 and 24 another number of ranks skips other updates, without a death too.
        (1, {"fp16": {"enabled": True, "initial_scale_power": 19, "hysteresis": 1}}, 1e-3),
        (2, {"zero": {"offload_optimizer": {"device": "cpu"}}}, 1e-6),
    ],
)
def test_precisions_and_offload_of_cut_layers(tmp_path, stage, more, tolerance):
    for part in ("a", "b"):
        (tmp_path / part).mkdir()
    calm = cut_job(tmp_path / "a", 4, stage, {}, more=more)
    broken = cut_job(tmp_path / "b", 4, stage, {"r1": [(2, "backward")]}, more=more)
    assert broken.codes == {"r0": 0, "r1": -9, "r2": 0, "r3": 0}, broken.errors
    check_precise(broken, calm, 2, tolerance)
    scales = [{line["step"]: line["scale"] for line in lines if "scale" in line} for lines in broken.lines.values()]
    assert all(scale == scales[0] for scale in scales)


@pytest.mark.parametrize("stage", [3, slow(0), slow(1), slow(2)])
def test_others_take_the_part_of_the_layers_that_nobody_holds_any_more(tmp_path, stage):
    """Both ranks with part 0 are killed: one of the others takes it, with the values of the last checkpoint."""
    die = {"r0": [(3, "start")], "r2": [(3, "start")]}
    arguments = {
        "config": make_config(stage, tensor_parallel=CUT), "total": 6, "save": 2, "model": "awkward", "die": die,
        "checkpoints": str(tmp_path / "saved"), "names_folder": False,
    }  # fmt: skip
    result = run_job(tmp_path, 4, arguments)
    assert result.codes == {"r0": -9, "r1": 0, "r2": -9, "r3": 0}, result.errors
    check(result, 6, kind="awkward")
    assert [(tuple(r["ranks"]), r["repeated"]) for r in result.recoveries] == [((4, 2), 1)]
    words = "global_step2, after step 2: 1 finished step(s) are repeated"
    assert words in result.errors["r1"] + result.errors["r3"]


@pytest.mark.slow
def test_all_that_hold_a_part_of_the_layers_are_killed_before_a_checkpoint(tmp_path):
    result = cut_job(tmp_path, 4, 1, {"r0": [(2, "start")], "r2": [(2, "start")]})
    assert [result.codes[name] for name in ("r1", "r3")] == [1, 1]
    assert "and no checkpoint folder was given or saved to, so the run" in result.errors["r1"]


@pytest.mark.slow
def test_too_few_are_left_for_all_parts_of_the_layers(tmp_path):
    result = cut_job(tmp_path, 2, 1, {"r0": [(2, "start")]})
    assert result.codes == {"r0": -9, "r1": 1}
    assert "found 0 of part 0, and 1 process(es) in all. They are too few to hold the whole" in result.errors["r1"]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "seed"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_kills_at_random_moments_of_ranks_that_share_layers(tmp_path, stage, seed):
    """A process joins for each one that is killed, at a rank or at a spare, and spares take ranks again."""
    kills = 12
    arguments = {
        "config": make_config(stage, tensor_parallel=CUT), "total": 5 * kills, "checkpoints": str(tmp_path / "saved"),
        "save": 10, "kills": kills, "seed": seed, "model": "awkward",
    }  # fmt: skip
    result = run_job(tmp_path, 6, arguments, replaces=True, timeout=280)
    assert len(list(tmp_path.glob("kill-*"))) == kills, result.errors
    check(result, 5 * kills, 2e-5, kind="awkward")


# -- ranks that share experts ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_rank_that_holds_experts_is_killed(tmp_path, stage):
    """Two ranks share the experts; the rest of the model is sharded over all four, then over two."""
    die = {"r0": [(2, "backward")], "r3": [(5, "forward")]}
    result = run_job(tmp_path, 4, {"config": make_config(stage), "total": TOTAL, "die": die, "model": "experts"})
    assert result.codes == {"r0": -9, "r1": 0, "r2": 0, "r3": -9}, result.errors
    check(result, kind="experts")
    assert [tuple(r["ranks"]) for r in result.recoveries] == [(4, 2), (2, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2])
def test_kills_at_random_moments_of_ranks_that_hold_experts(tmp_path, stage):
    kills = 12
    arguments = {
        "config": make_config(stage), "total": 5 * kills, "checkpoints": str(tmp_path / "saved"), "save": 10,
        "kills": kills, "seed": stage, "model": "experts",
    }  # fmt: skip
    result = run_job(tmp_path, 6, arguments, replaces=True, timeout=280)
    assert len(list(tmp_path.glob("kill-*"))) == kills, result.errors
    check(result, 5 * kills, 2e-5, kind="experts")
