"""Measuring a machine: what the probes conclude from times, and a file that plans can use."""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import deepspeed
from deepspeed.accelerator.devices import Device, DeviceEfficiency, device_of_product
from deepspeed.cli import measure
from deepspeed.cli.plan import main
from deepspeed.plan import DecoderShape
from deepspeed.plan.machine import read_machine_file, write_machine_file
from deepspeed.plan.measuring import block_probe
from deepspeed.plan.measuring.block_probe import ProbeSizes, _TimedBlock, predict_block, probe_block
from deepspeed.plan.measuring.machine import measure_device, shared_speed
from deepspeed.plan.timeline.operation_cost import OperationKind
from tests.harness import run_ranks

SIZES = ProbeSizes(DecoderShape(1, 64, 4, 32), 32, (1, 4), torch.float32, 3)
RATES = {OperationKind.MATMUL: 50e9, OperationKind.ATTENTION: 20e9, OperationKind.TRAFFIC: 8e9}
WORK = {OperationKind.MATMUL: 5e9, OperationKind.ATTENTION: 0.5e9, OperationKind.TRAFFIC: 0.4e9}


@pytest.mark.parametrize(("launch", "factor"), [(1e-4, 1.0), (0.0, 1.2), (2e-5, 0.9)])
def test_rates_launches_and_factor_are_found_in_times(monkeypatch, launch, factor):
    def timed(_sizes, samples, *_others):
        work = {kind: samples * amount for kind, amount in WORK.items()}
        alone = {kind: amount / RATES[kind] for kind, amount in work.items()}
        return _TimedBlock(factor * sum(alone.values()) + 80 * launch, alone, work, 80)

    monkeypatch.setattr(block_probe, "_time_block", timed)
    found = probe_block(SIZES, torch.device("cpu"), 0.0, lambda: None)
    assert found.rates == pytest.approx(RATES)
    assert found.launch == pytest.approx(launch, abs=1e-9)
    assert found.factor == pytest.approx(factor)


def test_times_that_contradict_each_other_give_one_factor(monkeypatch):
    def timed(_sizes, samples, *_others):
        work = {kind: samples * amount for kind, amount in WORK.items()}
        alone = {kind: amount / RATES[kind] for kind, amount in work.items()}
        return _TimedBlock(2 * sum(WORK[kind] / RATES[kind] for kind in WORK), alone, work, 80)  # grows by nothing

    monkeypatch.setattr(block_probe, "_time_block", timed)
    found = probe_block(SIZES, torch.device("cpu"), 0.0, lambda: None)
    assert found.launch == 0.0
    assert found.factor == pytest.approx(4 / 5)  # 2 + 2 measured, 1 + 4 by the rates


def test_a_block_takes_what_its_operations_take():
    device = Device("cpu", 0, 50e9, 8e9, 0.0, 0.0, "", efficiency=DeviceEfficiency(half_size=0.0, launch=0.0))
    slower = replace(device, flops=25e9, memory_bandwidth=4e9)
    once, twice = (predict_block(SIZES, 2, torch.device("cpu"), each) for each in (device, slower))
    assert twice == pytest.approx(2 * once)
    late = replace(device, efficiency=replace(device.efficiency, launch=1e-3))
    assert predict_block(SIZES, 2, torch.device("cpu"), late) > once + 50e-3  # a block has more than 50 operations


def _measure(target: str) -> None:
    device = measure_device(SIZES)
    if torch.distributed.get_rank() == 0:
        write_machine_file(device, target)


def test_a_measured_machine_predicts_a_step(tmp_path):
    target = tmp_path / "here.json"
    run_ranks(_measure, 2, str(target))
    device = read_machine_file(target)
    assert device.name == "cpu" and "2 ranks" in device.source
    assert 1e8 < device.flops < 1e13 and 1e7 < device.memory_bandwidth < 1e12 and device.link > 1e5
    assert device.efficiency.shared_link > 1e6 and device.efficiency.shared_start >= 0
    assert device.efficiency.contention == 1.0 and device.efficiency.start >= 0  # 0: noise of a busy machine
    plan = deepspeed.plan(
        DecoderShape(2, 64, 4, 128),
        {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}},
        devices_per_node=2,
        device=device,
        sequence_length=32,
        compare_checkpointing=False,
    )
    assert plan.timed_step.seconds > plan.timed_step.exposed["data"] > 0
    collectives = sum(1 for span in plan.timed_step.spans if span.stream == "data")
    assert plan.timed_step.exposed["data"] <= collectives * (device.efficiency.start + 1e6 / device.link)


