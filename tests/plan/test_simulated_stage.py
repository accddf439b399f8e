"""Plans of pipelines: stages against real ranks that work in the same order, times against the schedules' formulas."""

import itertools
from typing import Any

import pytest
import torch

import deepspeed
from deepspeed.cli.plan import main
from deepspeed.comm.base.counters import counted
from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.ops.flat import drop_scratch
from deepspeed.parallel.pipe.schedule import TRAIN_SCHEDULES
from deepspeed.parallel.pipe.schedule.simulate import Times, simulate
from deepspeed.parallel.tensor.batches import WORDS
from deepspeed.pipe import PipelineModule
from deepspeed.plan.decoder import layers_of, token_loss
from deepspeed.plan.kinds import kinds_of, needed
from deepspeed.plan.memory import MemoryCount
from deepspeed.plan.pipeline import Pipeline, idle_shares, idle_time
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.zero.placement import Tier
from deepspeed.zero.storage import StorageKind
from tests.harness import run_ranks
from tests.harness.toy_models import causal_model
from tests.plan.cells import SAMPLES, SHAPE, TOKENS, Cell
from tests.plan.requests import plan

STAGES, DATA, MICRO_BATCHES = 2, 2, 6


def _planned(cell: Cell, rank: int | None = None, pipe: int = STAGES, **more: Any) -> Any:
    return deepspeed.plan(
        SHAPE,
        cell.config(""),
        devices_per_node=pipe * DATA,
        device="cpu",
        device_memory="8GiB",
        sequence_length=TOKENS,
        compare_checkpointing=False,
        pipe=pipe,
        rank=rank,
        **more,
    )


def _measure(cells: list[Cell], **pipeline: Any) -> list[dict[str, Any]]:
    return [
        _run(cell, lambda: PipelineModule(layers_of(SHAPE), num_stages=STAGES, loss_fn=token_loss, **pipeline))
        for cell in cells
    ]


def _run(cell: Cell, make: Any, cut: dict[str, Any] | None = None) -> dict[str, Any]:
    torch.manual_seed(0)
    drop_scratch(torch.device("cpu"))
    model = make()
    count = MemoryCount("cpu")
    tokens = torch.ones(SAMPLES, TOKENS, dtype=torch.int64)
    with count.counting():
        config = cell.config("") if cut is None else _cut_config(cell, cut)
        engine = deepspeed.initialize(model=model, config=config)[0]
        items = itertools.repeat((tokens, tokens))
        for _ in range(2):
            engine.train_batch(items)
        engine.optimizer.count_state()
        memory_tracker = engine._runtime.memory_tracker
        memory_tracker.reset_peak()
        count.reset_peaks()
        with counted() as traffic:
            engine.train_batch(items)
            requested = {key: (tally.calls, tally.nbytes) for key, tally in traffic.requested_along.items()}
            ran = {key: (tally.calls, tally.nbytes) for key, tally in traffic.ran_along.items()}
        count.update_peaks()
        kinds = {(kind.name, tier.name): memory_tracker.peak(kind, tier) for kind in StorageKind for tier in Tier}
        engine.destroy()
    return {
        "kinds": {key: n for key, n in kinds.items() if n},
        "requested": requested,
        "ran": ran,
        "peak": count.peaks[Tier.DEVICE].nbytes,
    }


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.slow)])
def test_stages_against_real_ranks(stages):
    cells = [Cell(stage, accumulation=MICRO_BATCHES) for stage in stages]
    real = run_ranks(_measure, STAGES * DATA, cells)
    for number, cell in enumerate(cells):
        for rank in (1, 3):
            _assert_as_counted(_planned(cell, rank), real[rank][number], (cell, rank))


LLAMA = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": TOKENS,
}


def _llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(**LLAMA, tie_word_embeddings=tied)


TRANSFORMERS = [
    (Cell(1, accumulation=4), True, "1f1b"),
    (Cell(2, accumulation=5, precision="fp32"), False, "interleaved"),
    (Cell(1, accumulation=6), True, "zbv"),
]


