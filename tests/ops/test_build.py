"""Optimizers from a config section."""

import pytest
import torch

from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adagrad.cpu_adagrad import Adagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.build import build_optimizer
from deepspeed.ops.lamb import FusedLamb
from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.muon import Muon


def params():
    return [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(4))]


def build(name, arguments=None, offload=False):
    return build_optimizer(name, arguments or {}, params(), offload=offload)


@pytest.mark.parametrize(
    ("name", "arguments", "offload", "cls", "decoupled"),
    [
        ("Adam", {}, False, FusedAdam, True),
        ("adam", {"adam_w_mode": False}, False, FusedAdam, False),
        ("ADAMW", {}, False, FusedAdam, True),
        ("AdamW", {"adam_w_mode": False}, False, FusedAdam, True),
        ("Adam", {}, True, DeepSpeedCPUAdam, True),
        ("Adam", {"adam_w_mode": False}, True, DeepSpeedCPUAdam, False),
        ("AdamW", {"adam_w_mode": False}, True, DeepSpeedCPUAdam, True),
    ],
)
def test_adam_kinds(name, arguments, offload, cls, decoupled):
    optimizer = build(name, arguments, offload)
    assert type(optimizer) is cls and optimizer.adam_w_mode is decoupled
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (1e-3, (0.9, 0.999), 1e-8, 0)


@pytest.mark.parametrize(
    ("name", "arguments", "cls", "decay"),
    [
        ("Adam", {}, torch.optim.AdamW, 0.01),
        ("AdamW", {}, torch.optim.AdamW, 0.01),
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam, 0),
        ("AdamW", {"adam_w_mode": False, "amsgrad": True}, torch.optim.AdamW, 0.01),
    ],
)
@pytest.mark.parametrize("offload", [False, True])
def test_torch_adam(name, arguments, cls, decay, offload):
    optimizer = build(name, {**arguments, "torch_adam": True}, offload)
    assert type(optimizer) is cls and optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    ("name", "on_device", "on_host"),
    [
        ("adagrad", Adagrad, DeepSpeedCPUAdagrad),
        ("LION", FusedLion, DeepSpeedCPULion),
        ("lamb", FusedLamb, FusedLamb),
        ("Muon", Muon, Muon),
        ("sgd", torch.optim.SGD, torch.optim.SGD),
        ("RMSprop", torch.optim.RMSprop, torch.optim.RMSprop),
        ("NAdam", torch.optim.NAdam, torch.optim.NAdam),
    ],
)
def test_other_names(name, on_device, on_host):
    assert type(build(name)) is on_device
    assert type(build(name, offload=True)) is on_host


def test_arguments_arrive():
    arguments = {"lr": 0.5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "bias_correction": False}
    group = build("Adam", {**arguments, "set_grad_none": False, "fp32_optimizer_states": True}).param_groups[0]
    assert {key: group[key] for key in arguments} == {**arguments, "betas": (0.8, 0.95)}
    host = build("Adam", {**arguments, "set_grad_none": False, "fp32_optimizer_states": False}, offload=True)
    assert host.fp32_optimizer_states is False and host.param_groups[0]["eps"] == 1e-6


def test_muon_parts():
    optimizer = build("muon", {"muon_lr": 0.1, "ns_method": "standard", "momentum": 0.8})
    matrices, rest = optimizer.param_groups
    assert (matrices["lr"], matrices["momentum"], matrices["ns_method"]) == (0.1, 0.8, "standard")
    assert (rest["lr"], rest["betas"], rest["eps"]) == (3e-4, (0.9, 0.95), 1e-10)


def test_groups_generators_and_empty_groups():
    first, second = params()
    groups = [{"params": [first], "lr": 0.5}, {"params": []}, {"params": second}]
    optimizer = build_optimizer("AdamW", {"lr": 0.1}, iter(groups))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert len(build_optimizer("AdamW", {}, (p for p in params())).param_groups[0]["params"]) == 2
    assert groups[2]["params"] is second, "the caller's groups stay as they are"


