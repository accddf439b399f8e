"""The recorded step of a simulation, and the times that a replay gives it."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import deepspeed
from deepspeed.accelerator.devices import DEVICES, Device
from deepspeed.plan import DecoderShape, ParallelLayout, StepSetup, predict_step
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.layout import layout_of
from deepspeed.plan.prediction.network_model import NetworkModel
from deepspeed.plan.timeline.replay import COMPUTE, COPY_UP, FILE_READ, ReplayRunner, marked_parts
from deepspeed.plan.timeline.step_trace import (
    COMPUTE_STREAM,
    FINISHING_STREAM,
    CollectiveEvent,
    CopyEvent,
    FileEvent,
    FileWaitEvent,
    HostWaitEvent,
    MarkEvent,
    OperationEvent,
    StreamRecordEvent,
    StreamWaitEvent,
    WaitEvent,
)
from deepspeed.plan.values import arithmetic_of
from tests.plan.replaying import (
    CONFIG,
    DEVICE,
    GATHER,
    MACHINE,
    SHAPE,
    gather,
    moves,
    planned,
    replayed,
)


@pytest.mark.parametrize("is_causal", [False, True])
def test_only_causal_attention_counts_half(is_causal):
    """The kernel for fp32 has an argument before ``is_causal`` that is true in every training."""
    query = torch.zeros(1, 2, 8, 4, device="meta")
    kernel, args = torch.ops.aten._scaled_dot_product_efficient_attention.default, (None, True, 0.0, is_causal)
    cost = arithmetic_of(kernel, (query, query, query, *args), {}, kernel(query, query, query, *args))
    assert cost.is_causal is is_causal and cost.flops == 2 * 2 * 2 * 8 * 8 * 4


# -- the replay, with events made by hand ------------------------------------------------------------------------------


def test_an_exchange_is_waited_for_as_long_as_it_is_not_beside_computation():
    found = replayed(gather(1), moves(3), WaitEvent(1), moves(1))
    assert found.exposed["data"] == pytest.approx(GATHER - 3)
    assert found.seconds == pytest.approx(GATHER + 1)
    hidden = replayed(gather(1), moves(20), WaitEvent(1))
    assert hidden.exposed["data"] == 0
    assert hidden.seconds == pytest.approx(20)
    late = replayed(moves(3), gather(1), WaitEvent(1))
    assert late.exposed["data"] == pytest.approx(GATHER)


def test_exchanges_of_one_communicator_queue_and_those_of_two_do_not():
    one = replayed(gather(1), gather(2), WaitEvent(2))
    two = replayed(gather(1), gather(2, axis="tensor"), WaitEvent(2))
    assert one.seconds == pytest.approx(2 * GATHER)
    assert two.seconds == pytest.approx(GATHER)


def test_an_exchange_takes_from_the_computation_beside_it():
    found = replayed(gather(1), moves(20), WaitEvent(1), contention=0.5)
    assert found.seconds == pytest.approx(20 + GATHER / 2)
    assert found.exposed["data"] == pytest.approx(GATHER / 2)


def test_an_exchange_that_nobody_waits_for_ends_the_step():
    assert replayed(moves(1), gather(1)).seconds == pytest.approx(1 + GATHER)


def test_an_exchange_on_a_stream_of_its_own_starts_beside_what_computation_was_given_before():
    def step(stream):
        return replayed(
            moves(20),
            gather(1, stream=stream),
            WaitEvent(1, stream),
            StreamRecordEvent(1, stream),
            StreamWaitEvent(1, 0),
            moves(1),
        )

    assert step(0).exposed["data"] == pytest.approx(GATHER)
    assert step(1).exposed["data"] == 0
    assert step(1).seconds == pytest.approx(21)


def test_a_stream_waits_for_the_event_of_another_one_and_not_for_what_came_after_it():
    events = [moves(5), StreamRecordEvent(1, 0), moves(20), StreamWaitEvent(1, 1), gather(1, stream=1)]
    ends = [WaitEvent(1, 1), StreamRecordEvent(2, 1), StreamWaitEvent(2, 0)]
    assert replayed(*events, *ends).seconds == pytest.approx(25), "the gather runs from 5 s on"
    late = replayed(moves(20), StreamRecordEvent(1, 0), StreamWaitEvent(1, 1), gather(1, stream=1), *ends)
    assert late.exposed["data"] == pytest.approx(GATHER)


def test_computation_pays_once_for_an_exchange_of_another_stream():
    waits = [StreamRecordEvent(1, 1), StreamWaitEvent(1, 0), StreamRecordEvent(2, 1), StreamWaitEvent(2, 0)]
    found = replayed(gather(1, stream=1), WaitEvent(1, 1), moves(20), *waits, contention=0.5)
    assert found.exposed["data"] == pytest.approx(GATHER / 2)
    # Through a third stream too.
    through = [StreamRecordEvent(1, 1), StreamWaitEvent(1, 2), StreamRecordEvent(2, 2), StreamWaitEvent(2, 0)]
    found = replayed(gather(1, stream=1), WaitEvent(1, 1), moves(20), *through, contention=0.5)
    assert found.exposed["data"] == pytest.approx(GATHER / 2)


def test_operations_of_another_stream_are_waited_for_where_the_program_waits():
    copies = [moves(4, stream=1), StreamRecordEvent(1, 1), moves(3)]
    assert replayed(*copies, StreamWaitEvent(1, 0), moves(1)).seconds == pytest.approx(5)
    assert replayed(*copies, moves(2)).seconds == pytest.approx(5)


def test_an_operation_of_another_stream_slows_the_computation_beside_it():
    beside = [moves(4, stream=1), StreamRecordEvent(1, 1), moves(20), StreamWaitEvent(1, 0)]
    assert replayed(*beside, contention=0.5).seconds == pytest.approx(22)
    alone = [moves(4, stream=1), StreamRecordEvent(1, 1), StreamWaitEvent(1, 0), moves(20)]
    assert replayed(*alone, contention=0.5).seconds == pytest.approx(24)


def test_an_event_of_an_earlier_step_is_over():
    assert replayed(StreamWaitEvent(7, 0), StreamWaitEvent(7, 1), moves(1)).seconds == pytest.approx(1)


def test_the_device_waits_for_a_host_that_is_slower_or_reads():
    slow = replayed(*[moves(0.1)] * 10, launch=0.3)
    assert slow.host == pytest.approx(10 * 0.3 - 9 * 0.1, abs=0.1)
    ahead = replayed(*[moves(0.3)] * 10, launch=0.1)
    assert ahead.host == pytest.approx(0.1)
    reads = replayed(moves(1), HostWaitEvent(), moves(1))
    assert 0 < reads.host < 1e-4


def test_copies_and_updates_on_the_host():
    found = replayed(moves(2), CopyEvent(10**9, False), moves(3, is_on_host=True), CopyEvent(10**9, True), moves(1))
    on_host = 3e9 / (300e9 / 8)
    assert found.update == pytest.approx(on_host)
    assert found.copies == pytest.approx(2, rel=0.01), "down before the update and up behind it"
    assert found.seconds == pytest.approx(2 + 1 + on_host + 1 + 1)


def test_a_copy_beside_computation_is_waited_for_where_the_program_waits():
    up = CopyEvent(4 * 10**9, True, 2)
    late = replayed(moves(5), StreamRecordEvent(1, 0), StreamWaitEvent(1, 2), up, StreamRecordEvent(2, 2), moves(3),
                    StreamWaitEvent(2, 0), moves(1))  # fmt: skip
    assert late.copies == pytest.approx(1), "it runs beside the 3 s, from the end of the 5 s on"
    assert late.seconds == pytest.approx(5 + 4 + 1)
    never = replayed(up, StreamRecordEvent(2, 2), moves(9), StreamWaitEvent(2, 0), moves(1), contention=0.5)
    assert never.copies == 0 and never.seconds == pytest.approx(10), "copies slow nothing"
    both = replayed(up, CopyEvent(4 * 10**9, True, 3), StreamRecordEvent(2, 3), StreamWaitEvent(2, 0), moves(1))
    assert both.copies == pytest.approx(8), "one link to the device"
    ways = replayed(up, CopyEvent(4 * 10**9, False, 3), StreamRecordEvent(2, 3), StreamWaitEvent(2, 0), moves(1))
    assert ways.copies == pytest.approx(4), "and another one back"
    assert replayed(moves(1), up).copies == pytest.approx(3), "a copy that nobody waits for ends the step"


def test_the_host_waits_for_the_event_of_a_copy_and_not_for_all():
    down = CopyEvent(2 * 10**9, False, 2)
    events = [down, StreamRecordEvent(1, 2), CopyEvent(50 * 10**9, False, 2)]
    found = replayed(*events, HostWaitEvent(1), moves(3, is_on_host=True), moves(1))
    on_host = 3e9 / (300e9 / 8)
    assert found.update == pytest.approx(on_host)
    assert found.copies == pytest.approx(2 + (52 - 2 - on_host - 1), rel=1e-3), "before the update, and the last one"
    assert found.host < 1e-4


def test_the_host_waits_for_files_and_their_two_directions_do_not_queue():
    """Eight ranks share a disk of 8 GB/s, so a rank has 1 GB/s."""
    network = NetworkModel(replace(MACHINE, disk=8e9))

    def run(*events):
        return ReplayRunner(DeviceModel(DEVICE), network).run(events)

    read, write = FileEvent(1, 2 * 10**9, True), FileEvent(2, 10**9, False)
    assert run(read, FileWaitEvent(1)).files == pytest.approx(2.0)
    assert run(read, write, FileWaitEvent(1), FileWaitEvent(2)).seconds == pytest.approx(2.0)
    assert run(read, FileEvent(3, 10**9, True), FileWaitEvent(1), FileWaitEvent(3)).seconds == pytest.approx(3.0)
    beside = run(read, moves(1.5), FileWaitEvent(1), moves(1.0))
    assert beside.files == pytest.approx(0.5) and beside.seconds == pytest.approx(3.0)
    assert run(moves(1.0), FileEvent(4, 3 * 10**9, False)).seconds == pytest.approx(3.0), "the next step finds it busy"
    assert run(FileWaitEvent(9)).seconds == 0.0, "started before the step"


def test_parts_of_a_step():
    events = [MarkEvent("forward", 0), moves(1), MarkEvent("backward", 0), moves(2), moves(1)]
    assert [(mark.phase, len(part)) for mark, part in marked_parts(events)] == [("forward", 2), ("backward", 3)]


# -- a recorded step ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("degrees", "experts"), [({"tensor": 4}, 0), ({"tensor": 2}, 0), ({"ep": 4}, 4)])
def test_every_exchange_between_processors_is_recorded(degrees, experts):
    """Sums between tensor ranks take a call that gloo has of its own."""
    shape = DecoderShape(layers=2, hidden=64, heads=4, vocab=128, experts=experts)
    given = {"devices_per_node": 4, "sequence_length": 32, "suggest": False, "compare_checkpointing": False}
    config = {**CONFIG, "bf16": {"enabled": False}, "zero_optimization": {"stage": 0}}
    made = deepspeed.plan(shape, config, device="cpu", device_memory="8GB", **given, **degrees)
    starts = [event for event in made.simulated.trace if isinstance(event, CollectiveEvent)]
    asked = {key: calls for key, (calls, _) in made.simulated.flow.requested_along.items()}
    assert Counter((event.name, event.axis) for event in starts) == asked
    waits = {event.number for event in made.simulated.trace if isinstance(event, WaitEvent)}
    assert {event.number for event in starts} <= waits


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_every_exchange_of_the_flow_is_recorded_and_waited_for(stage):
    made = planned(stage)
    starts = [event for event in made.simulated.trace if isinstance(event, CollectiveEvent)]
    waits = [event.number for event in made.simulated.trace if isinstance(event, WaitEvent)]
    requested = {name: calls for name, (calls, _) in made.simulated.flow.requested.items()}
    assert Counter(event.name for event in starts) == requested
    assert {event.number for event in starts} <= set(waits)
    assert {event.ranks for event in starts} == {tuple(range(8))}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_follows_a_reduction_is_on_a_stream_of_its_own(stage):
    """As the transport does it on a device: it waits there, scales there, and computation waits for the event."""
    trace = planned(stage).simulated.trace
    reductions = {event.number for event in trace if isinstance(event, CollectiveEvent) and event.name != "all_gather"}
    finishing = {event.number for event in trace if isinstance(event, WaitEvent) and event.stream == FINISHING_STREAM}
    assert reductions and finishing == reductions
    assert any(event.stream == FINISHING_STREAM for event in trace if isinstance(event, OperationEvent))
    events = {event.record for event in trace if isinstance(event, StreamRecordEvent)}
    waited = {event.record for event in trace if isinstance(event, StreamWaitEvent) and event.stream == COMPUTE_STREAM}
    assert len(events) == len(reductions) and events == waited


def test_stage_3_gathers_a_layer_ahead():
    """Most gathers of a forward run while the layer before computes, as they were issued before it."""
    step = planned(3).timed_step
    gathers = [span for span in step.spans if span.name.startswith("all_gather")]
    computing = [span for span in step.spans if span.stream == COMPUTE and not span.name.startswith("waits")]
    beside = sum(any(c.start < g.end and g.start < c.end for c in computing) for g in gathers)
    assert beside >= 0.7 * len(gathers)


@pytest.mark.parametrize(("stage", "tensor"), [(3, 1), (2, 1), (1, 2)])
def test_the_simulation_and_the_layout_agree(stage, tensor):
    made = planned(stage, tensor=tensor, accumulation=4)
    layout = ParallelLayout(data=8 // tensor, tensor=tensor, stage=stage, accumulation=4)
    other = predict_step(StepSetup(SHAPE, layout, made.machine, 4096))
    step = made.timed_step
    assert step.matmul == pytest.approx(other.matmul, rel=0.08)
    assert step.attention == pytest.approx(other.attention, rel=0.01)
    assert step.seconds == pytest.approx(other.seconds, rel=0.25)


@pytest.mark.parametrize(("stage", "tensor"), [(3, 1), (1, 1), (1, 2)])
def test_what_runs_again_and_what_is_moved_agree_with_the_simulation(stage, tensor):
    """Torch does not repeat the last product of a block. The replay has no rotary embeddings, the layout has."""
    made = planned(stage, tensor=tensor, activation_checkpointing=True)
    given = {"data": 8 // tensor, "tensor": tensor, "stage": stage}
    other, megatron = (
        predict_step(StepSetup(SHAPE, ParallelLayout(**given, recompute="full", is_megatron=by), made.machine, 4096))
        for by in (False, True)
    )
    step = made.timed_step
    assert step.matmul == pytest.approx(other.matmul, rel=0.03 if tensor == 1 else 0.08)
    assert megatron.matmul > 1.05 * other.matmul
    assert step.traffic == pytest.approx(other.traffic, rel=0.2)


def test_the_step_is_not_faster_than_its_bound():
    for stage in (1, 3):
        made = planned(stage, nodes=2)
        assert made.timed_step.seconds > made.step_seconds


def test_nodes_that_links_join_have_no_network_between_them():
    made = planned(1, nodes=2, devices_per_node=4, device="gb200")
    assert all(moved.between == 0 and moved.inside > 0 for moved in made.transfers)
    assert made.timed_step.seconds > made.step_seconds


def test_micro_batches_that_are_not_simulated_count_like_the_first():
    few, many = (planned(1, accumulation=count).timed_step for count in (4, 12))
    assert many.matmul == pytest.approx(3 * few.matmul)
    assert many.update == pytest.approx(few.update)


def test_a_pipeline_waits_by_its_schedule():
    made = planned(1, pipe=2, accumulation=4)
    step = made.timed_step
    assert step.bubble > 0
    busy = step.seconds - step.bubble - step.update
    assert step.bubble == pytest.approx(made.idle.share * busy, rel=0.35)
    more = planned(1, pipe=2, accumulation=16).timed_step
    assert more.bubble / more.seconds < 0.5 * step.bubble / step.seconds


def test_offload_waits_for_the_host():
    plain = planned(2).timed_step
    offloaded = planned(
        2, config={"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    ).timed_step
    assert offloaded.update > 5 * plain.update
    assert offloaded.copies > 0


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_of_offloaded_states_are_waited_for_where_the_engine_waits(stage):
    host = {"device": "cpu", "pin_memory": True}
    section = {"stage": stage, "offload_optimizer": host, **({"offload_param": host} if stage == 3 else {})}
    made = planned(stage, config={"zero_optimization": section})
    end = max(span.end for span in made.timed_step.spans)
    assert made.timed_step.seconds == pytest.approx(end), "nothing counts twice"
    trace = made.simulated.trace
    copies = [event for event in trace if isinstance(event, CopyEvent)]
    assert copies and all(event.stream > FINISHING_STREAM for event in copies), "none on the stream of computation"
    ups, downs = ({event.stream for event in copies if event.is_up is way} for way in (True, False))
    assert ups and downs and not ups & downs, "one direction does not queue behind the other"
    recorded = {event.record: event.stream for event in trace if isinstance(event, StreamRecordEvent)}
    held_up = {
        recorded.get(event.record) for event in trace if isinstance(event, StreamWaitEvent) and event.stream == 0
    }
    read = {recorded.get(event.record) for event in trace if isinstance(event, HostWaitEvent)}
    assert held_up & ups, "computation waits for parameters that come up"
    assert (read | held_up) & downs, "the update waits for gradients that come down"


def test_offload_to_files_takes_the_time_of_the_disk():
    section = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}
    fast, slow = (planned(config={"zero_optimization": section}, disk=rate) for rate in (1e12, 1e9))
    step, flow = slow.timed_step, slow.simulated.flow
    busy = max(flow.read, flow.written) * 8 / 1e9
    assert step.files > 0 and step.seconds >= busy, "a disk that all ranks of the node share"
    assert step.seconds == pytest.approx(fast.timed_step.seconds + step.files, rel=0.15)
    assert step.seconds >= slow.step_seconds
    assert {FILE_READ, "writes of files"} <= {span.stream for span in step.spans}
    layout = layout_of({**CONFIG, "zero_optimization": section}, 8, pipeline=Pipeline(1))
    assert predict_step(StepSetup(SHAPE, layout, slow.machine, 4096)).seconds == pytest.approx(step.seconds, rel=0.05)


@pytest.mark.parametrize("states", ["none", "nvme"])
def test_parameters_in_files_are_read_a_layer_ahead_and_written_after_their_update(states):
    """The host waits for a read only before the gather of what was read; the layout takes as long as the replay."""
    nvme = {"device": "nvme", "nvme_path": "/nowhere"}
    zero = {"stage": 3, "offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": {**nvme, "device": states}}
    zero |= {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0}
    made = planned(config={"zero_optimization": zero}, disk=1e9)
    step, flow, trace = made.timed_step, made.simulated.flow, made.simulated.trace
    phase, order, busy = "", {"forward": [], "backward": [], "step": []}, {"forward": 0, "backward": 0, "step": 0}
    for event in trace:
        if isinstance(event, MarkEvent):
            phase = event.phase
        elif isinstance(event, FileEvent):
            order[phase].append(("read" if event.is_read else "write", event.number))
            busy[phase] += event.nbytes if event.is_read else 0
        elif isinstance(event, FileWaitEvent):
            order[phase].append(("wait", event.number))
    blocks = 2 * (SHAPE.parameters - 2 * SHAPE.vocab * SHAPE.hidden) / 8
    for phase in ("forward", "backward"):
        found, ahead = order[phase], 0
        assert {name for name, _ in found} == {"read", "wait"} and busy[phase] >= blocks
        for place, (name, number) in enumerate(found):
            if name == "wait":
                ahead += sum(other > number for kind, other in found[:place] if kind == "read")
                assert ("read", number) in found[:place]
        assert ahead >= SHAPE.layers - 1, "the next layer is being read while the host waits for one"
    assert {name for name, _ in order["step"]} >= {"write", "wait"}
    seconds = (flow.read + flow.written) * 8 / 1e9  # reads of the step end before its writes begin
    if states == "none":
        assert step.seconds == pytest.approx(seconds, rel=0.1)
    assert step.files > 0.9 * max(flow.read, flow.written) * 8 / 1e9
    layout = layout_of({**CONFIG, "zero_optimization": zero}, 8, pipeline=Pipeline(1))
    assert predict_step(StepSetup(SHAPE, layout, made.machine, 4096)).seconds == pytest.approx(step.seconds, rel=0.1)


def test_parameters_beyond_max_in_cpu_are_read_from_files():
    nvme = {"device": "nvme", "nvme_path": "/nowhere"}

    def seconds(**param):
        zero = {"stage": 3, "offload_optimizer": nvme, "offload_param": {**nvme, **param}}
        layout = layout_of({**CONFIG, "zero_optimization": zero}, 8, pipeline=Pipeline(1))
        return predict_step(StepSetup(SHAPE, layout, replace(MACHINE, device=DEVICES["h100"], disk=1e9), 4096)).seconds

    # Bytes of all ranks by the disk of the node: read in forward and in backward, written by the update.
    moved = 3 * 2 * SHAPE.parameters / 1e9
    assert 0.7 * moved < seconds(max_in_cpu=0) - seconds() < moved


def test_products_in_fp8_take_the_time_of_the_layout():
    plain, fast = (planned(3, fp8=fp8, accumulation=2) for fp8 in (False, True))
    layouts = (ParallelLayout(data=8, stage=3, accumulation=2, is_fp8=fp8) for fp8 in (False, True))
    slower, faster = (predict_step(StepSetup(SHAPE, layout, fast.machine, 4096)).seconds for layout in layouts)
    assert plain.timed_step.seconds - fast.timed_step.seconds == pytest.approx(slower - faster, rel=0.15)
    assert fast.step_seconds == pytest.approx(plain.step_seconds / 2, rel=0.01), "the bound is that of fp8"
    assert fast.simulated.peaks == plain.simulated.peaks


def test_a_ring_sends_keys_and_values_while_it_attends():
    """Each further rank of the ring costs a hop, which is waited for after the attention that runs beside it."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    made = deepspeed.plan(
        transformers.LlamaConfig(**sizes, **heads),
        {**CONFIG, "sequence_parallel_size": 4, "sequence_parallel": {"mode": "ring"}},
        devices_per_node=4,
        sequence_length=1024,
        suggest=False,
        compare_checkpointing=False,
    )
    trace = made.simulated.trace
    sends = [event for event in trace if isinstance(event, CollectiveEvent) and event.name == "send"]
    pair = 2 * 256 * 128 * 2  # bf16 keys and values of a rank's tokens
    assert {event.axis for event in sends} == {"sequence"} and {event.nbytes for event in sends} >= {pair}
    waits = {event.number: place for place, event in enumerate(trace) if isinstance(event, WaitEvent)}
    for hop in sends[:3]:
        beside = trace[trace.index(hop) : waits[hop.number]]
        assert any(isinstance(event, OperationEvent) for event in beside), "attention runs beside the hop"
    assert made.timed_step.exposed["sequence"] > 0


