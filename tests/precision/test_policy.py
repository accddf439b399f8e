"""Which dtype each tensor has."""

from collections import OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

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


def buffer_dtypes(model, **sections):
    policy_of(bf16={"enabled": True}, **sections).cast_buffers(model, torch.device("cpu"))
    return {name: str(buffer.dtype).removeprefix("torch.") for name, buffer in model.named_buffers()}


def with_buffers(model=None, **buffers):
    model = nn.Module() if model is None else model
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def test_buffers_keep_their_dtype_and_a_configured_one_casts_floating_ones():
    every = {f"{name}_": name for name in ("float32", "float64", "bfloat16", "int64", "bool", "complex64")}
    made = {key: torch.zeros(1, dtype=getattr(torch, name)) for key, name in every.items()}
    assert buffer_dtypes(with_buffers(**made)) == every
    cast = buffer_dtypes(with_buffers(**made), data_types={"buffer_dtype": "fp16"})
    assert cast == {**every, **dict.fromkeys(("float32_", "float64_", "bfloat16_"), "float16")}


def test_what_is_cast_and_what_stays_wide_is_logged_once(monkeypatch):
    lines = []
    monkeypatch.setattr("deepspeed.logging.log_dist", lambda message, *_: lines.append(message))
    for _ in range(2):
        model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "rope": with_buffers(angles_logged_once=torch.zeros(1))})
        buffer_dtypes(model)
    assert lines == [
        "buffers cast from float32 to bfloat16: norm.running_mean, norm.running_var",
        "buffers that keep float32 (to cast them, set data_types.buffer_dtype: bf16): rope.angles_logged_once",
    ]


PARTS = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "batch norm without weights": lambda: nn.BatchNorm1d(8, affine=False),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "parametrized spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5),
}


@pytest.mark.parametrize("name", PARTS)
def test_layers_of_torch_run_in_bf16_with_the_buffers_that_they_get(name):
    layer = nn.Sequential(PARTS[name](), with_buffers(nn.Identity(), other=torch.zeros(1)))
    assert buffer_dtypes(layer)["1.other"] == "float32"
    for parameter in layer.parameters():
        parameter.data = parameter.data.bfloat16()
    assert layer(torch.randn(4, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_buffers_of_modules_in_fp32_are_fp32_under_every_setting():
    types = {"keep_in_fp32_modules": ["norm", "correction_bias"]}
    for configured in ({}, {"buffer_dtype": "bf16"}):
        model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "gate": with_buffers(correction_bias=torch.zeros(2).half())})
        dtypes = buffer_dtypes(model, data_types={**types, **configured})
        assert dtypes.pop("norm.num_batches_tracked") == "int64"
        assert set(dtypes.values()) == {"float32"}


def test_a_shared_buffer_stays_shared():
    shared = torch.zeros(1)
    model = nn.ModuleList([with_buffers(a=shared), with_buffers(b=shared)])
    buffer_dtypes(model, data_types={"buffer_dtype": "bf16"})
    assert model[0].a is model[1].b


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