@pytest.mark.parametrize(
    ("name", "arguments", "offload", "words"),
    [
        ("adamm", {}, False, ["optimizer.type: 'adamm' is unknown, did you mean", "RMSprop"]),
        ("rmsprop", {}, False, ["did you mean RMSprop?"]),
        ("Optimizer", {}, False, ["unknown"]),
        ("lr_scheduler", {}, False, ["unknown"]),
        ("LBFGS", {}, False, ["LBFGS cannot be used", "closure"]),
        ("SparseAdam", {}, False, ["sparse"]),
        ("Adam", {"learning_rate": 1}, False, ["optimizer.params.learning_rate: Adam has no such parameter"]),
        ("Adam", {"beta": 1}, False, ["did you mean betas?"]),
        ("Adam", {"max_grad_norm": 1.0}, False, ["optimizer.params.max_grad_norm", "gradient_clipping"]),
        ("Adam", {"max_grad_norm": 0}, True, ["gradient_clipping"]),
        ("Lamb", {"max_grad_norm": 1.0}, False, ["gradient_clipping"]),
        ("Adam", {"amsgrad": True}, False, ["AMSGrad"]),
        ("Adam", {"fp32_optimizer_states": False}, False, ["fp32_optimizer_states", "set it to True"]),
        ("Adagrad", {"amsgrad": True}, False, ["optimizer.params.amsgrad"]),
        ("Adagrad", {"lr_decay": 0.1}, True, ["optimizer.params.lr_decay", "DeepSpeedCPUAdagrad"]),
        ("Muon", {"ns_methods": "gram"}, False, ["did you mean ns_method?"]),
        ("Muon", {"ns_method": "cubic"}, False, ["gram or standard"]),
        (
            "RMSprop",
            {"differentiable": True},
            False,
            ["params.differentiable: expected false", "leave it out"],
        ),
        ("Adam", {"torch_adam": True, "differentiable": True}, False, ["optimizer.params.differentiable"]),
        ("SGD", {"lr": -1}, False, ["SGD cannot be built from {'lr': -1}"]),
        ("Adam", {"lerning": 1, "epss": 1}, False, ["params.lerning", "params.epss", "did you mean eps?"]),
    ],
)
def test_mistakes_are_named(name, arguments, offload, words):
    with pytest.raises(DeepSpeedConfigError) as error:
        build(name, arguments, offload)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("name", ["MuAdam", "muadamw", "MuSGD"])
def test_missing_ones_name_what_to_use(name):
    with pytest.raises(NotYetSupportedError, match="is not available here; use "):
        build(name)


def test_neutral_values_pass():
    build("Lamb", {"max_grad_norm": 0, "amsgrad": False})
    build("Adagrad", {"lr_decay": 0, "initial_accumulator_value": 0, "maximize": False, "foreach": True}, offload=True)
    build("Adagrad", {"amsgrad": False, "fp32_optimizer_states": True, "lr_decay": 0.5})


def test_every_config_parameter_is_accepted():
    """The strict config tables and the builder agree on names and defaults."""
    tables = pytest.importorskip("deepspeed.config.sections.optimizer")
    for offload in (False, True):
        for name, table in {**tables.OWN_OPTIMIZERS, **tables.TORCH_OPTIMIZERS}.items():
            defaults = table().model_dump()
            given = {key: value for key, value in defaults.items() if value is not None and key != "torch_adam"}
            optimizer = build_optimizer(name, given, params(), offload=offload)
            plain = build_optimizer(name, {}, params(), offload=offload)
            for group, expected in zip(optimizer.param_groups, plain.param_groups, strict=True):
                for key in set(group) - {"params"}:
                    if (name, key, group.get("use_muon")) == ("Muon", "lr", False):
                        continue  # an explicit lr serves both parts of Muon
                    assert group[key] == expected[key], (name, key)
