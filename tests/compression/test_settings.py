"""What a configuration may say, to which layers it speaks, and what is told to those who got it wrong."""

import copy

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.compression import (
    compression_scheduler,
    compression_state,
    init_compression,
    redundancy_clean,
    student_initialization,
)
from deepspeed.compression.basic_layer import LinearLayer_Compress
from deepspeed.compression.installing import convert_conv1d_to_linear
from deepspeed.config import parse
from deepspeed.errors import DeepSpeedConfigError
from tests.compression.test_stages import technique
from tests.engine.support import engine_of, inputs
from tests.harness import assert_states_equal, run_ranks
from tests.harness.toy_models import tower

WEIGHTS = technique({"quantize_weight_in_forward": True}, {"start_bits": 8, "target_bits": 8}, ["*"])


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False), "norm": nn.LayerNorm(4)})
    model["head"].weight = model["embed"].weight
    return model


def problems(**section):
    config = {"train_batch_size": 1, "compression_training": section}
    with pytest.raises(DeepSpeedConfigError) as error:
        parse(config)
    return "\n".join(error.value.problems)


def test_values_that_contradict_each_other():
    shared = {"enabled": True}
    assert "different_groups" in problems(row_pruning={"shared_parameters": shared})
    assert "params.dense_ratio: is required" in problems(row_pruning=technique({}, {}, ["a"]))
    assert "num_heads" in problems(head_pruning=technique({}, {"dense_ratio": 0.5}, ["a"]))
    assert "6 is before schedule_offset 1000" in problems(
        sparse_pruning=technique({"method": "snip_momentum", "schedule_offset_end": 6}, {"dense_ratio": 0.1}, ["a"])
    )
    widths = {"start_bits": 4, "target_bits": 8}
    assert "4 is less than target_bits 8" in problems(weight_quantization=technique({}, widths, ["a"]))
    sign = {"start_bits": 1, "target_bits": 1}
    assert "below 3 bits a weight is a sign" in problems(
        weight_quantization=technique({"quantization_type": "asymmetric"}, sign, ["a"])
    )
    assert "activations can have 3 to 16 bits" in problems(activation_quantization=technique({}, {"bits": 2}, ["a"]))
    assert "2, but 1 layers are named" in problems(
        layer_reduction={"enabled": True, "keep_number_layer": 2, "teacher_layer": [0], "module_name_prefix": "a"}
    )


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"row_pruning": technique({}, {"dense_ratio": 0.5}, ["heat"])},
            "'heat' matches no layer of the model; choose",
        ),
        (
            {"row_pruning": technique({}, {"dense_ratio": 0.5}, ["embed"])},
            r"it matches embed",
        ),
        ({"row_pruning": technique({}, {"dense_ratio": 0.5}, ["("])}, "is not a regular expression"),
        ({"row_pruning": technique({}, {"dense_ratio": 0.5}, ["head"])}, "head shares its weight with embed"),
        (
            {"weight_quantization": technique({"quantize_groups": 5}, {"start_bits": 8, "target_bits": 8}, ["own"])},
            "5 does not divide the 24 weights of own",
        ),
        (
            {"head_pruning": technique({"num_heads": 3}, {"dense_ratio": 0.5}, ["own"])},
            "3 does not divide the 4 input features of own",
        ),
        (
            {"row_pruning": technique({}, {"dense_ratio": 0.5}, ["own"], related_modules=[["."]])},
            r"'\.' matches 3 layers \(head, own, last\), but 'own' of modules matches 1",
        ),
        (
            {"row_pruning": technique({}, {"dense_ratio": 0.5}, ["own"], related_modules=[["head"]])},
            "head shares its weight with embed, which would be pruned too; untie them, or leave head out",
        ),
        (
            {"row_pruning": technique({}, {"dense_ratio": 0.5}, ["own"], related_modules=[["last"]])},
            "last has 4 inputs, expected a multiple of the 6 outputs of own",
        ),
        (
            {"head_pruning": technique({"num_heads": 2}, {"dense_ratio": 0.5}, ["own"], related_modules=[["head"]])},
            "head has 6 outputs, expected a multiple of the 4 inputs of own",
        ),
    ],
)
def test_sections_that_do_not_fit_the_model(section, message):
    model = tied()
    model["own"], model["last"] = nn.Linear(4, 6), nn.Linear(4, 3)
    before = {name: type(module) for name, module in model.named_modules()}
    with pytest.raises(DeepSpeedConfigError, match=message):
        init_compression(model, {"compression_training": section})
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_layer_in_two_groups():
    section = copy.deepcopy(WEIGHTS)
    section["different_groups"]["other"] = {"params": {"start_bits": 4, "target_bits": 4}, "modules": ["head"]}
    with pytest.raises(ValueError, match="head is in the group 'only' already"):
        init_compression(tied(), {"compression_training": {"weight_quantization": section}})


def test_a_tie_stays_and_both_sides_see_the_same_values():
    model = tied()
    only = technique({"quantize_weight_in_forward": True}, {"start_bits": 3, "target_bits": 3}, ["head"])
    init_compression(model, {"compression_training": {"weight_quantization": only}})
    compression_scheduler(model).step(step_zero_check=True)
    assert model["head"].weight is model["embed"].weight and isinstance(model["head"], LinearLayer_Compress)
    rows = model["embed"](torch.arange(6))
    torch.testing.assert_close(model["head"](torch.eye(4)).t(), rows)
    assert not torch.equal(rows, model["embed"].weight)
    assert {state.name: state.bits for state in compression_state(model)} == {"embed": 3, "head": 3}


