"""Steps of FSDP2 and DDP on the timeline (``benchmarks/peers_timeline.py``), beside this project's."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers_timeline import PeerCase, predict_both, record_peer
from deepspeed.plan import DecoderShape
from deepspeed.plan.timeline.replay import COMPUTE
from deepspeed.plan.timeline.step_trace import COMPUTE_STREAM, CollectiveEvent, MarkEvent, OperationEvent, WaitEvent

SHAPE = DecoderShape(layers=4, hidden=2048, heads=16, vocab=8192, kv_heads=4)
SHARDED = PeerCase("toy", SHAPE, 3, "fsdp2", sequence_length=4096)
SUMMED = PeerCase("toy", SHAPE, 1, "ddp", sequence_length=4096)
NODES = 2


def exposed(step) -> float:
    return sum(step.exposed.values())


@pytest.fixture(scope="module")
def sharded():
    return predict_both(SHARDED, NODES)


@pytest.fixture(scope="module")
def summed():
    return predict_both(SUMMED, NODES)


def test_stage_3_is_not_slower_than_fsdp2(sharded):
    ours, theirs = sharded
    assert ours.matmul == pytest.approx(theirs.matmul) and ours.attention == pytest.approx(theirs.attention)
    assert ours.seconds <= theirs.seconds
    assert exposed(ours) <= exposed(theirs)


def test_stage_3_without_overlap_is_slower_than_fsdp2(sharded):
    """An engine that does not gather ahead shows in the comparison, which is what that is for."""
    ours, theirs = sharded
    late, _ = predict_both(
        SHARDED, NODES, config={"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}}, theirs=theirs
    )
    assert late.seconds > ours.seconds
    assert exposed(late) > 1.1 * exposed(theirs)


def test_blocks_larger_than_the_default_limit_are_gathered_ahead(sharded, monkeypatch):
    _, theirs = sharded
    block = SHAPE.block_parameters
    monkeypatch.setattr("deepspeed.zero.gather.schedule._LEAST_LIVE", block)
    large, _ = predict_both(SHARDED, NODES, theirs=theirs)
    assert exposed(large) <= exposed(theirs)
    limited = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": block}}
    late, _ = predict_both(SHARDED, NODES, config=limited, theirs=theirs)
    assert exposed(late) > exposed(theirs)


def test_stage_1_is_not_slower_than_ddp(summed):
    ours, theirs = summed
    assert ours.matmul == pytest.approx(theirs.matmul)
    assert ours.seconds <= theirs.seconds
    assert theirs.update > 5 * ours.update, "every rank updates everything"
    whole = {"zero_optimization": {"stage": 1, "overlap_comm": False}}
    late, _ = predict_both(SUMMED, NODES, config=whole, theirs=theirs)
    assert exposed(late) > 1.2 * exposed(ours)


def test_fsdp2_gathers_beside_computation_by_its_streams(sharded):
    _, theirs = sharded
    gathers = [span for span in theirs.spans if span.name.startswith("all_gather of")]
    assert len(gathers) == (1 + SHAPE.layers + 1) + (SHAPE.layers + 1), "embedding, blocks, head; without the head"
    computing = [span for span in theirs.spans if span.stream == COMPUTE and not span.name.startswith("waits")]
    beside = sum(any(c.start < g.end and g.start < c.end for c in computing) for g in gathers)
    assert beside >= 0.7 * len(gathers)


def test_collectives_of_fsdp2_have_streams_of_their_own():
    events = record_peer(SHARDED, 16)
    starts = [event for event in events if isinstance(event, CollectiveEvent)]
    in_forward = {event.stream for event in starts[: SHAPE.layers + 2]}
    reduces = {event.stream for event in starts if event.name == "reduce_scatter"}
    assert COMPUTE_STREAM not in in_forward | reduces and in_forward.isdisjoint(reduces)
    weights = SHAPE.parameters * 2
    moved = Counter()
    for event in starts:
        moved[event.name] += event.nbytes
    assert moved["reduce_scatter"] == pytest.approx(weights, rel=0.01)
    kept = 2 * SHAPE.vocab * SHAPE.hidden  # the head is gathered once
    assert moved["all_gather"] == pytest.approx(2 * weights - kept, rel=0.01)
    assert not hasattr(torch, "meta") and not dist.is_initialized()


def test_ddp_sums_buckets_of_25_mb_while_backward_runs():
    events = record_peer(SUMMED, 16)
    phases = [event.phase for event in events if isinstance(event, MarkEvent)]
    assert phases == ["forward", "backward", "step"]
    starts = [(place, event) for place, event in enumerate(events) if isinstance(event, CollectiveEvent)]
    assert sum(event.nbytes for _, event in starts) == SHAPE.parameters * 2
    assert len(starts) > SHAPE.layers, "the buckets were rebuilt after the first step"
    largest = 2 * max(SHAPE.vocab * SHAPE.hidden, SHAPE.width * SHAPE.hidden)
    assert all(event.nbytes <= 25 * 2**20 + largest for _, event in starts)
    waits = [place for place, event in enumerate(events) if isinstance(event, WaitEvent)]
    between = [event for event in events[starts[0][0] : starts[-1][0]] if isinstance(event, OperationEvent)]
    assert len(between) > 10 * SHAPE.layers, "most of backward comes after the first sum has started"
    assert len(waits) == len(starts) and min(waits) > starts[-1][0]