def _measure_transformers(cells: list[Any]) -> list[dict[str, Any]]:
    return [
        _run(
            cell,
            lambda tied=tied, name=name: PipelineModule.from_transformers(_llama(tied), num_stages=2, schedule=name),
        )
        for cell, tied, name in cells
    ]


@pytest.mark.parametrize("cells", [TRANSFORMERS[1:], pytest.param(TRANSFORMERS[:1], marks=pytest.mark.slow)])
def test_transformers_models_and_schedules_of_several_chunks_against_real_ranks(cells):
    """Values that skip stages, a head tied to the embedding, chunks in rows and in a V, backwards in two parts."""
    real = run_ranks(_measure_transformers, 2, cells)
    for number, (cell, tied, name) in enumerate(cells):
        for rank in (0, 1):
            plan = deepspeed.plan(
                _llama(tied), cell.config(""), devices_per_node=2, device="cpu", device_memory="8GiB",
                sequence_length=TOKENS, compare_checkpointing=False, pipe=2, rank=rank, schedule=name,
            )  # fmt: skip
            _assert_as_counted(plan, real[rank][number], (name, rank))


CUT = [
    (Cell(1, accumulation=4), True, {}),
    (Cell(1, accumulation=4), False, {"sequence_parallel_norms": True, "vocab_parallel_lm_head": True}),
    (Cell(3, accumulation=4), True, {"sequence_parallel_norms": True}),
]


def _cut_config(cell: Cell, cut: dict[str, Any]) -> dict[str, Any]:
    return {**cell.config(""), "tensor_parallel": {"autotp_size": 2, "verify": False, **cut}}


def _measure_cut(cells: list[Any]) -> list[dict[str, Any]]:
    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    return [
        _run(cell, lambda tied=tied: PipelineModule.from_transformers(_llama(tied), topology=topology), cut)
        for cell, tied, cut in cells
    ]


@pytest.mark.parametrize("cells", [CUT[2:], pytest.param(CUT[:2], marks=pytest.mark.slow)])
def test_stages_whose_layers_are_cut_against_real_ranks(cells):
    """Embedding and head over two ranks, tied over the stages or not; parts of sequences between blocks and stages."""
    real = run_ranks(_measure_cut, 4, cells)
    for number, (cell, tied, cut) in enumerate(cells):
        for rank in (1, 2):
            plan = deepspeed.plan(
                _llama(tied), _cut_config(cell, cut), devices_per_node=4, device="cpu", device_memory="8GiB",
                sequence_length=TOKENS, compare_checkpointing=False, pipe=2, tensor=2, rank=rank,
            )  # fmt: skip
            _assert_as_counted(plan, real[rank][number], (number, rank), aside=8 * WORDS)


def _assert_as_counted(plan: Any, counted_: dict[str, Any], what: Any, aside: int = 0) -> None:
    found = plan.simulated
    assert found.flow.requested_along == counted_["requested"], what
    # Between all ranks go their losses too, one for each micro-batch; not all micro-batches are simulated.
    planned, real = dict(found.flow.ran_along), dict(counted_["ran"])
    assert planned.pop(("send", "job"))[0] == real.pop(("send", "job"))[0], what
    assert planned == real, what
    kinds = {(kind.name, tier.name): nbytes for (kind, tier), nbytes in found.kind_peaks.items()}
    assert kinds.keys() == counted_["kinds"].keys()
    for key, nbytes in counted_["kinds"].items():
        assert kinds[key] == pytest.approx(nbytes, rel=0.02), (what, key)
    assert found.peaks[Tier.DEVICE].nbytes == pytest.approx(counted_["peak"] - aside, rel=0.05), what