def test_students_take_layers_over():
    section = {
        "layer_reduction": {
            "enabled": True, "keep_number_layer": 2, "module_name_prefix": "layers", "teacher_layer": [1, 3],
            "other_module_name": ["first", "last.bias"],
        }
    }  # fmt: skip
    teacher, student = tower(4, seed=1), tower(2, seed=2)
    with pytest.raises(DeepSpeedConfigError, match="teacher_model=...\\) is missing"):
        init_compression(student, {"compression_training": section})
    own = student.last.weight.clone()
    init_compression(student, {"compression_training": section}, teacher_model=teacher)
    assert torch.equal(student.layers[1].rise.weight, teacher.layers[3].rise.weight)
    assert torch.equal(student.layers[0].fall.bias, teacher.layers[1].fall.bias)
    assert torch.equal(student.first.weight, teacher.first.weight) and torch.equal(student.last.weight, own)
    assert torch.equal(student.last.bias, teacher.last.bias)
    trained = {name: value.clone() for name, value in student.state_dict().items()}
    assert redundancy_clean(student, {"compression_training": section}) is student  # there is nothing to clean
    assert_states_equal(student.state_dict(), trained)
    section["layer_reduction"]["teacher_layer"] = [1, 4]
    with pytest.raises(DeepSpeedConfigError, match="there is no layer 4; choose among the 4"):
        student_initialization(student, teacher, {"compression_training": section})
    with pytest.raises(DeepSpeedConfigError, match="student's 3 layers in layers, found 2"):
        student_initialization(tower(3), teacher, {"compression_training": section})


def test_conv1d_as_linear():
    transformers = pytest.importorskip("transformers")
    layer = nn.ModuleDict({"a": transformers.pytorch_utils.Conv1D(5, 3)})
    x = torch.randn(2, 3)
    expected = layer["a"](x)
    convert_conv1d_to_linear(layer, transformers.pytorch_utils.Conv1D)
    assert type(layer["a"]) is nn.Linear
    torch.testing.assert_close(layer["a"](x), expected)


# -- with the engine -----------------------------------------------------------------------------------------------

ALL_ON = {"compression_training": {"weight_quantization": WEIGHTS}}
MOQ = {
    "enabled": True,
    "quantize_bits": {"start_bits": 6, "target_bits": 4},
    "quantize_schedule": {"quantize_period": 1, "schedule_offset": 1},
    "quantize_groups": 1,
    "quantize_algo": {"q_type": "asymmetric", "rounding": "stochastic"},
    "fp16_mixed_quantize": {"enabled": True, "quantize_change_ratio": 0.5},
}


def _losses(engine, steps):
    losses = []
    for step in range(steps):
        loss = engine(inputs(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _older_section():
    found = {}
    for stage in (0, 3):
        engine = engine_of(tower(2), stage, quantize_training=MOQ)
        found[stage] = (_losses(engine, 5), [state.bits for state in compression_state(engine.module)][:2])
        engine.destroy()
    return found


def _assert_saved_small(model):
    """``torch.save`` writes the whole storage of each tensor."""
    stored = {name: (value.untyped_storage().nbytes(), value.nbytes) for name, value in model.state_dict().items()}
    assert stored and all(whole == own for whole, own in stored.values()), stored


def _sharded(folder):
    config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    section = {
        "sparse_pruning": technique({"schedule_offset": 0}, {"dense_ratio": 0.5}, ["rise"]),
        "row_pruning": technique({"schedule_offset": 0, "method": "topk"}, {"dense_ratio": 0.5}, ["fall"]),
    }
    results = []
    for is_sharded in (False, True):
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=is_sharded):
            model = tower(2)
        torch.manual_seed(7)
        init_compression(model, {"compression_training": section})
        engine = engine_of(
            model,
            3,
            zero={"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True},
            compression_training=section,
        )
        results.append(_losses(engine, 3))
        with pytest.raises(deepspeed.errors.CallOrderError, match=r"Call redundancy_clean\(engine, config\)"):
            deepspeed.compression.compress.redundancy_clean(engine.module, {"compression_training": section})
        engine.save_16bit_model(folder, "model.bin")
        engine.compression_scheduler.at(10)
        expected = engine(inputs(9)).item()
        whole = deepspeed.compression.redundancy_clean(engine, {"compression_training": section})
        assert whole(inputs(9)).item() == pytest.approx(expected, rel=1e-5)
        _assert_saved_small(whole)
        own = init_compression(tower(2), {"compression_training": section})
        own.load_state_dict(torch.load(folder / "model.bin"))
        clean = deepspeed.compression.redundancy_clean(own, {"compression_training": section})
        assert clean(inputs(9)).item() == pytest.approx(expected, rel=1e-5)
    assert results[0] == results[1]

    with pytest.raises(DeepSpeedConfigError, match="call model = deepspeed.compression.init_compression"):
        engine_of(tower(1), 1, **ALL_ON)
    with pytest.raises(DeepSpeedConfigError, match="compressed layers cannot be tensor-parallel"):
        engine_of(init_compression(tower(1), ALL_ON), 1, tensor_parallel={"autotp_size": 2}, **ALL_ON)
    engine = engine_of(init_compression(tower(1), ALL_ON), 1, **ALL_ON)
    _losses(engine, 1)
    x = inputs(9)
    before = engine(x).item()
    clean = deepspeed.compression.compress.redundancy_clean(engine, ALL_ON)
    assert clean(x).item() == pytest.approx(before, rel=1e-5) and clean.compression_report.bytes_after > 0
    _assert_saved_small(clean)
    engine.destroy()
    engine_of(clean, 0, optimizer=None, **ALL_ON).destroy()  # evaluated with the same file


def _with_engines(folder):
    moq = _older_section()
    _sharded(folder)
    return moq


def test_engines(tmp_path):
    found = run_ranks(_with_engines, 2, tmp_path)[0]
    losses, bits = found[0]
    assert bits == [4, 4] and losses == found[3][0]
