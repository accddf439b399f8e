"""Models that a plan takes: live ones, functions, Transformers configurations; and those that it cannot take."""

import functools
import json

import pytest
import torch
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError
from tests.plan.requests import CONFIG, SHAPE, Pair, pair_with_inputs, plan


def reads_values():
    if torch.ones(3).sum().item() > 2:
        return Pair()
    return None


def needs_sizes(layers, hidden):
    return Pair()


def fails():
    raise ValueError("no such size")


def makes_three():
    return Pair(), None, 3


class Selects(Pair):
    def forward(self, x, target):
        return super().forward(x, target)["loss"] + x[x > 0].sum()


def selects():
    return Selects(), pair_with_inputs()[1]


class Exits(Pair):
    def forward(self, x, target):
        raise SystemExit(0)


def exits():
    return Exits(), pair_with_inputs()[1]


def test_a_live_model_is_left_alone():
    model = Pair()
    before = {name: (p.clone(), p.data_ptr()) for name, p in model.named_parameters()}
    made = plan(model, inputs=lambda samples, _: (torch.zeros(samples, 8), torch.zeros(samples, 1)), devices_per_node=2)
    assert made.simulated.parameters == 8 * 8 + 8 + 8 + 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name][0]) and parameter.data_ptr() == before[name][1]
    assert model(torch.zeros(1, 8), torch.zeros(1, 1))["loss"].item() >= 0
    assert deepspeed.get_accelerator().device_name() == "cpu" or torch.cuda.is_available()


def test_a_callable_by_name_and_one_that_cannot_be_built_without_values():
    made = plan(f"{__name__}:pair_with_inputs")
    assert made.simulated.parameters == 81
    with pytest.raises(DeepSpeedConfigError, match="meta device"):
        plan(reads_values)
    with pytest.raises(DeepSpeedConfigError, match="no callable"):
        plan(f"{__name__}:nothing")


def test_a_transformers_configuration(tmp_path):
    pytest.importorskip("transformers")
    facts = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    facts |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    folder, file = (plan(str(path), devices_per_node=4) for path in (tmp_path, tmp_path / "config.json"))
    layer = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96 + 2 * 64
    assert folder.simulated.parameters == 2 * layer + 2 * 100 * 64 + 64
    assert folder.device_bytes == file.device_bytes
    checkpointed = plan(str(tmp_path), devices_per_node=4, activation_checkpointing=True)
    assert checkpointed.simulated.activations < folder.simulated.activations / 2
    with pytest.raises(DeepSpeedConfigError, match="model_type"):
        (tmp_path / "config.json").write_text("{}")
        plan(str(tmp_path))


def test_models_that_cannot_be_planned():
    for name, expected in (
        ("needs_sizes", "needs layers, hidden; give a function"),
        ("fails", "cannot be built: ValueError: no such size"),
        ("makes_three", "found a tuple of 3"),
        ("exits", r"forward of Exits failed at test_models.py, line \d+: SystemExit: 0"),
        ("selects", r"forward of Selects failed at test_models.py, line \d+: .*micro-batch 2"),
    ):
        with pytest.raises(DeepSpeedConfigError, match=expected):
            plan(f"{__name__}:{name}")
    for name, expected in ((":make", "expected module:callable"), ("no.such.module:make", "ModuleNotFoundError")):
        with pytest.raises(DeepSpeedConfigError, match=expected):
            plan(name)
    with pytest.raises(DeepSpeedConfigError, match="micro_batch=1000000000000000000"):
        plan(micro_batch=10**18)


def test_transformers_configurations_that_do_not_hold(tmp_path):
    pytest.importorskip("transformers")
    for facts, expected in (
        ([1], "a list"),
        ({"model_type": "abacus"}, "model_type"),
        ({"model_type": "gpt2", "architectures": ["NoSuchModel"]}, "architectures names NoSuchModel"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(facts))
        with pytest.raises(DeepSpeedConfigError, match=expected) as refused:
            plan(str(tmp_path))
        assert len(str(refused.value)) < 600


FAMILIES = {
    "vit": {
        "architectures": ["ViTForImageClassification"],
        "image_size": 32,
        "patch_size": 8,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 200,
        "max_source_positions": 64,
        "pad_token_id": 0,
        "decoder_start_token_id": 1,
    },
    "t5": {
        "architectures": ["T5ForConditionalGeneration"],
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 2,
        "num_heads": 4,
        "vocab_size": 100,
        "decoder_start_token_id": 0,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "vocab_size": 100,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers(family, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **FAMILIES[family]}))
    made = plan(str(tmp_path), devices_per_node=2)
    assert made.simulated.flow.flops > 0 and made.simulated.activations > 0
    assert made.simulated.trained > 10_000


class RefusesCheckpointing(nn.Module):
    supports = True

    def __init__(self):
        super().__init__()
        self.pair = Pair()

    def forward(self, x, target):
        return self.pair(x, target)

    def gradient_checkpointing_enable(self):
        if not self.supports:
            raise ValueError("no support for it")


def refuses_checkpointing(supports):
    def build():
        made = RefusesCheckpointing()
        made.supports = supports
        return made, lambda samples, _tokens: (torch.zeros(samples, 8), torch.zeros(samples, 1))

    return build


def test_activations_are_shown_for_both_settings_of_checkpointing():
    """Whichever is planned; the other one takes one more forward of the same engine."""
    both = functools.partial(plan, compare_checkpointing=True)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
    for model in (SHAPE, transformers.LlamaConfig(vocab_size=100, **sizes)):
        for stage in (1, 3):
            config = {**CONFIG, "zero_optimization": {"stage": stage}}
            off, on = (both(model, config, activation_checkpointing=setting) for setting in (False, True))
            assert on.activations == off.activations and set(on.activations) == {True, False}
            assert on.activations[True] < on.activations[False]
    made = both(refuses_checkpointing(False))
    assert set(made.activations) == {False}
    assert any("gradient_checkpointing_enable() failed: no support for it" in notice for notice in made.notices)
    made = both(refuses_checkpointing(True), activation_checkpointing=True)
    assert set(made.activations) == {True}
    assert any("has no gradient_checkpointing_disable" in notice for notice in made.notices)
    with pytest.raises(DeepSpeedConfigError, match=r"gradient_checkpointing_enable\(\) failed: no support for it"):
        plan(refuses_checkpointing(False), activation_checkpointing=True)
