"""Forms of published configurations train what plain torch trains, whatever limit of 0 or idle section they have."""

import logging

import torch
from torch import nn

import deepspeed
from tests.harness import run_ranks

HOST = {"device": "cpu", "pin_memory": True}
FILES = {"device": "nvme", "buffer_count": 0}
FORMS = (
    {"zero_optimization": {"stage": 3, "sub_group_size": 0, "offload_optimizer": HOST}},
    {"zero_optimization": {"stage": 3, "sub_group_size": 0, "stage3_max_live_parameters": 0}},
    {"zero_optimization": {"stage": 3, "offload_optimizer": FILES, "offload_param": FILES, "sub_group_size": 0}},
    {"zero_optimization": {"stage": 2, "allgather_bucket_size": 0}},
    *({"zero_optimization": {"stage": stage, "offload_param": HOST}} for stage in (0, 1, 2)),
    {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": False}},
    {"cuda_visible_devices": 0, "fp16": {"enabled": False, "opt_level": "O2", "hysteresis": 0}},
)


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))


def _trained(folder):
    weights = []
    for form in FORMS:
        zero = {
            name: {**value, "nvme_path": folder} if value is FILES else value
            for name, value in form.get("zero_optimization", {}).items()
        }
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            **form,
            "zero_optimization": zero,
        }
        model = _net()
        engine, *_ = deepspeed.initialize(model=model, config=config)
        for step in range(3):
            torch.manual_seed(10 + step)
            engine.backward(engine(torch.randn(4, 6)).square().mean())
            engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
        engine.destroy()
    return weights


def test_every_form_trains_as_plain_torch_does(tmp_path):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for step in range(3):
        torch.manual_seed(10 + step)
        optimizer.zero_grad()
        model(torch.randn(4, 6)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    wanted = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    (found,) = run_ranks(_trained, 1, str(tmp_path))
    for form, weights in zip(FORMS, found, strict=True):
        torch.testing.assert_close(weights, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, form=form: f"{form}: {text}")


def _profiled(folder):
    """The number of profiles that were written in two steps, by ``profile_step``."""
    counts = {}
    for step in (-1, 0, 1, 2):
        file = f"{folder}/{step}.txt"
        section = {"enabled": True, "profile_step": step, "output_file": file}
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "flops_profiler": section}
        engine, *_ = deepspeed.initialize(model=_net(), config=config)
        written = []
        for _ in range(2):
            engine.backward(engine(torch.randn(2, 6)).mean())
            engine.step()
            try:
                with open(file) as page:
                    written.append(bool(page.read()))
            except FileNotFoundError:
                written.append(False)
        counts[step] = written
        engine.destroy()
    return counts


def test_profile_step_of_0_is_the_first_and_of_minus_1_none(tmp_path):
    (counts,) = run_ranks(_profiled, 1, str(tmp_path))
    assert counts == {-1: [False, False], 0: [True, True], 1: [True, True], 2: [False, True]}


def _client_optimizer():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    deepspeed.logger.addHandler(handler)
    model = _net()
    config = {"train_batch_size": 2, "optimizer": {"type": "sat.ops.FusedEmaAdam", "params": {"lr": "auto"}}}
    try:
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config
        )
        engine.destroy()
    finally:
        deepspeed.logger.removeHandler(handler)
    return [line for line in lines if "has no effect" in line]


def test_a_section_beside_an_optimizer_of_the_program_is_one_line():
    ((line,),) = run_ranks(_client_optimizer, 1)
    assert "SGD is used, and the section optimizer of the configuration (sat.ops.FusedEmaAdam) has no effect" in line
