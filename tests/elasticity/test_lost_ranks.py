"""Ranks that are killed, and ranks that join: the losses are those of plain torch on whole batches."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed.run_report.page import all_events
from deepspeed.run_report.run_data import read_run
from tests.elasticity.jobs import JobResult, run_job
from tests.elasticity.program import CUT, make_config, plain_losses

pytestmark = pytest.mark.timeout(300)
TOTAL = 8
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
CUT_LAYERS = {"tensor_parallel": CUT}
ON_DISK = {"zero": {"offload_optimizer": {"device": "nvme", "nvme_path": "FOLDER/states"}}}


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def at(step: int, names: Iterable[str], moment: str = "start") -> dict[str, list[tuple[int, str]]]:
    return {name: [(step, moment)] for name in names}


@dataclass(frozen=True)
class Case:
    """A job, who is lost in it, and what must be seen afterwards.

    Attributes:
        die: By name: at which steps and moments the process kills itself, or what it does instead.
        config: Further sections of the configuration; ``FOLDER`` stands for the folder of the test.
        run: Further arguments of :func:`tests.elasticity.program.run`; ``aimed`` kills others during a recovery.
        codes: Exit codes other than -9 of who dies and 0 of who is left.
        recoveries: Numbers of ranks before and after each.
        repeated: Steps that each recovery repeats.
        words: What one of the processes says.
    """

    ranks: int
    stage: int
    die: Mapping[str, Any]
    total: int = TOTAL
    model: str = "awkward"
    config: dict[str, Any] = field(default_factory=dict)
    run: dict[str, Any] = field(default_factory=dict)
    joins: tuple[str, ...] = ()
    tolerance: float = 1e-6
    codes: dict[str, int] = field(default_factory=dict)
    recoveries: list[tuple[int, int]] | None = None
    repeated: list[int] | None = None
    words: str = ""


def run(case: Case, folder: Path, **options: Any) -> JobResult:
    folder.mkdir(exist_ok=True)
    text = json.dumps(make_config(case.stage, **case.config)).replace("FOLDER", str(folder))
    arguments = {"config": json.loads(text), "total": case.total, "die": dict(case.die), "model": case.model}
    arguments |= case.run
    if "save" in case.run:
        arguments.setdefault("checkpoints", str(folder / "saved"))
    joins = {"joins": list(case.joins)} if case.joins else {}
    return run_job(folder, case.ranks, arguments, **joins, **options)


def check(result: JobResult, total: int = TOTAL, tolerance: float = 1e-6, kind: str = "plain", first: int = 0) -> None:
    """Every step has the loss of plain torch, and the ranks that are left came to the end."""
    expected = plain_losses(total, kind)[first:]
    assert sorted(result.losses) == list(range(first, total)), result.errors
    losses = [result.losses[step] for step in range(first, total)]
    assert losses == pytest.approx(expected, abs=tolerance, rel=tolerance)
    assert all(lines[-1]["steps"] == total for lines in result.lines.values())


def check_case(case: Case, result: JobResult) -> None:
    killed = {*case.die, *case.run.get("aimed", ())}
    everybody = [*(f"r{number}" for number in range(case.ranks)), *case.joins]
    assert result.codes == {**{name: -9 if name in killed else 0 for name in everybody}, **case.codes}, result.errors
    check(result, case.total, case.tolerance, case.model)
    if case.recoveries is not None:
        assert [tuple(recovery["ranks"]) for recovery in result.recoveries] == case.recoveries
    assert result.recoveries[-1]["ranks"][1] == len(result.lines)
    repeated = [recovery["repeated"] for recovery in result.recoveries]
    if case.repeated is not None:
        assert repeated == case.repeated
    elif case.recoveries is not None and case.model != "experts":
        assert max(repeated) <= 1  # not all ranks had copied yet
    said = "".join([*result.errors.values(), *(word for recovery in result.recoveries for word in recovery["words"])])
    assert case.words in said


MICS = {"zero": {"mics_shard_size": 2}}
# Ranks 0 and 1, which no buddy would survive: the other group has the same slices. Then three ranks share the
# parameters where two did, and no other rank has what the next lost one held but its buddy.
A_GROUP = {**at(2, ("r0", "r1")), **at(4, ("r4",), "backward")}
NO_MICS = "mics_shard_size: 2 does not divide the 3 ranks"
BACK = "global_step2, after step 2: 1 finished step(s) are repeated"
SILENT = "no heartbeat for 15 s (elasticity.heartbeat); its process was stopped by a signal"
SPARE = "this process is a spare: the new job has 2 ranks without it"
# Each breaks off the recovery from the one before.
AIMED = {"r1": "regroup", "r2": "form", "r3": "build", "r4": "fill"}

CASES = {
    "a group of MiCS": Case(6, 3, A_GROUP, 6, config=MICS, recoveries=[(6, 4), (4, 3)], words=NO_MICS),
    "a loss in the second loop": Case(
        3, 2, at(3, ("r0",), "forward"), 5, "plain", run={"pauses": [2]}, recoveries=[(3, 2)]
    ),
    # the others see its end before they take their own waits for failures
    "a rank that raises": Case(
        3, 2, at(2, ("r1",), "error update"), 5, "plain", codes={"r1": 1}, words="RuntimeError: an error on r1"
    ),
    "states on disk": Case(3, 2, at(2, ("r1",), "backward"), 5, config=ON_DISK),
    # ranks 0 and 2 of four: their buddies are 1 and 3
    "two at once whose copies lie elsewhere": Case(4, 2, at(2, ("r0", "r2")), 4, "plain"),
    "copies every few updates": Case(
        3, 2, at(5, ("r1",), "backward"), 6, "plain", config={"elasticity": {"copy_every": 3}}, repeated=[2]
    ),
    "a rank and its buddy": Case(
        4, 3, at(3, ("r0", "r1")), 5, "plain", run={"save": 2}, recoveries=[(4, 2)], repeated=[1], words=BACK
    ),
    # it takes part from the next step on: copies are made for it, and nothing is done again
    "a process joins between two copies": Case(
        2, 2, {}, 30, "plain", {"elasticity": {"copy_every": 7}}, {"pause": 0.1}, ("new",),
        recoveries=[(2, 3)], repeated=[0],
    ),
    # rank 0, at which the new one had knocked, is killed
    "a rank joins and another one is killed": Case(
        3, 0, at(28, ("r0",), "backward"), 30, "plain", run={"pause": 0.1}, joins=("new",), recoveries=[(3, 4), (4, 3)]
    ),
    "each phase of a recovery": Case(6, 0, at(2, ("r0",)), 4, "plain", run={"aimed": AIMED}, recoveries=[(6, 1)]),
    # two copies of the model become one and a spare process, which continues where a rank of that one is killed
    "a spare takes the next one's place": Case(
        4, 3, {**at(2, ("r0",), "backward"), **at(5, ("r3",), "forward")}, config=CUT_LAYERS,
        recoveries=[(4, 2), (2, 2)], words=SPARE,
    ),
    # one of the others takes part 0, with the values of the last checkpoint
    "a part of the layers that nobody holds": Case(
        4, 3, at(3, ("r0", "r2")), 6, config=CUT_LAYERS, run={"save": 2, "names_folder": False},
        recoveries=[(4, 2)], repeated=[1], words=BACK,
    ),
}  # fmt: skip


LONG = [
    replace(CASES["a group of MiCS"], config={**MICS, **BF16}, tolerance=2e-2),
    Case(4, 3, at(2, ("r3",), "backward"), 4, config={"zero": {"zero_hpz_partition_size": 2}}),
    replace(CASES["states on disk"], stage=3),
    # Its sockets stay open. The other one of two sees that it was stopped, and that no network is broken.
    Case(
        2, 2, at(2, ("r1",), "stop backward"), 4, "plain", config={"elasticity": {"heartbeat": 15.0}}, words=SILENT
    ),
    replace(CASES["a rank joins and another one is killed"], stage=3),
    *(
        Case(4, stage, at(2, ("r0",), "backward"), 4, run={"aimed": {"r2": moment}})  # r2 is not the buddy
        for stage in range(4)
        for moment in ("regroup", "form", "build", "fill", "end")
    ),
    # the three ranks with part 0 of six, and during the recovery also one that takes over that part
    *(
        Case(6, 2, at(3, ("r0", "r2", "r4")), 6, config=CUT_LAYERS, run={"save": 2, "aimed": {"r3": moment}})
        for moment in ("regroup", "form", "build", "load", "end")
    ),
    *(replace(CASES["a spare takes the next one's place"], stage=stage) for stage in (0, 1, 2)),
    Case(6, 2, at(2, ("r0", "r3")), config=CUT_LAYERS),  # what is left of two copies makes one
    *(replace(CASES["a part of the layers that nobody holds"], stage=stage) for stage in (0, 1, 2)),
    # two ranks share the experts; the rest of the model is sharded over all four, then over two
    *(
        replace(CASES["a spare takes the next one's place"], stage=stage, model="experts", config={}, words="")
        for stage in range(4)
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", [*CASES.values(), *map(slow, LONG)], ids=[*CASES, *map(str, range(len(LONG)))])
def test_the_others_go_on(tmp_path, case):
    check_case(case, run(case, tmp_path))


@pytest.mark.parametrize("stage", [0, slow(1), slow(2), 3])
def test_three_of_five_are_killed_one_after_the_other(tmp_path, stage):
    """In a forward, before a step (rank 0, which holds the store), and in a backward.

    Five ranks have different numbers of the twelve micro-batches. What forwards change is as if no step had been broken
    off.
    """
    die = {**at(1, ("r3",), "forward"), **at(3, ("r0",)), **at(5, ("r1",), "backward")}
    report = {"run_report": {"path": "FOLDER/report"}}
    case = Case(5, stage, die, config=report, recoveries=[(5, 4), (4, 3), (3, 2)])
    result = run(case, tmp_path)
    check_case(case, result)
    check_buffers(result, copies=1)
    assert "pid" in result.recoveries[0]["words"][0] and "host" in result.recoveries[0]["words"][0]
    seen = [event for event in all_events(read_run(tmp_path / "report")) if event["name"] == "recovery"]
    assert [(event["ranks_before"], event["ranks_now"]) for event in seen] == case.recoveries


def check_buffers(result: JobResult, copies: int) -> None:
    """Each process counts its forwards, of twelve micro-batches over the ranks of each step."""
    for lines in result.lines.values():
        ranks = {line["step"]: line["ranks"] for line in lines if line.get("done")}
        assert lines[-1]["buffers"] == {"forwards": sum(-(-12 // (count // copies)) for count in ranks.values())}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_spare_that_is_not_needed_ends_with_the_others(tmp_path, stage):
    """A whole copy of the model, then a rank of another one. Nothing of the buffers is counted twice."""
    case = Case(6, stage, {**at(2, ("r2", "r3")), **at(4, ("r4",), "update")}, config=CUT_LAYERS)
    result = run(case, tmp_path)
    check_case(case, result)
    assert result.recoveries[-1]["ranks"][1] == len(result.lines) == 2
    check_buffers(result, copies=2)


SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
OFFLOAD = {"zero": {"offload_optimizer": {"device": "cpu"}}}


def fp16(power: int) -> dict[str, Any]:
    return {"fp16": {"enabled": True, "initial_scale_power": power, "hysteresis": 1}}


@pytest.mark.parametrize(
    ("ranks", "stage", "more", "tolerance"),
    [
        (3, 3, {**SCHEDULE, **BF16}, 1e-3),
        slow(3, 1, {**SCHEDULE, **fp16(22)}, 1e-3),
        slow(3, 2, {**SCHEDULE, **OFFLOAD}, 1e-6),
        slow(4, 3, {**CUT_LAYERS, **BF16}, 1e-3),
        # Between 20 and 24 another number of ranks skips other updates, without a death too.
        slow(4, 1, {**CUT_LAYERS, **fp16(19)}, 1e-3),
        slow(4, 2, {**CUT_LAYERS, **OFFLOAD}, 1e-6),
    ],
)
def test_precisions_and_offload(tmp_path, ranks, stage, more, tolerance):
    """A run with a loss goes through the very losses and scales of one without, but for the order of sums.

    Up to the death all bits are equal. The step of the death begins with equal weights, so its loss differs by the
    order of a sum in fp32. Later losses differ as those of runs on 2 and 3 ranks do, by gradients that are summed in
    another order in 16 bits: up to 3e-4 here in both cases. In fp16 the step of the death overflows.
    """
    model = "awkward" if "tensor_parallel" in more else "plain"
    calm, broken = (
        run(Case(ranks, stage, die, model=model, config=more), tmp_path / str(len(die)))
        for die in ({}, at(2, ("r1",), "backward"))
    )
    assert broken.codes == {**dict.fromkeys(calm.codes, 0), "r1": -9}, broken.errors
    allowed = {step: 0.0 if step < 2 else 1e-6 if step == 2 else tolerance for step in range(TOTAL)}
    differs = {step: abs(broken.losses[step] / calm.losses[step] - 1.0) for step in allowed}
    assert all(differs[step] <= allowed[step] for step in allowed), differs
    seen = [job.lines["r0"] for job in (calm, broken)] if ranks == 3 else [*broken.lines.values()]
    for name in ("scale", "rates") if ranks == 3 else ("scale",):
        first, *others = [{line["step"]: line[name] for line in lines if name in line} for lines in seen]
        assert first and all(other == first for other in others)


@pytest.mark.parametrize("stage", [2, slow(0)])
def test_a_loss_right_after_a_checkpoint_was_loaded(tmp_path, stage):
    """The run continues from what was loaded, not from the states before."""
    saved = {"checkpoints": str(tmp_path / "saved")}
    run(Case(2, stage, {}, 2, "plain", run={"save": 2, **saved}), tmp_path / "a")
    again = {"load": True, "save": 0, **saved}
    result = run(Case(3, stage, at(2, ("r1",), "forward"), 4, "plain", run=again), tmp_path / "b")
    check(result, 4, first=2)
    assert [recovery["repeated"] for recovery in result.recoveries] == [0]


TOO_FEW = "found 0 of part 0, and 1 process(es) in all. They are too few to hold the whole"
NOTHING_SAVED = "and no checkpoint folder was given or saved to, so the run"


@pytest.mark.parametrize(
    ("case", "left", "words"),
    [
        (Case(4, 1, at(1, ("r0", "r1")), 3, "plain"), ("r2", "r3"), NOTHING_SAVED),
        slow(
            Case(4, 1, at(1, ("r0", "r1")), 3, "plain", run={"checkpoints": "of another run"}),
            ("r2", "r3"),
            "this run has neither saved a checkpoint to",
        ),
        slow(Case(4, 1, at(2, ("r0", "r2")), config=CUT_LAYERS), ("r1", "r3"), NOTHING_SAVED),
        slow(Case(2, 1, at(2, ("r0",)), config=CUT_LAYERS), ("r1",), TOO_FEW),
    ],
    ids=["nothing saved", "saved by another run", "a part of the layers", "too few for all parts"],
)
def test_what_nobody_holds_any_more_ends_the_run(tmp_path, case, left, words):
    if "checkpoints" in case.run:
        saved = {"checkpoints": str(tmp_path / "saved")}
        run(Case(2, 1, {}, 2, "plain", run={"save": 2, **saved}), tmp_path / "a")
        case = replace(case, run=saved)
    result = run(case, tmp_path / "b")
    assert [result.codes[name] for name in left] == [1] * len(left)
    assert words in result.errors[left[0]]


@pytest.mark.parametrize(
    ("model", "stage", "ranks", "kills", "seed"),
    [
        ("plain", 3, 3, 20, 0),
        *(slow("plain", stage, 5, 25, stage + 1) for stage in range(4)),
        *(slow("awkward", stage, 6, 12, stage + 1) for stage in range(4)),
        *(slow("experts", stage, 6, 12, stage) for stage in (0, 2)),
    ],
)
def test_kills_at_random_moments(tmp_path, model, stage, ranks, kills, seed):
    """A process joins for each one that is killed; some die while the others are still recovering from a death.

    Of the awkward model ranks share the layers: a process joins at a rank or at a spare, and spares take ranks again.
    """
    total, save = (10 + 2 * kills, 4) if model == "plain" else (5 * kills, 10)
    config = CUT_LAYERS if model == "awkward" else {}
    arguments = {"save": save, "kills": kills, "seed": seed}
    result = run(Case(ranks, stage, {}, total, model, config, arguments), tmp_path, replaces=True, timeout=280)
    assert len(list(tmp_path.glob("kill-*"))) == kills, result.errors
    assert sum(code == 0 for code in result.codes.values()) >= 1, result.errors
    check(result, total, 2e-5, model)


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
    case = Case(3, stage, {}, 6, "plain", more, {"save": 2, "aimed": {victim: moment}})
    check_case(case, run(case, tmp_path))
    saved = {path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()}
    assert (tmp_path / "saved" / "latest").read_text() == "global_step6"
    assert {"global_step4", "global_step6"} <= saved <= {"global_step2", "global_step4", "global_step6"}
