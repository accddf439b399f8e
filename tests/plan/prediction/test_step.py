"""Predicted steps: what must follow from physics, layouts, search, pictures and the command line."""

import collections
import itertools
import json
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

import deepspeed
from deepspeed.accelerator.devices import DEVICES
from deepspeed.cli.plan import main
from deepspeed.cli.predict import prediction_picture
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError, DeepSpeedError
from deepspeed.plan import DecoderShape, ParallelLayout, StepSetup, predict_step, search_layouts
from deepspeed.plan.machine import Machine, read_machine_file, read_network, write_machine_file
from deepspeed.plan.pipeline import Pipeline
from deepspeed.plan.prediction.device_model import DeviceModel
from deepspeed.plan.prediction.layout import layout_of
from deepspeed.plan.prediction.network_model import NetworkModel, RankGroup
from deepspeed.plan.prediction.step import costs_turned_off, layers_of_chunks
from deepspeed.plan.timeline.predicted_streams import predicted_streams
from deepspeed.plan.timeline.replay import COMPUTE, HOST

LLAMA_8B = DecoderShape(32, 4096, 32, 128256, kv_heads=8, intermediate=14336)
LLAMA_70B = DecoderShape(80, 8192, 64, 128256, kv_heads=8, intermediate=28672)
GPT_22B = DecoderShape(48, 6144, 64, 51200, intermediate=24576, is_gated=False, has_fused_attention=False, dropout=0.1)