def test_a_hop_takes_as_long_as_a_send():
    hop = CollectiveEvent(1, "send", "sequence", 10**9, (0, 1, 2, 3))
    assert replayed(hop, WaitEvent(1)).exposed["sequence"] == pytest.approx(NetworkModel(MACHINE).send(1e9, 1))
    far = CollectiveEvent(1, "send", "sequence", 10**9, (0, 8, 16, 24))
    two = replace(MACHINE, nodes=4)
    found = ReplayRunner(DeviceModel(DEVICE), NetworkModel(two)).run([far, WaitEvent(1)])
    assert found.exposed["sequence"] == pytest.approx(NetworkModel(two).send(1e9, 8))


def test_offloaded_parameters_are_read_ahead():
    """Most of their copies run beside computation, as the engine asks for them a layer ahead."""
    host = {"device": "cpu", "pin_memory": True}
    step = planned(config={"zero_optimization": {"stage": 3, "offload_param": host}}, micro_batch=4).timed_step
    up = sum(span.end - span.start for span in step.spans if span.stream == COPY_UP)
    assert up > 0 and step.copies < 0.7 * up


def test_parts_add_up():
    made = planned(3, accumulation=3)
    read = made.to_dict()["predicted"]
    parts = [*read["compute_seconds"].values(), *read["exposed_seconds"].values()]
    parts += [read[f"{name}_seconds"] for name in ("host", "copy", "file", "bubble", "update")]
    assert math.isclose(sum(parts), read["step_seconds"])
    assert "A step is predicted to take" in made.table()


def test_no_timeline_without_rates():
    made = planned(1, device=Device("unknown", 10**11, 0.0, 0.0, 0.0, 0.0, "a test"))
    assert made.timed_step is None
    assert "predicted to take" not in made.table()
