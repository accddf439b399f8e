"""Pictures and traces of a simulated step."""

import itertools
import json
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import deepspeed
from deepspeed.accelerator.devices import DEVICES
from deepspeed.cli.plan import main
from deepspeed.plan.picture import step_svg, step_trace_json
from deepspeed.plan.timeline.replay import COMPUTE, FILE_READ
from deepspeed.plan.timeline.step_trace import (
    FileEvent,
    FileWaitEvent,
    StreamRecordEvent,
    StreamWaitEvent,
    WaitEvent,
)
from tests.plan.replaying import (
    CONFIG,
    GATHER,
    SHAPE,
    gather,
    moves,
    planned,
    replayed,
)


def test_pictures(tmp_path):
    step = planned(3, nodes=2).timed_step
    ranks = {"rank <0>": step.spans}
    picture = step_svg(step, ranks, "a <title>")
    root = ElementTree.fromstring(picture)  # well-formed
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"a <title>", "rank <0>: compute", "rank <0>: data"} <= texts and "#c8553d" in picture
    read = json.loads(step_trace_json(ranks))["traceEvents"]
    assert [event["args"]["name"] for event in read if event["name"] == "process_name"] == ["rank <0>"]
    names = {event["args"]["name"] for event in read if event["name"] == "thread_name"}
    assert names == {"compute", "data", "stream 1"}
    assert all(event["dur"] >= 0 for event in read if event["ph"] == "X")


def check_trace(text):
    """Chrome's trace format, as Perfetto reads it: complete events, metadata, pairs of flow events.

    Every stream is named once. Returns the streams.
    """
    read = json.loads(text)
    assert read.keys() == {"traceEvents", "displayTimeUnit"}
    assert read["displayTimeUnit"] == "ns", "with ms, viewers nest spans of less than a microsecond in their neighbors"
    tracks, flows = {}, {}
    for event in read["traceEvents"]:
        if event["ph"] in ("s", "f"):
            flows.setdefault(event["id"], []).append(event)
            continue
        assert event["ph"] in ("X", "M") and isinstance(event["pid"], int), event
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            key = (event["pid"], event["tid"]) if event["name"] == "thread_name" else (event["pid"], None)
            assert key not in tracks, "named twice"
            tracks[key] = event["args"]["name"]
            continue
        assert event.keys() == {"ph", "pid", "tid", "name", "ts", "dur", "cat"}
        assert isinstance(event["tid"], int) and isinstance(event["name"], str) and event["name"]
        assert 0 <= event["ts"] < math.inf and 0 < event["dur"] < math.inf
        assert (event["pid"], event["tid"]) in tracks, "the stream has a name"
    for key in tracks:  # viewers nest what overlaps on a track, cut what overlaps in part, and lose its arrows
        own = [e for e in read["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == key]
        for one, other in itertools.pairwise(sorted(own, key=lambda event: event["ts"])):
            assert round(one["ts"] + one["dur"], 3) <= other["ts"], (tracks[key], one, other)
    spans = {}
    for event in read["traceEvents"]:
        if event["ph"] == "X":
            spans.setdefault((event["pid"], event["tid"]), []).append(event)
    assert flows, "dependencies are arrows"
    for start, finish in flows.values():
        assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert (start["name"], start["cat"]) == (finish["name"], finish["cat"])
        assert start["ts"] <= finish["ts"] + 0.01, "what is waited for is over before"
        for end in (start, finish):
            own = spans[end["pid"], end["tid"]]
            assert any(span["ts"] <= end["ts"] < span["ts"] + span["dur"] for span in own), "inside a span"
    return tracks


def arrows(text):
    """Returns the names of streams at both ends of each arrow of a trace, with the arrow's name."""
    events = json.loads(text)["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    ends = [[event for event in events if event["ph"] == kind] for kind in "sf"]
    pairs = zip(*(sorted(each, key=lambda event: event["id"]) for each in ends), strict=True)
    return {(names[a["pid"], a["tid"]], a["pid"], a["name"], names[b["pid"], b["tid"]], b["pid"]) for a, b in pairs}


def test_arrows_lead_from_what_starts_an_exchange_to_it_and_to_what_waits_for_it():
    found = replayed(moves(1), gather(1), moves(2), WaitEvent(1), moves(4))
    first, second, last = [span for span in found.spans if span.name == "add"]
    exchange = next(span for span in found.spans if span.stream == "data")
    flows = {(flow.source, flow.target) for flow in found.flows}
    assert flows == {(first, exchange), (exchange, last)} and exchange.end <= last.start < second.end + GATHER


def test_arrows_lead_through_events_of_streams_and_files():
    beside = [StreamRecordEvent(1, 0), StreamWaitEvent(1, 1), gather(1, stream=1), WaitEvent(1, 1)]
    found = replayed(moves(1), *beside, moves(1), StreamRecordEvent(2, 1), StreamWaitEvent(2, 0), moves(4))
    exchange = next(span for span in found.spans if span.stream == "data")
    assert [(flow.source.end, flow.target.start) for flow in found.flows] == [
        (1, exchange.start),
        (exchange.end, pytest.approx(1 + GATHER)),
    ]
    read = replayed(FileEvent(1, 10**9, True), FileWaitEvent(1), moves(1))
    assert [(flow.source.stream, flow.target.stream) for flow in read.flows] == [(FILE_READ, COMPUTE)]


def test_arrows_lead_from_stage_to_stage():
    made = planned(1, pipe=2, accumulation=4)
    found = arrows(step_trace_json(made.streams.ranks, made.streams.flows))
    assert {(COMPUTE, 0, "activations", COMPUTE, 1), (COMPUTE, 1, "gradients", COMPUTE, 0)} <= found


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 3, "nodes": 2},
        {"stage": 3, "config": {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}},
        {"stage": 1, "pipe": 4, "accumulation": 8, "schedule": "zb-h1"},
    ],
)
def test_a_trace_is_what_perfetto_reads(options):
    streams = planned(**options).streams
    assert check_trace(step_trace_json(streams.ranks, streams.flows))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", None), ("interleaved", 2), ("zbv", None)])