def machine(ranks=8, device="h100", **more):
    each = min(ranks, 8)
    return Machine(DEVICES[device], ranks // each, each, DEVICES[device].memory, **more)


def step(shape=LLAMA_8B, tokens=8192, device="h100", **layout):
    made = ParallelLayout(**{"data": 8, "stage": 3, **layout})
    return predict_step(StepSetup(shape, made, machine(made.ranks, device), tokens))


def test_states_of_a_published_model():
    """Korthikanti et al., 2205.05198: 175B over 64 ranks, 18 bytes of states per element."""
    shape = DecoderShape(96, 12288, 96, 51200, intermediate=49152, is_gated=False)
    made = step(shape, 2048, data=1, stage=0, tensor=8, pipe=8, accumulation=64, gradient_bytes=4, device="a100")
    ends = 2 * 51200 * 12288 / 8 * 18  # the embedding is on the first stage, the head on the last
    states = [8 * made.state_bytes - 8 * ends / 2 + ends]
    assert math.isclose(states[0], 18 * shape.parameters / 8, rel_tol=0.01)


@pytest.mark.parametrize("stage", [1, 2])
def test_the_engine_waits_for_updated_parameters(stage):
    waits, beside = (step(stage=stage, overlaps_gather=overlaps) for overlaps in (False, True))
    gather = NetworkModel(machine()).gather(2 * LLAMA_8B.parameters, RankGroup(8))
    slowed = DEVICES["h100"].efficiency.contention * gather
    assert waits.seconds - beside.seconds == pytest.approx((gather - slowed) * (1 - 1 / LLAMA_8B.layers), rel=0.01)


# -- physics -----------------------------------------------------------------------------------------------------------


def test_products_take_longer_per_operation_where_a_side_is_short():
    model = DeviceModel(DEVICES["a100"])
    rates = [model.matmul(8192, n, 4096) / n for n in (64, 512, 4096)]
    assert rates == sorted(rates, reverse=True)
    peak = 2 * 8192 * 4096 * 4096 / model.matmul(8192, 4096, 4096)
    assert peak < 0.85 * DEVICES["a100"].flops
    assert model.matmul(1, 4096, 4096) >= 2 * 4096 * 4096 / DEVICES["a100"].memory_bandwidth, "weights must be read"
    assert model.matmul(64, 64, 64, fp8=True) == model.matmul(64, 64, 64), "an A100 has no fp8"


def test_collectives_follow_the_slowest_link_and_their_hops():
    network = NetworkModel(machine(64, network=25e9))
    inside = network.gather(1e9, RankGroup(8))
    assert math.isclose(inside, 7 / 8 * 1e9 / (450e9 * DEVICES["h100"].efficiency.link), rel_tol=0.05)
    assert network.spread(RankGroup(8, 8)) == (8, 1)
    assert network.gather(1e9, RankGroup(8, 8)) > 5 * inside, "each has a share of the network alone"
    assert network.gather(1e9, RankGroup(64)) < network.gather(1e9, RankGroup(8, 8)), "eight adapters share the way"
    small = [NetworkModel(machine(n)).gather(1e3, RankGroup(n)) for n in (16, 64, 512)]
    assert small == sorted(small)
    assert network.all_reduce(1e9, RankGroup(8)) > 1.9 * inside
    assert network.gather(1e9, RankGroup(1)) == 0


def test_a_sum_between_processors_starts_twice():
    efficiency = replace(DEVICES["h100"].efficiency, start=1e-3)
    times = []
    for cores in (0, 2):
        device = replace(DEVICES["h100"], cores=cores, efficiency=efficiency)
        times.append(NetworkModel(Machine(device, 1, 4, 10**9)).all_reduce(1e6, RankGroup(4)))
    assert times[1] - times[0] == pytest.approx(1e-3, rel=0.01)


def test_activations_of_processors_go_through_shared_memory():
    efficiency = replace(DEVICES["h100"].efficiency, start=2e-3, shared_link=2e9, shared_start=1e-4)
    shared = NetworkModel(Machine(replace(DEVICES["h100"], cores=2, efficiency=efficiency), 2, 4, 10**9))
    near, far = RankGroup(4), RankGroup(8)
    assert shared.sum_of_activations(4e5, near) == pytest.approx(3 * 4e5 / 2e9 + 1e-4)
    assert shared.exchange_of_activations(4e5, near) == pytest.approx(3e5 / 2e9 + 1e-4)
    assert shared.sum_of_activations(4e5, far) == shared.all_reduce(4e5, far), "the ranks are on two nodes"
    assert shared.all_reduce(4e5, near) > 2e-3 > shared.sum_of_activations(4e5, near)
    plain = NetworkModel(machine(8))
    assert plain.sum_of_activations(4e5, far) == plain.all_reduce(4e5, far)
    assert plain.exchange_of_activations(4e5, far) == plain.all_to_all(4e5, far)
    assert shared.sum_of_activations(4e5, RankGroup(1)) == shared.sum_of_activations(0, near) == 0


def test_a_link_domain_may_span_nodes():
    rack = Machine(DEVICES["gb200"], 16, 4, DEVICES["gb200"].memory)
    assert NetworkModel(rack).spread(RankGroup(64)) == (1, 64)


def test_stage_3_falls_with_devices_at_a_fixed_batch_and_3d_does_not():
    def efficiency(ranks, **layout):
        made = step(LLAMA_70B, 2048, **layout)
        assert made.setup.layout.ranks == ranks
        return made.model_flops

    zero = [efficiency(n, data=n, micro_batch=1024 // n, recompute="full") for n in (64, 256, 1024)]
    cut = [
        efficiency(n, data=n // 32, tensor=8, pipe=4, stage=1, accumulation=1024 // (n // 32), recompute="full")
        for n in (64, 256, 1024)
    ]
    assert zero[0] > 1.3 * zero[2]
    assert cut[2] > 0.85 * cut[0], "fewer micro-batches, longer idle"


def test_costs_are_where_the_layout_puts_them():
    plain = step(stage=1, data=8)
    assert set(plain.exposed) == {"data"}
    assert plain.bubble == 0
    assert step(stage=1, data=4, tensor=2).exposed["tensor"] > 0
    assert step(stage=1, data=4, pipe=2, accumulation=4).bubble > 0
    assert (
        step(stage=1, data=4, pipe=2, accumulation=64).bubble
        < 1.2 * step(stage=1, data=4, pipe=2, accumulation=4).bubble
    )
    assert step(recompute="full").seconds > step(recompute="selective").seconds > step().seconds
    assert (
        step(recompute="full").activation_bytes < step(recompute="selective").activation_bytes < step().activation_bytes
    )
    assert step(is_fp8=True).matmul < 0.75 * step().matmul
    experts = replace(LLAMA_8B, experts=8, intermediate=4096)
    assert step(experts, stage=1, experts=8).exposed["expert"] > 0
    assert step(experts, stage=1, experts=8, imbalance=2.0).seconds > step(experts, stage=1, experts=8).seconds
    ring = step(tokens=65536, data=4, context=2)
    assert ring.attention < 1.1 * step(tokens=65536, data=8).attention / 2 * 1.0
    assert step(tokens=65536, data=4, context=2, balances_ring=False).attention == pytest.approx(1.5 * ring.attention)
    assert step(offload=True).state_bytes < 0.5 * step().state_bytes
    assert step(offload=True).update > step().update
    assert step(shard_ranks=4).state_bytes > 1.4 * step().state_bytes


def test_what_programs_do_otherwise_costs_what_it_moves_or_computes():
    device, elements = DeviceModel(DEVICES["h100"]), LLAMA_8B.parameters
    given = {"stage": 1, "accumulation": 4}
    summed = step(**given, gradient_bytes=4).traffic - step(**given, gradient_bytes=4, sums_in_products=True).traffic
    assert summed == pytest.approx(4 * device.traffic(10 * elements), rel=0.01), "gradient read, sum read and written"
    once = step(**{**given, "accumulation": 1}).traffic - step(stage=1, sums_in_products=True).traffic
    assert once == pytest.approx(device.traffic(4 * elements), rel=0.01), "into the buffer of the exchange"
    gathered = step(is_fsdp=True).traffic - step().traffic
    assert gathered == pytest.approx(device.traffic(8 * elements), rel=0.01), "out of a buffer in both passes"
    cast, kept = (step(**given, is_fp8=True, is_megatron=megatron).traffic for megatron in (False, True))
    blocks = 32 * (LLAMA_8B.block_parameters - 2 * 4096)
    assert cast - kept == pytest.approx(3 * device.traffic(4 * blocks), rel=0.01)
    cut = {"stage": 1, "data": 4, "tensor": 2, "cuts_norms": True}
    ordered = step(**cut).traffic - step(**cut, is_megatron=True).traffic
    assert ordered == pytest.approx(device.traffic(32 * 2 * 16 * 8192 * 4096), rel=0.01)


EXPERTS = DecoderShape(4, 2048, 16, 8192, kv_heads=4, intermediate=1024, experts=32, experts_per_token=8)


@pytest.mark.parametrize(("stage", "ep"), [(1, 4), (3, 1), (3, 4), (3, 16)])
def test_parameters_of_experts_are_exchanged_among_the_ranks_that_have_them(stage, ep):
    """At stage 3 a rank gathers all experts that it has; what is predicted is not below the bound of a plan."""
    layout = ParallelLayout(data=16, stage=stage, experts=ep, accumulation=4, gradient_bytes=4)
    made = predict_step(StepSetup(EXPERTS, layout, machine(16), 64))
    network, elements = NetworkModel(machine(16)), 4 * 32 * EXPERTS.expert_parameters / ep
    sharers = RankGroup(16 // ep, ep)
    if ep == 4:
        passes = 4 if stage == 3 else 1
        once = network.gather(4 * elements, sharers) + (2 if stage == 3 else 1) * network.gather(2 * elements, sharers)
        assert made.exposed["data"] == pytest.approx(passes * once, rel=0.25), "tokens are few, nothing is hidden"
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 0},
    }
    given = {"nodes": 2, "devices_per_node": 8, "sequence_length": 64, "compare_checkpointing": False}
    assert made.seconds > deepspeed.plan(EXPERTS, config, ep=ep, suggest=False, **given).step_seconds


@pytest.mark.parametrize("stage", [1, 3])
def test_a_prediction_below_its_lower_bound_is_an_error(stage, monkeypatch):
    setup = StepSetup(EXPERTS, ParallelLayout(data=16, stage=stage), machine(16, network=1e8), 64)
    made = predict_step(setup)
    assert made.seconds > max(made.lower_bounds.values()) == made.to_dict()["step_seconds_at_least"] > 0
    monkeypatch.setattr(NetworkModel, "gather", lambda *_: 0.0)
    with pytest.raises(DeepSpeedError, match=r"network between nodes alone takes at least .* report the command"):
        predict_step(setup)


def test_a_plan_below_its_lower_bound_is_an_error(monkeypatch):
    shape = DecoderShape(2, 256, 4, 128)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    made = deepspeed.plan(shape, config, nodes=64, sequence_length=8, suggest=False, network=1e6)
    monkeypatch.setattr(NetworkModel, "gather", lambda *_: 0.0)
    with pytest.raises(DeepSpeedError, match="network between nodes alone takes at least"):
        _ = made.timed_step


def test_a_token_crosses_the_network_once_for_each_node():
    """Of 8 copies for experts on 2 nodes one crosses, with a probability of 1 - 1 / 2^8; on 32 nodes 6.9 do."""
    for nodes, share in ((2, (1 - 2**-8) / 4), (32, 31 * (1 - (31 / 32) ** 8) / 7.75)):
        network, group = NetworkModel(machine(8 * nodes, network=1e9)), RankGroup(8 * nodes)
        each, once = (network.all_to_all(1e9, group, copies=copies) for copies in (1, 8))
        assert once / each == pytest.approx(share, rel=0.02)
    inside = NetworkModel(machine(8))
    assert inside.all_to_all(1e9, RankGroup(8), copies=8) == inside.all_to_all(1e9, RankGroup(8))
    layouts = (ParallelLayout(data=16, stage=1, experts=16, sends_once_per_node=once) for once in (False, True))
    slow, fast = (predict_step(StepSetup(EXPERTS, layout, machine(16), 4096)).exposed["expert"] for layout in layouts)
    assert fast < 0.5 * slow


def test_the_host_starts_operations_of_each_expert():
    """With a few tokens the device waits for the host, as it does in a replay of the recorded step."""
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    given = {"devices_per_node": 8, "sequence_length": 16, "suggest": False, "compare_checkpointing": False}
    for ep in (1, 8):
        plan = deepspeed.plan(replace(EXPERTS, layers=8, intermediate=256), config, ep=ep, **given)
        layout = ParallelLayout(data=8, stage=1, experts=ep)
        made = predict_step(StepSetup(replace(EXPERTS, layers=8, intermediate=256), layout, plan.machine, 16))
        assert made.host == pytest.approx(plan.timed_step.host, rel=0.45), ep
        assert made.host > 0.4 * made.seconds


def test_torch_does_not_repeat_the_end_of_a_block():
    device = DeviceModel(DEVICES["h100"])
    whole, torch_s = (step(recompute="full", is_megatron=megatron) for megatron in (True, False))
    last = device.matmul(8192, 4096, 14336)
    assert whole.matmul - torch_s.matmul == pytest.approx(32 * last, rel=1e-6)
    assert whole.flops - torch_s.flops == pytest.approx(32 * 2 * 8192 * 4096 * 14336)
    cut = {"stage": 1, "data": 1, "tensor": 8, "recompute": "full"}
    whole, torch_s = (step(**cut, is_megatron=megatron) for megatron in (True, False))
    once = NetworkModel(machine()).all_reduce(2 * 8192 * 4096, RankGroup(8))
    assert whole.exposed["tensor"] - torch_s.exposed["tensor"] == pytest.approx(32 * once, rel=1e-6)


def test_schedules_with_a_split_backward_wait_less_and_keep_more():
    def of(schedule, is_quick):
        layout = ParallelLayout(data=2, stage=1, pipe=4, schedule=schedule, accumulation=16)
        return predict_step(StepSetup(LLAMA_8B, layout, machine(), 8192), is_quick=is_quick)

    for is_quick in (True, False):
        assert of("zb-h1", is_quick).bubble < 0.5 * of("1f1b", is_quick).bubble
        assert of("zb-h1", is_quick).device_bytes > of("1f1b", is_quick).device_bytes


def test_parts_add_up_to_the_step():
    made = step(LLAMA_70B, data=2, tensor=8, pipe=4, stage=1, chunks=5, schedule="interleaved", accumulation=16)
    result = made.to_dict()
    parts = [*result["compute_seconds"].values(), *result["exposed_seconds"].values()]
    parts += [result["host_seconds"], result["bubble_seconds"], result["update_seconds"]]
    assert math.isclose(sum(parts), result["step_seconds"])
    assert made.tokens == 2 * 16 * 8192
    saved = dict(costs_turned_off(made))
    assert saved["linear layers in fp8"] > 0
    assert list(saved.values()) == sorted(saved.values(), reverse=True)
    assert all(seconds < made.seconds for seconds in saved.values())


# -- layouts -----------------------------------------------------------------------------------------------------------


def test_layers_that_are_missing_are_missing_at_the_ends():
    assert layers_of_chunks(8, 4) == [2, 2, 2, 2]
    assert layers_of_chunks(126, 8) == [15, 16, 16, 16, 16, 16, 16, 15]
    assert layers_of_chunks(7, 4) == [2, 2, 2, 1]
    assert layers_of_chunks(10, 4, 1) == [2, 3, 3, 2]
    for arguments in ((3, 4), (9, 4, 1)):
        with pytest.raises(DeepSpeedConfigError, match="layers"):
            layers_of_chunks(*arguments)


def test_a_layout_is_what_the_configuration_means():
    config = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "tensor_parallel": {"autotp_size": 2, "sequence_parallel_norms": True},
        "sequence_parallel_size": 2,
        "sequence_parallel": {"mode": "ring"},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    found = layout_of(config, 32, pipeline=Pipeline(2))
    assert (found.tensor, found.context, found.pipe, found.data, found.accumulation) == (2, 2, 2, 4, 8)
    assert found.is_ring and found.cuts_norms and found.gradient_bytes == 4
    with pytest.raises(DeepSpeedConfigError, match="multiple of tensor 2"):
        layout_of(config, 12, pipeline=Pipeline(2))
    with pytest.raises(DeepSpeedConfigError, match="train_batch_size 64"):
        layout_of({**config, "train_micro_batch_size_per_gpu": 3}, 32, pipeline=Pipeline(2))


@pytest.mark.parametrize(
    "batch",
    [
        {"train_batch_size": 32},
        {"train_batch_size": 32, "gradient_accumulation_steps": 4},
        {"train_batch_size": "32", "train_micro_batch_size_per_gpu": "auto"},
        {"train_micro_batch_size_per_gpu": 8.0, "gradient_accumulation_steps": "2"},
        {"elasticity": {"enabled": True, "version": 0.1, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}},
    ],
)
def test_a_layout_has_the_batch_of_the_engine(batch):
    expected, found = parse(batch, dp_world_size=4).batch, layout_of(batch, 4, pipeline=Pipeline())
    assert (found.micro_batch, found.accumulation) == (expected.micro_batch_size, expected.accumulation_steps)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"bf16": {"enabled": "false"}}, {"gradient_bytes": 4, "summed_bytes": None}),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, {"gradient_bytes": 4}),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "FP32"}}, {"gradient_bytes": 4}),
        (
            {"bf16": {"enabled": 1}, "data_types": {"grad_accum_dtype": "auto"}},
            {"gradient_bytes": 2, "summed_bytes": 4},
        ),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {"stage": 2, "offload": True}),
        (
            {"zero_optimization": {"stage": "auto", "offload_optimizer": {"device": "CPU"}}},
            {"stage": 0, "offload": True},
        ),
        ({"expert_parallel": {"enabled": False, "autoep_size": 2}}, {"experts": 1}),
    ],
)
def test_a_layout_reads_keys_as_the_engine_does(config, expected):
    found = layout_of(config, 4, pipeline=Pipeline())
    assert {name: getattr(found, name) for name in expected} == expected


