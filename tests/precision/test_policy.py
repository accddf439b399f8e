"""Which dtype each tensor has."""

from __future__ import annotations

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.precision.policy import PrecisionPolicy, check_device


def policy_of(**sections):
    parsed = parse({"train_micro_batch_size_per_gpu": 1, **sections}, dp_world_size=1)
    return PrecisionPolicy.from_config(parsed.root, get_accelerator(), nn.Linear(1, 1))


def test_modules_kept_in_fp32_are_found_by_whole_parts_of_names():
    policy = policy_of(bf16={"enabled": True}, data_types={"keep_in_fp32_modules": ["norm", "mlp.gate"]})
    tensor = torch.zeros(1)
    assert policy.dtype_for("blocks.0.norm.weight", tensor) == torch.float32
    assert policy.dtype_for("blocks.0.mlp.gate.weight", tensor) == torch.float32
    assert policy.dtype_for("blocks.0.mlp.gate_proj.weight", tensor) == torch.bfloat16
    assert policy.dtype_for("blocks.0.normal.weight", tensor) == torch.bfloat16
    assert policy.dtype_for("norm.index", tensor.long()) == torch.int64


def test_both_lists_of_a_model_are_kept_in_fp32():
    model = nn.Linear(1, 1)
    model._keep_in_fp32_modules, model._keep_in_fp32_modules_strict = {"wo"}, {"mlp.gate"}
    data_types = {"keep_in_fp32_modules": "auto"}
    parsed = parse({"train_micro_batch_size_per_gpu": 1, "data_types": data_types}, dp_world_size=1)
    policy = PrecisionPolicy.from_config(parsed.root, get_accelerator(), model)
    assert policy.fp32_modules == ("mlp.gate", "wo")


def test_only_floating_buffers_are_cast():
    model = nn.BatchNorm1d(3)
    policy_of(bf16={"enabled": True}).cast_buffers(model, torch.device("cpu"))
    assert model.running_mean.dtype == torch.bfloat16
    assert model.num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"bf16": {"enabled": True}}, "bf16.enabled"),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, "torch_autocast.enabled"),
    ],
)
def test_a_dtype_that_the_device_lacks_is_refused(sections, key, monkeypatch):
    policy = policy_of(**sections)
    check_device(policy)
    monkeypatch.setattr(type(get_accelerator()), "is_bf16_supported", lambda accelerator: False)
    with pytest.raises(DeepSpeedConfigError, match=rf"^{key}: the device cpu does not .*bfloat16; set {key} to false"):
        check_device(policy)


def test_inputs_in_dicts_of_any_class_are_cast_into_a_copy():
    policy = policy_of(bf16={"enabled": True, "auto_cast": True})
    for given in (defaultdict(list, x=torch.ones(2), ids=torch.ones(2).long()), OrderedDict(x=torch.ones(2))):
        found = policy.cast_arguments(((given,), {"batch": given}))
        for made in (found[0][0], found[1]["batch"]):
            assert type(made) is type(given) and made.keys() == given.keys()
            assert made["x"].dtype == torch.bfloat16 and given["x"].dtype == torch.float32
            assert "ids" not in made or made["ids"].dtype == torch.int64