def test_the_picture_of_a_simulated_pipeline_shows_its_critical_ranks(schedule, chunks):
    shape = replace(SHAPE, layers=8)
    given = {"pipe": 4, "schedule": schedule, "num_chunks": chunks, "accumulation": 8, "devices_per_node": 4}
    made = deepspeed.plan(
        shape,
        {**CONFIG, "zero_optimization": {"stage": 1}},
        sequence_length=1024,
        suggest=False,
        compare_checkpointing=False,
        **given,
    )
    streams, step = made.streams, made.timed_step
    names = list(streams.ranks)
    assert names[0].startswith("stage 0") and names[-1].startswith("stage 3") and streams.drawn == 8
    busiest = next(spans for name, spans in streams.ranks.items() if "busiest" in name)
    end = max(span.end for span in busiest)
    assert end == pytest.approx(step.seconds, rel=0.02)
    computed = [span for span in busiest if span.stream == COMPUTE and not span.name.startswith("waits: other")]
    assert sum(span.end - span.start for span in computed) == pytest.approx(step.seconds - step.bubble, rel=0.02)
    assert check_trace(step_trace_json(streams.ranks, streams.flows))


def test_pictures_from_the_command_line(tmp_path, capsys):
    sizes = "--layers 2 --hidden 64 --heads 4 --vocab 128 --sequence-length 32 --devices 2".split()
    for name, begin in (("step.svg", "<svg"), ("step.json", '{"traceEvents"')):
        assert main([*sizes, "--picture", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(begin)
    assert main([*sizes, "--device", "other", "--device-memory", "8GB", "--picture", str(tmp_path / "x.svg")]) == 2
    assert "rates" in capsys.readouterr().err
    assert DEVICES["h100"].flops > 0