def test_weights_shared_by_neighbors_take_memory_and_send_once_per_step():
    batch = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 8}

    def predicted(**keys):
        wanted = {**batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **keys}}
        return predict_step(StepSetup(LLAMA_8B, layout_of(wanted, 16, pipeline=Pipeline()), machine(16), 512))

    plain, neighbors = predicted(), predicted(zero_hpz_partition_size=8)
    more = neighbors.memory.tensors["parameters"] - plain.memory.tensors["parameters"]
    assert more == pytest.approx(2 * LLAMA_8B.parameters * (1 / 8 - 1 / 16))
    assert neighbors.state_bytes - plain.state_bytes == pytest.approx(more)
    assert neighbors.exposed["data"] < plain.exposed["data"], "gathers stay in a node"
    assert "weights over 8" in neighbors.setup.layout.describe()
    assert predicted(zero_hpz_partition_size=16).seconds == plain.seconds


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recompute": "some"}, "recompute"),
        ({"data": 8, "stage": 3, "weight_ranks": 3}, "weight_ranks=3: must divide the 8"),
        ({"data": 8, "experts": 3}, "ep=3"),
        ({"data": 8, "stage": 3, "shard_ranks": 3}, "shard"),
    ],
)
def test_layouts_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        ParallelLayout(**wrong)


