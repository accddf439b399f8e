"""The line that an engine logs when it is made, and the warning about a dtype that the device emulates."""

import pytest
from torch import nn

import deepspeed
from deepspeed.accelerator import cpu
from deepspeed.config import parse
from tests.engine.test_reminders import Logged
from tests.harness import run_ranks


def _first_lines(**settings):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **settings,
    }
    with Logged() as lines:
        engine, *_ = deepspeed.initialize(model=nn.Linear(16, 4), config=config)
    engine.destroy()
    return lines


def _sharding(stage, **zero):
    lines = _first_lines(zero_optimization={"stage": stage, **zero})
    return [line.split(" parameters in ")[1].split(";")[0] for line in lines if line.startswith("ZeRO stage")]


@pytest.mark.parametrize(
    ("ranks", "stage", "zero", "expected"),
    [
        (2, 2, {}, "1 bucket"),
        (1, 3, {}, "1 bucket, none sharded between uses, as no other rank shares them"),
        (2, 3, {"stage3_param_persistence_threshold": 0}, "1 bucket, all of them sharded between uses"),
        (
            2,
            3,
            {},
            "1 bucket, none sharded between uses: all are below zero_optimization.stage3_param_persistence_threshold. "
            "Lower it (0 shards everything) to save memory",
        ),
    ],
)
def test_what_is_sharded_and_why_not(ranks, stage, zero, expected):
    assert run_ranks(_sharding, ranks, stage, **zero)[0] == [expected]


def _warnings(native):
    cpu.cpu_has_fp16 = lambda: native
    cpu.cpu_has_bf16 = lambda: True
    twice = [*_first_lines(fp16={"enabled": True}), *_first_lines(fp16={"enabled": True})]
    return [line for line in twice if line.startswith("fp16.enabled: ")]


@pytest.mark.parametrize("native", [True, False])
def test_fp16_that_the_processor_emulates(native):
    found = run_ranks(_warnings, 1, native, fresh=True)[0]
    assert found == (
        []
        if native
        else [
            "fp16.enabled: expected a device with fp16 instructions, found cpu, which emulates fp16: the result is "
            "right, but a step takes many times as long as in fp32. Use bf16 or fp32 here"
        ]
    )


def _notices_of_an_old_name(value):
    config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1, "max_grad_norm": value}}}
    return [line for line in parse({**config, "train_batch_size": 1}, dp_world_size=1).notices if "old name" in line]


def test_an_old_name_whose_value_stays_shows_no_value():
    assert [line.split(" is an ")[1] for line in _notices_of_an_old_name(1.0)] == ["old name of gradient_clipping"]


def _sums(steps, **settings):
    lines = _first_lines(gradient_accumulation_steps=steps, **settings)
    return [line for line in lines if "micro-batches are summed" in line]


@pytest.mark.parametrize(("stage", "share"), [(1, 1), (2, 2)])
def test_sums_wider_than_those_of_upstream_are_named(stage, share):
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    ((line,), _) = run_ranks(_sums, 2, 4, **settings)
    numel = 128 // share  # 16 * 4 and 4, each rounded up to 64
    assert line == (
        f"gradients of 4 micro-batches are summed in fp32: {4 * numel:,} bytes per rank, {2 * numel:,} more than in "
        'bf16, in which upstream sums them. data_types.grad_accum_dtype: "bf16" does that too, and loses small '
        "gradients"
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 1, "bf16": {"enabled": True}},
        {"steps": 4},
        {"steps": 4, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
    ],
)
def test_sums_of_the_same_size_are_not_named(settings):
    assert run_ranks(_sums, 1, **settings) == [[]]
