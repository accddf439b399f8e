"""The memory of a predicted step by part, against numbers worked out by hand, plans that count, and published runs."""

import math
from dataclasses import replace

import pytest

import deepspeed
from benchmarks.published_runs import predicted, read_runs
from benchmarks.scale import without_recomputation
from deepspeed.accelerator.devices import DEVICES
from deepspeed.plan import DecoderShape, ParallelLayout, StepSetup, predict_step
from deepspeed.plan.machine import Machine
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.layout import layout_of
from deepspeed.plan.prediction.step_memory import MemoryParts
from deepspeed.zero.placement import Tier

SHAPE = DecoderShape(8, 1024, 8, 32000, kv_heads=2, intermediate=4096)
BLOCK = (1024 + 2 * 256 + 1024) * 1024 + 3 * 1024 * 4096  # elements: q, k, v, o, and three matrices
END = 32000 * 1024  # elements of the embedding, and of the head
TOKENS = 2 * 2048


def parts(*, shape=SHAPE, tokens=2048, **layout):
    made = ParallelLayout(**{"micro_batch": 2, **layout})
    each = min(made.ranks, 8)
    machine = Machine(DEVICES["h100"], made.ranks // each, each, DEVICES["h100"].memory)
    return predict_step(StepSetup(shape, made, machine, tokens)).memory


def test_states_by_hand():
    elements = 8 * BLOCK + 2 * END
    whole = parts(data=4, stage=0, accumulation=2).tensors
    assert whole["parameters"] == pytest.approx(2 * elements, rel=1e-3)  # but for norms
    assert whole["gradients"] == pytest.approx(2 * elements, rel=1e-3)
    assert whole["optimizer states"] == pytest.approx(12 * elements, rel=1e-3)
    third = parts(data=4, stage=3, accumulation=2, summed_bytes=4).tensors
    assert third["parameters"] == pytest.approx(2 * elements / 4, rel=1e-3)
    assert third["gradients"] == pytest.approx(4 * elements / 4, rel=1e-3)
    sharded = parts(data=4, stage=3, accumulation=2, is_fsdp=True).tensors
    assert sharded["parameters"] == 0, "FSDP casts the fp32 shards as it gathers them"
    assert sharded["gradients"] == pytest.approx(4 * elements / 4, rel=1e-3)
    assert "optimizer states" not in {name for name, _ in parts(data=4, stage=1, offload=True).rows()}


def test_gradients_of_one_micro_batch_do_not_exist_before_its_backward():
    assert parts(data=4, stage=2).tensors["gradients"] == 0
    assert parts(data=4, stage=2, accumulation=2).tensors["gradients"] > 0
    assert parts(data=4, stage=1, gradient_bytes=4).tensors["gradients"] > 0, "a buffer for sums in fp32 stays"


def test_the_end_of_the_backward_is_the_peak_where_activations_are_small():
    elements = 8 * BLOCK + 2 * END
    small = parts(data=1, stage=0, micro_batch=1, tokens=64).tensors
    assert small["gradients"] == pytest.approx(2 * elements, rel=1e-3)
    assert (
        small["activations"] < parts(data=1, stage=0, micro_batch=1, tokens=64, accumulation=2).tensors["activations"]
    ), "one block's"


def test_logits_by_hand():
    scores = TOKENS * 32000
    found = parts(data=4, stage=0)
    # In fp32: logarithms of probabilities, their gradient, that of the logits. In 16 bits: the inputs of norm and head.
    assert found.tensors["logits and loss"] == 12 * scores + 2 * TOKENS * 1024
    assert found.cached == 2 * scores, "the 16-bit logits are free, in a block too small for fp32"
    fused = parts(data=4, stage=0, has_fused_loss=True)
    assert fused.cached == 0
    assert fused.tensors.get("logits and loss", 0) <= 4 * scores + 2 * TOKENS * 1024


def test_activations_by_hand():
    each = 2 * TOKENS  # bytes of an element of every token
    inputs, attention = 4 * 1024, 2 * 1024 + 2 * 256  # of two norms and of what follows; queries, result, keys, values
    width = 3 * 4096  # gate, rise, and the product of both
    found = parts(data=4, stage=0, is_compiled=True).tensors["activations"]
    assert found == 8 * each * (inputs + attention + width)
    repeated = parts(data=4, stage=0).tensors["activations"]
    assert repeated == 8 * each * (inputs + 4 * 1024 + 4 * 4096), "keys and values for each head, and silu's result"
    assert parts(data=4, stage=0, recompute="full").tensors["activations"] == 8 * each * 1024
    selective = parts(data=4, stage=0, recompute="selective").tensors["activations"]
    assert selective == 8 * each * (1024 + 1024 + 1024 + 256 + 4096)  # input; attention; q, v, gate


def test_work_of_a_block_that_runs_again_is_what_it_keeps_otherwise():
    each = 2 * TOKENS
    # Without a loss at the peak: a vocabulary of no size.
    small = replace(SHAPE, vocab=16)
    again = parts(shape=small, data=4, stage=0, recompute="full").tensors["work of a block's backward"]
    gradients = each * (3 * 4096 + 2 * 1024)
    assert again == gradients + each * (4 * 1024 + 4 * 1024 + 4 * 4096) - each * 1024


def test_gathered_layers_by_hand():
    ours = parts(data=4, stage=3).tensors["gathered layers"]
    assert ours == pytest.approx(2 * (8 * BLOCK + 2 * END), rel=1e-3), "less than what is used again stays gathered"
    large = DecoderShape(80, 8192, 64, 128256, kv_heads=8, intermediate=28672)
    block = (2 * 8192 + 2 * 1024) * 8192 + 3 * 8192 * 28672
    found = parts(shape=large, data=64, stage=3, tokens=8192).tensors
    assert found["gathered layers"] == pytest.approx(2 * (block + 128256 * 8192), rel=1e-3)
    fsdp = parts(shape=large, data=64, stage=3, tokens=8192, is_fsdp=True).tensors
    assert fsdp["gathered layers"] == pytest.approx(2 * (2 * block + 2 * 128256 * 8192), rel=1e-3)


def test_a_pipeline_that_returns_its_outputs_keeps_the_logits_of_all_micro_batches():
    scores = TOKENS * 32000
    kept = parts(pipe=2, accumulation=8, keeps_outputs=True)
    assert kept.tensors["logits of all micro-batches"] == 8 * 4 * scores
    assert kept.reserved > parts(pipe=2, accumulation=8).reserved + 7 * 4 * scores


def test_fsdp_has_no_gradients_of_a_chunk_before_its_first_backward():
    """The last of 2 stages has chunks 1 and 3. During the loss only gradients of chunk 3 and the head exist."""
    given = {"pipe": 2, "chunks": 2, "schedule": "interleaved", "stage": 1, "is_fsdp": True, "gradient_bytes": 4}
    one_group, two_groups = (parts(accumulation=count, **given) for count in (2, 4))
    loss, later = one_group.tensors, two_groups.tensors
    assert loss["logits and loss"] == later["logits and loss"], "the loss is the peak in both"
    assert later["gradients"] == pytest.approx(4 * (4 * BLOCK + END), rel=1e-3)
    assert loss["gradients"] == pytest.approx(4 * (2 * BLOCK + END), rel=1e-3)
    buffers = parts(accumulation=2, **{**given, "is_fsdp": False})
    assert buffers.tensors["gradients"] == later["gradients"], "others have buffers for gradients from the start"
    many = parts(shape=replace(SHAPE, layers=128), accumulation=2, recompute="full", **given).tensors
    assert many["gradients"] == pytest.approx(4 * (64 * BLOCK + END), rel=1e-3), "the peak is chunk 1's backward"
    assert "logits and loss" not in many and many["work of a block's backward"] > 0


def test_communicators_and_headroom():
    one = parts(data=8, stage=1).communicators
    assert one == 160 * 2**20, "16 channels, ring and tree, 5 MiB each; all ranks are one group"
    assert parts(data=2, tensor=2, pipe=2, accumulation=2).communicators == 4 * one, "three axes, and all ranks"
    assert parts(data=1, stage=0).communicators == 0
    made = MemoryParts({"parameters": 10.0, "activations": 20.0}, gaps=2.0, cached=5.0, context=1.0, communicators=1.0)
    assert made.needed(3.0) == 34.0, "what is free but cached is given back before memory runs out"
    assert made.needed(9.0) == 39.0
    assert made.reserved == 37.0


_HOST = {"device": "cpu"}


@pytest.mark.parametrize(
    ("stage", "offload"),
    [
        *((stage, {}) for stage in (0, 1, 2, 3)),
        (2, {"offload_optimizer": _HOST}),
        (3, {"offload_optimizer": _HOST, "offload_param": _HOST}),
    ],
)
def test_parts_agree_with_a_plan_that_counts_every_tensor(stage, offload):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, **offload},
    }
    shape = replace(SHAPE, layers=2)
    plan = deepspeed.plan(
        shape, config, devices_per_node=4, sequence_length=2048, suggest=False, compare_checkpointing=False
    )
    layout = layout_of(config, 4, pipeline=Pipeline(1))
    made = predict_step(StepSetup(shape, layout, plan.machine, 2048)).memory
    counted = plan.simulated.peaks[Tier.DEVICE].nbytes
    assert sum(made.tensors.values()) == pytest.approx(counted, rel=0.03)


def test_published_memory_and_what_did_not_fit():
    runs = read_runs()
    errors = {run.name: run.memory_of(predicted(run)) / run.memory - 1 for run in runs if run.memory is not None}
    assert len(errors) == 12
    assert max(map(abs, errors.values())) < 0.10, errors
    too_large = [run for run in runs if run.unrecomputed is not None]
    assert len(too_large) == 4
    for run in too_large:
        step = without_recomputation(run)
        assert not step.fits, run.name
        assert math.isclose(step.state_bytes + step.activation_bytes, run.unrecomputed, rel_tol=0.02)