def test_a_layout_of_other_ranks_is_refused():
    with pytest.raises(DeepSpeedConfigError, match="8 ranks"):
        predict_step(StepSetup(LLAMA_8B, ParallelLayout(data=8), machine(16), 2048))
    unknown = replace(DEVICES["h100"], flops=0.0, name="mine")
    with pytest.raises(DeepSpeedConfigError, match="mine"):
        predict_step(StepSetup(LLAMA_8B, ParallelLayout(), Machine(unknown, 1, 1, 10**10), 2048))


# -- the machine and the command line ----------------------------------------------------------------------------------


def test_networks_by_name():
    assert read_network("8xndr", 8) == 50e9
    assert read_network("4x200", 8) == 12.5e9
    assert read_network("hdr", 4) == 25e9
    assert read_network("5e9", 8) == 5e9
    with pytest.raises(DeepSpeedConfigError, match="8xndr"):
        read_network("fast", 8)


def test_a_machine_of_ones_own(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "a100", "name": "mine", "efficiency": {"matmul": 0.5}}))
    mine = read_machine_file(path)
    assert mine.flops == DEVICES["a100"].flops
    assert mine.efficiency == replace(DEVICES["a100"].efficiency, matmul=0.5)
    write_machine_file(mine, path)
    assert read_machine_file(path) == mine
    for text, message in (
        ("[]", "JSON object"),
        ('{"like": "a100", "speed": 3}', "speed"),
        ('{"flops": 1e12}', "memory, memory_bandwidth"),
        ('{"like": "a100", "flops": "fast"}', "flops"),
        ('{"like": "a100", "efficiency": {"luck": 1}}', "luck"),
    ):
        path.write_text(text)
        with pytest.raises(DeepSpeedConfigError, match=message):
            read_machine_file(path)