def test_the_rate_of_sums_through_shared_memory():
    sizes, rate, start = (2**16, 2**21), 3e9, 2e-4
    seconds = [3 * nbytes / rate + start for nbytes in sizes]
    assert shared_speed(sizes, seconds, 4) == pytest.approx((rate, start))
    assert shared_speed(sizes, [1e-3, 1e-3], 4) == pytest.approx((3 * 2**21 / 1e-3, 1e-3 - 1e-3 / 32))  # noise


def test_tensor_ranks_of_processors_wait_as_long_as_sums_through_shared_memory_take():
    efficiency = DeviceEfficiency(half_size=0.0, contention=1.0, launch=0.0, start=5e-3, shared_link=1e9)
    device = Device("cpu", 2**33, 50e9, 8e9, 1e9, 8e9, "", cores=2, efficiency=efficiency)
    shape = DecoderShape(2, 64, 4, 128)
    plans = [
        deepspeed.plan(
            shape,
            {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}},
            devices_per_node=4,
            device=replace(device, efficiency=replace(efficiency, **more)),
            sequence_length=32,
            compare_checkpointing=False,
            tensor=4,
        )
        for more in ({}, {"shared_start": 1e-3}, {"shared_link": 0.0})
    ]
    sums = plans[0].simulated.flow.requested_along["all_reduce", "tensor"][0]
    base, later, by_gloo = (plan.timed_step.exposed["tensor"] for plan in plans)
    assert later - base == pytest.approx(sums * 1e-3, rel=0.05)
    assert by_gloo - base > sums * 5e-3, "other collectives start in 5 ms"


def test_devices_by_the_names_of_their_makers():
    names = {
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-40GB": "a100-40",
        "A100-SXM4-80GB": "a100",
        "Tesla V100-SXM2-16GB": "v100-16",
        "NVIDIA L40S": "l40s",
        "H100-96GB-HBM2e-500W (Grand Teton)": "h100-500w",
        "GB200 (NVL72)": "gb200",
        "AMD Instinct MI300X": "mi300x",
    }
    assert {name: device_of_product(name).name for name in names} == names
    assert device_of_product("A100", 40e9).name == "a100-40"
    assert device_of_product("Radeon VII") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2"], "leave the model and the configuration out"),
        (["--predict"], "leave the model and the configuration out"),
        (["--devices", "0"], "expected a whole number of 1 or more"),
        (["--nodes", "2"], "times one node"),
        (["--network", "8xndr"], "times one node"),
    ],
)
def test_measuring_is_refused_beside_a_plan(arguments, message, tmp_path, capsys):
    assert main(["--measure", str(tmp_path / "m.json"), *arguments]) == 2
    assert message in capsys.readouterr().err


def _print_measured(target: str) -> str:
    small = mock.patch("deepspeed.plan.measuring.machine.measure_device", lambda: measure_device(SIZES))
    with small, redirect_stdout(io.StringIO()) as shown:
        measure.main([target])
    return shown.getvalue()


@pytest.mark.parametrize(
    ("ranks", "text"), [(1, "elementwise, no collective, as there is one rank, "), (2, "us to start one")]
)
def test_collectives_are_printed_if_there_are_several_ranks(tmp_path, ranks, text):
    assert text in run_ranks(_print_measured, ranks, str(tmp_path / "m.json"))[0]


def test_a_file_that_cannot_be_written_is_refused_before_measuring(tmp_path, capsys):
    assert main(["--measure", str(Path(tmp_path) / "none" / "m.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err