def test_one_rank_of_each_stage_that_may_be_the_heaviest():
    kinds = kinds_of(Mesh((("pipe", 4), ("data", 2), ("tensor", 2))))
    assert [(kind.stage, kind.rank) for kind in kinds] == [(0, 2), (1, 6), (2, 10), (3, 14)]
    assert [kind.stage for kind in needed(kinds, ["first", "middle", "middle", "last"], [4, 3, 3, 1])] == [0, 1, 3]
    assert [kind.stage for kind in needed(kinds, ["first", "middle", "middle", "last"], [4, 3, 4, 1])] == [0, 2, 3]
    assert [kind.rank for kind in kinds_of(Mesh((("data", 4),)))] == [1]
    plan = _planned(Cell(1, accumulation=8), pipe=5)
    assert [part.kind.stage for part in plan.parts] == [0, 1, 4] and plan.mesh == Mesh((("pipe", 5), ("data", 2)))
    assert sorted(stage for part in plan.parts for stage in part.layers) == list(range(5))
    in_flight = {stage: number for part in plan.parts for stage, number in part.in_flight.items()}
    assert in_flight == {stage: 5 - stage + (stage < 4) for stage in range(5)}
    assert plan.device_bytes == max(part.simulated.peaks[Tier.DEVICE].nbytes for part in plan.parts)
    whole = _planned(Cell(1, accumulation=8), pipe=1)
    assert plan.parameters == whole.parameters and not whole.to_dict().get("stages")
    # In-flight micro-batches are really there: the second stage keeps 5 of them, and all 8 under GPipe.
    more = _planned(Cell(1, accumulation=8), pipe=5, schedule="gpipe", rank=3).simulated
    second = plan.parts[1].simulated
    kept = more.peaks[Tier.DEVICE].nbytes - second.peaks[Tier.DEVICE].nbytes
    assert kept == pytest.approx(3 * second.activations, rel=0.25)


def test_weights_tied_over_the_first_and_the_last_of_three_stages_count_once():
    plan = deepspeed.plan(
        _llama(True), Cell(1, accumulation=3).config(""), devices_per_node=3, device="cpu", device_memory="8GiB",
        sequence_length=TOKENS, compare_checkpointing=False, pipe=3,
    )  # fmt: skip
    model = causal_model("Llama", **LLAMA, tie_word_embeddings=True)
    assert plan.parameters == plan.trained == sum(parameter.numel() for parameter in model.parameters())
    assert [part.simulated.repeated for part in plan.parts] == [0, 0, model.lm_head.weight.numel()]


def test_tied_weights_that_are_frozen_do_not_lessen_what_is_trained():
    model = causal_model("Llama", **LLAMA, tie_word_embeddings=True)
    model.lm_head.weight.requires_grad_(False)
    plan = deepspeed.plan(
        model, Cell(0).config(""), devices_per_node=2, sequence_length=TOKENS, compare_checkpointing=False,
        suggest=False, pipe=2,
    )  # fmt: skip
    assert plan.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert plan.trained == plan.parameters - model.lm_head.weight.numel()


def test_a_long_step_is_like_a_short_one_with_more_in_the_middle():
    long, short = (_planned(Cell(3, accumulation=number), rank=0) for number in (12, 4))
    middle = _planned(Cell(3, accumulation=5), rank=0).simulated.flow.plus(short.simulated.flow, -1)
    assert long.simulated.flow == short.simulated.flow.plus(middle, 8)


def test_waiting():
    equal = dict.fromkeys(range(4), Times(1.0, 2.0))
    assert idle_time(Pipeline(4), equal, 8).share == pytest.approx(3 / 8)
    # Where one stage takes longest, it works without a gap from its first micro-batch to its last.
    uneven = {0: Times(0.3, 0.7), 1: Times(2.0, 3.0), 2: Times(0.3, 0.7)}
    assert idle_time(Pipeline(3), uneven, 4).seconds == pytest.approx(0.3 + 4 * 5 + 0.7)
    # A long step is a short one with more in the middle, whatever the schedule.
    for name in TRAIN_SCHEDULES:
        pipeline = Pipeline(3, name)
        each = dict.fromkeys(range(len(pipeline.stage_of)), Times(1.0, 2.0, 1.0, 0.1))
        whole = simulate(pipeline.of(50), [each[0]] * len(each)).makespan
        assert idle_time(pipeline, each, 50).seconds == pytest.approx(whole, rel=0.01), name
    shares = idle_shares(4, 8)
    assert shares["1f1b"] == shares["gpipe"] == pytest.approx(3 / 8)
    assert shares["interleaved"] == pytest.approx(3 / 16) and shares["zb-h1"] == pytest.approx(1 / 8)


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1", "zbv"])
def test_stages_that_share_processors(name):
    """With a processor each nothing changes; with fewer the stages that compute while others wait go faster."""
    pipeline = Pipeline(4, name)
    times = {chunk: Times(1.0, 2.0, 1.0, 0.1) for chunk in range(len(pipeline.stage_of))}
    alone = idle_time(pipeline, times, 8)
    assert idle_time(pipeline, times, 8, processors=4).seconds == pytest.approx(alone.seconds)
    assert idle_time(pipeline, times, 8, processors=4).busy == pytest.approx(alone.busy)
    two = idle_time(pipeline, times, 8, processors=2)
    assert alone.busy <= two.seconds < alone.seconds, "never below the work of all stages on two processors"
    assert two.busy < alone.busy
    one = idle_time(pipeline, times, 8, processors=1)
    assert one.seconds == pytest.approx(alone.busy, rel=0.01), "one processor is never idle"