SIZES = "--layers 48 --hidden 6144 --heads 64 --vocab 51200 --plain-mlp --plain-attention --dropout 0.1"
RUN = "--devices 8 --device a100 --sequence-length 2048 --tensor 8 --micro-batch 4"


def test_predict_from_the_command_line(capsys):
    arguments = f"{SIZES} {RUN} --predict --recompute full --compiled --gradient-bytes 4".split()
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    made = step(
        GPT_22B,
        2048,
        "a100",
        data=1,
        stage=3,
        tensor=8,
        micro_batch=4,
        recompute="full",
        is_compiled=True,
        gradient_bytes=4,
    )
    assert result["step_seconds"] == pytest.approx(made.seconds)
    assert result["step_seconds"] == pytest.approx(1.42, rel=0.15), "Korthikanti et al. measured 1.42 s"
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "What would help most" in text
    assert "waits for exchanges, tensor" in text


def test_search_from_the_command_line(capsys):
    arguments = "--layers 32 --hidden 4096 --heads 32 --vocab 32000 --nodes 2 --devices 8 --search 64".split()
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "the fastest" in text
    assert "The others:" in text
    assert main([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["best"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--layers 2 --hidden 64 --heads 4 --vocab 128 --compiled", "--compiled: only with --predict"),
        ("--layers 2 --hidden 64 --heads 4 --vocab 128 --device a100 --fp8", "'a100' has no fp8"),
        ("--model nothing:there --predict", "decoder by its sizes"),
        ("--layers 2 --hidden 64 --heads 4 --vocab 128 --predict --context 2 --sequence 2", "keep one"),
        ("--layers 2 --hidden 64 --heads 4 --vocab 128 --predict --context -2", "--context: expected a whole number"),
        ("--layers 2 --hidden 64 --heads 4 --vocab 128 --predict --network fast", "network"),
    ],
)
def test_command_lines_that_are_refused(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "shape",
    [
        DecoderShape(2, 64, 4, 128, kv_heads=2, head_size=32),
        DecoderShape(2, 64, 4, 128, is_gated=False, has_fused_attention=False, dropout=0.1),
        DecoderShape(2, 64, 4, 128, experts=4, is_gated=False),
    ],
)
def test_decoders_are_simulated_as_they_are_predicted(shape):
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    plan = deepspeed.plan(shape, config, sequence_length=32, suggest=False, compare_checkpointing=False)
    assert plan.parameters == shape.parameters
    made = predict_step(StepSetup(shape, ParallelLayout(stage=1, micro_batch=2), plan.machine, 32))
    counted = plan.simulated.flow.flops
    causal = (
        made.flops
        if not shape.has_fused_attention
        else made.flops + 2 * 2 * 2 * 32 * 32 * 4 * shape.width_of_head * 3.5
    )
    assert counted == pytest.approx(causal, rel=0.03)


def test_schedules_that_split_the_backward_are_searched():
    ranking = search_layouts(LLAMA_70B, machine(64), tokens=8192, samples=128)
    schedules = {each.step.setup.layout.schedule for each in ranking.best}
    assert schedules & {"zb-h1", "zbv", "dualpipev"}
    for each in ranking.best:
        layout = each.step.setup.layout
        assert layout.pipe == 1 or layout.schedule in ("1f1b", "interleaved") or layout.schedule in layout.describe()


# -- pictures ----------------------------------------------------------------------------------------------------------


def drawn_parts(spans):
    """Seconds of the stream of computation, by what a table of the step calls them."""
    found = collections.Counter()
    for span in spans:
        if span.stream == COMPUTE:
            found[re.sub(r"^.*: (?=matrix|attention|elementwise)|^slowed: |^waits: ", "", span.name)] += (
                span.end - span.start
            )
    return found


@pytest.mark.parametrize(
    "layout",
    [
        {"accumulation": 3},
        {"stage": 1, "accumulation": 2, "overlaps_data": False},
        {"stage": 2, "data": 4, "tensor": 2, "offload": True, "recompute": "full"},
        {"stage": 1, "data": 2, "pipe": 4, "accumulation": 40},
        {"stage": 1, "data": 1, "tensor": 2, "pipe": 4, "schedule": "zb-h1", "accumulation": 8},
        {"stage": 1, "data": 2, "pipe": 4, "chunks": 2, "schedule": "interleaved", "accumulation": 8},
        {"stage": 3, "data": 2, "context": 2, "tensor": 2},
    ],
)
def test_the_drawn_busiest_rank_takes_the_seconds_of_the_table(layout):
    made = step(**layout)
    streams = predicted_streams(made)
    spans = next(spans for name, spans in streams.ranks.items() if name in ("",) or "busiest" in name)
    assert max(span.end for span in spans) == pytest.approx(made.seconds)
    own = sorted((span for span in spans if span.stream == COMPUTE), key=lambda span: span.start)
    assert all(one.end <= other.start + 1e-9 for one, other in itertools.pairwise(own)), "one thing at a time"
    parts = drawn_parts(spans)
    wanted = {"matrix products": made.matmul, "attention": made.attention, "elementwise operations": made.traffic}
    wanted |= {**made.exposed, "other stages": made.bubble, "host": made.host}
    wanted["update on the host" if made.setup.layout.offload else "update"] = made.update
    assert parts == pytest.approx({name: seconds for name, seconds in wanted.items() if seconds > 0})
    rows = {span.stream for span in spans} - {COMPUTE, HOST}
    assert rows >= {axis for axis, seconds in made.exposed.items() if seconds > 0}
    for axis in rows:  # exchanges of an axis take at least what is waited for and not merely slowed by them
        waits = sum(s.end - s.start for s in spans if s.name == f"waits: {axis}")
        assert sum(s.end - s.start for s in spans if s.stream == axis) >= waits * 0.999


def test_long_steps_are_drawn_with_fewer_micro_batches():
    made = step(stage=1, data=2, pipe=4, accumulation=2048)
    streams = predicted_streams(made)
    assert streams.drawn < 100 and streams.accumulation == 2048
    assert set(streams.ranks) == {"stage 0", "stage 3, busiest"}
    assert "of 2048 micro-batches are drawn" in prediction_picture(made, is_trace=False)


def test_pictures_of_a_predicted_step_from_the_command_line(tmp_path, capsys):
    sizes = "--layers 4 --hidden 256 --heads 4 --vocab 512 --sequence-length 128 --devices 8".split()
    svg, trace = tmp_path / "step.svg", tmp_path / "step.json"
    assert main([*sizes, "--predict", "--pipe", "2", "--accumulation", "4", "--picture", str(svg)]) == 0
    root = ElementTree.fromstring(svg.read_text())
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"stage 0: compute", "stage 1, busiest: compute", "stage 0: data"} <= texts
    fills = collections.Counter(element.get("fill") for element in root.iter("{http://www.w3.org/2000/svg}rect"))
    assert fills["#c8553d"] > 0, "exposed exchanges are red"
    assert main([*sizes, "--search", "8", "--picture", str(trace)]) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    assert {"exposed", "product", "exchange"} <= {event["cat"] for event in events if event["ph"] == "X"}
    capsys.readouterr()
    assert main([*sizes, "--predict", "--picture", str(tmp_path / "no" / "step.svg")]) == 2
    assert "there is no folder" in capsys.readouterr().err