def test_the_heaviest_rank_of_a_stage_is_on_that_stage():
    muon = (("optimizer", {"type": "Muon", "params": {"lr": 1e-3}}),)
    plan = _planned(Cell(1, accumulation=4, more=muon))
    assert [part.kind.stage for part in plan.parts] == [0, 1]
    assert [plan.mesh.coordinate(part.kind.rank)["pipe"] for part in plan.parts] == [0, 1]
    assert sum("which orthogonalizes the largest matrix" in notice for notice in plan.notices) == 2


def test_what_cannot_be_cut():
    with pytest.raises(DeepSpeedConfigError, match="has 5 layers .* fewer than the 6 stages"):
        _planned(Cell(1), pipe=6)
    with pytest.raises(DeepSpeedConfigError, match="has 5 layers .* the 4 stages of 2 chunks each need; .* most 2 s"):
        _planned(Cell(1), pipe=4, schedule="zbv")
    with pytest.raises(DeepSpeedConfigError, match="schedule='best' is not known; choose one of 'gpipe', '1f1b'"):
        _planned(Cell(1), schedule="best")
    with pytest.raises(DeepSpeedConfigError, match="pipeline 3 takes groups of 3 ranks, which do not divide the 4"):
        deepspeed.plan(SHAPE, Cell(1).config(""), devices_per_node=4, device="cpu", device_memory="1GiB", pipe=3)
    with pytest.raises(
        DeepSpeedConfigError, match="Linear cannot be cut into stages here; give a decoder by its sizes"
    ):
        deepspeed.plan(torch.nn.Linear(2, 2), Cell(1).config(""), devices_per_node=2, pipe=2)


def test_stages_of_a_transformers_model_that_a_callable_makes():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)

    def planned(model):
        return deepspeed.plan(model, Cell(1).config(""), devices_per_node=2, pipe=2, sequence_length=16, suggest=False)

    made, stated = planned(lambda: transformers.LlamaForCausalLM(config)), planned(config)
    assert [part.layers for part in made.parts] == [part.layers for part in stated.parts]
    assert made.timed_step.seconds == stated.timed_step.seconds


def test_stages_of_a_transformers_model_whose_ranks_share_sequences():
    """Each rank sends the activations of its half of the tokens, with their positions."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 128}
    model = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    whole, half = (plan(model, devices_per_node=4, accumulation=2, pipe=2, sequence=ranks) for ranks in (1, 2))
    sent = [one.simulated.flow.requested_along["send", "pipe"][1] for one in (whole, half)]
    assert sent[0] / 2 < sent[1] < 0.7 * sent[0], "positions take 8 bytes per token beside the activations"
    assert half.simulated.flow.requested_along["all_to_all", "sequence"][0] > 0


def test_a_sweep_over_stages(capsys):
    sizes = ["--layers", "4", "--hidden", "64", "--heads", "4", "--vocab", "256", "--sequence-length", "64"]
    assert main([*sizes, "--devices", "4", "--sweep", "pipe=1,2,3", "stage=0,1"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("yes") == 4 and printed.count("refused") == 2
    assert main([*sizes, "--devices", "4", "--pipe", "2", "--sequence-length", "64"]) == 0
    printed = capsys.readouterr().out
    assert "pipe 2 x data 2" in printed and "Stages, 1f1b" in printed and "send (pipe)" in printed
