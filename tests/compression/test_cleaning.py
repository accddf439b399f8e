"""``redundancy_clean``: the model computes what it computed compressed, and is really smaller."""

import copy

import pytest
import torch
from torch import nn

from deepspeed.compression import compression_scheduler, init_compression, redundancy_clean
from deepspeed.compression.cleaning import own_parameters
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.linear import QuantizedLinear
from deepspeed.linear.quantized_linear import QuantizedConv2d, QuantizedEmbedding
from deepspeed.zero.address import address_of
from tests.compression.test_stages import HEADS, SECTION, prepared, technique, tokens
from tests.engine.support import engine_of
from tests.harness import on_ranks
from tests.harness.toy_models import causal_model, masked_model, tiny_gpt, tower

transformers = pytest.importorskip("transformers")


def size(model):
    return sum(each.nbytes for each in (*model.parameters(), *model.buffers()))


def at_the_end(model):
    """A copy in which every technique acts."""
    model = copy.deepcopy(model)
    compression_scheduler(model).at(1000)
    return model.eval()


def trained(model, section, batch, steps=3):
    """A few steps with everything on, so that scores have moved."""
    torch.manual_seed(2)
    init_compression(model, {"compression_training": section})
    scheduler = compression_scheduler(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        scheduler.step()
        model(**batch).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_everything_at_once_on_gpt2():
    model = prepared()
    plain = size(tiny_gpt())
    ids = tokens(0, 0, 0)
    with torch.no_grad():
        expected = at_the_end(model)(ids).logits
        clean = redundancy_clean(model, {"compression_training": SECTION}).eval()
        torch.testing.assert_close(clean(ids).logits, expected, rtol=1e-4, atol=1e-5)
    block = clean.transformer.h[0]
    assert block.mlp.c_fc.out_features == 24 and block.mlp.c_proj.in_features == 24
    # ceil(0.6 of 3 heads) is 2.
    assert block.attn.c_attn.out_features == 24 and block.attn.num_heads == 2 and block.attn.split_size == 8
    assert isinstance(block.attn.c_proj, QuantizedLinear) and isinstance(clean.transformer.wte, QuantizedEmbedding)
    assert clean.lm_head.codes is clean.transformer.wte.codes, "the tie"
    report = clean.compression_report
    assert (report.bytes_before, report.bytes_after) == (plain, size(clean))
    assert report.bytes_after < 0.5 * plain and "-> " in report.line()


@pytest.mark.parametrize(
    ("bits", "kind", "groups", "most"),
    [
        (8, "symmetric", 1, 0.28), (8, "asymmetric", 32, 0.32), (5, "symmetric", 32, 0.28), (4, "symmetric", 32, 0.20),
        (4, "asymmetric", 1, 0.20), (3, "symmetric", 1, 0.20), (2, "symmetric", 1, 0.09), (1, "symmetric", 32, 0.07),
    ],
)  # fmt: skip
def test_weights_of_every_width_are_stored_in_few_bits(bits, kind, groups, most):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 96, bias=False), nn.Tanh(), nn.Linear(96, 32, bias=False))
    with torch.no_grad():
        model[0].weight[5] = 0  # a row of zeros
    shared = {"quantize_weight_in_forward": True, "quantization_type": kind, "quantize_groups": groups}
    config = {
        "compression_training": {
            "weight_quantization": technique(shared, {"start_bits": bits, "target_bits": bits}, ["*"])
        }
    }
    x, before = torch.randn(9, 128), size(model)
    init_compression(model, config)
    expected = at_the_end(model)(x)
    clean = redundancy_clean(model, config)
    torch.testing.assert_close(clean(x), expected, rtol=1e-4, atol=1e-6)
    assert size(clean) <= most * before
    state = clean.state_dict()
    again = nn.Sequential(nn.Linear(128, 96, bias=False), nn.Tanh(), nn.Linear(96, 32, bias=False))
    again = redundancy_clean(init_compression(again, config), config)
    again.load_state_dict(state)
    assert torch.equal(again(x), clean(x)), "a file of it is read by a model prepared the same way"
    close = clean.bfloat16()(x.bfloat16()).float()
    assert (close - expected).norm() < 0.02 * expected.norm(), "the packed kernels"


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 10, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(10)
        self.second = nn.Conv2d(10, 4, 3, stride=2)
        self.last = nn.Linear(4 * 9, 5)

    def forward(self, x):
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(x).flatten(1))


@pytest.mark.parametrize("method", ["l1", "topk"])
def test_channels_and_what_follows_them(method):
    torch.manual_seed(0)
    model = Images()
    with torch.no_grad():  # a batch norm after training
        model.norm.weight.uniform_(0.5, 2)
        model.norm.bias.normal_()
        model.norm.running_mean.normal_()
    section = {
        "channel_pruning": {
            "shared_parameters": {"enabled": True, "method": method, "schedule_offset": 0},
            "different_groups": {
                "first": {
                    "params": {"dense_ratio": 0.5},
                    "modules": ["first"],
                    "related_modules": [["norm", "second"]],
                },
                "second": {"params": {"dense_ratio": 0.75}, "modules": ["second"], "related_modules": [["last"]]},
            },
        },
        "weight_quantization": technique(
            {"quantize_weight_in_forward": True}, {"start_bits": 8, "target_bits": 8}, ["second"]
        ),
        "activation_quantization": technique({"range_calibration": "static", "schedule_offset": 0}, {"bits": 8}, ["*"]),
    }
    x = torch.randn(6, 3, 8, 8)
    init_compression(model, {"compression_training": section})
    scheduler = compression_scheduler(model)
    scheduler.step(step_zero_check=True)
    model(x)  # the static range
    model.eval()
    expected = model(x)
    clean = redundancy_clean(model, {"compression_training": section})
    torch.testing.assert_close(clean(x), expected, rtol=1e-4, atol=1e-5)
    assert clean.first.weight.shape == (5, 3, 3, 3) and clean.norm.num_features == 5
    assert isinstance(clean.second, QuantizedConv2d) and clean.second.shape == (3, 5, 3, 3)
    assert clean.last.weight.shape == (5, 27)
    assert all(parameter.requires_grad for parameter in clean.first.parameters())


def bert():
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 36}
    return masked_model(head="ForSequenceClassification", vocab_size=40, max_position_embeddings=16, **sizes)


def test_the_published_patterns_on_bert():
    section = {
        "row_pruning": technique(
            {"method": "topk", "schedule_offset": 1}, {"dense_ratio": 0.5}, ["intermediate.dense"],
            related_modules=[["layer.\\w+.output.dense"]],
        ),
        "head_pruning": technique(
            {"num_heads": HEADS, "schedule_offset": 1}, {"dense_ratio": 0.34}, ["attention.output.dense"],
            related_modules=[["self.query", "self.key", "self.value"]],
        ),
        "sparse_pruning": technique({"schedule_offset": 1}, {"dense_ratio": 0.5}, ["attention.self"]),
    }  # fmt: skip
    ids = torch.arange(20).view(2, 10)
    model = trained(bert(), section, {"input_ids": ids})
    with torch.no_grad():
        expected = at_the_end(model)(ids).logits
        clean = redundancy_clean(model, {"compression_training": section}).eval()
        torch.testing.assert_close(clean(ids).logits, expected, rtol=1e-4, atol=1e-5)
    layer = clean.bert.encoder.layer[1]
    assert layer.intermediate.dense.weight.shape == (18, 24) and layer.output.dense.weight.shape == (24, 18)
    assert layer.attention.self.query.weight.shape == (16, 24) and layer.attention.output.dense.weight.shape == (24, 16)
    assert (
        "of the remaining weights are zero" in clean.compression_report.lines["bert.encoder.layer.0.attention.self.key"]
    )
    clean(ids).logits.sum().backward()  # what is not quantized trains on


def test_what_cannot_be_cleaned_is_named():
    config = {"compression_training": SECTION}
    with pytest.raises(CallOrderError, match="expected a model with compressed layers"):
        redundancy_clean(tiny_gpt(), config)
    other = copy.deepcopy(config)
    other["compression_training"]["row_pruning"]["different_groups"]["only"]["params"]["dense_ratio"] = 0.9
    with pytest.raises(DeepSpeedConfigError, match="that init_compression was given, found a different one"):
        redundancy_clean(prepared(), other)
    with pytest.raises(DeepSpeedConfigError, match="compressed already"):
        init_compression(prepared(), config)
    assert size(redundancy_clean(prepared(), config, packed=False)) < size(tiny_gpt())


def llama(**more):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return causal_model(**sizes, vocab_size=40, **more)


def only(shared, params, modules, **more):
    group = {"params": params, "modules": modules, **more}
    return {"shared_parameters": {"enabled": True, "schedule_offset": 0, **shared}, "different_groups": {"only": group}}


IDS = torch.arange(3, 21).view(2, 9)


@pytest.mark.parametrize("bits", [8, 1])
def test_a_tied_embedding_that_a_pattern_names_twice_goes_by_rows(bits):
    forward = {"quantize_weight_in_forward": True}
    section = {"weight_quantization": only(forward, {"start_bits": bits, "target_bits": bits}, ["*"])}
    model = trained(llama(tie_word_embeddings=True), section, {"input_ids": IDS})
    with torch.no_grad():
        whole = at_the_end(model)
        expected = whole(IDS).logits
        rows = whole.model.embed_tokens(IDS)
        torch.testing.assert_close(
            whole.model.embed_tokens(IDS[:1]), rows[:1], rtol=0, atol=0
        )  # whatever else is asked
        clean = redundancy_clean(model, {"compression_training": section}).eval()
        torch.testing.assert_close(clean(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_two_names_is_replaced_under_both():
    model = nn.Sequential(shared := nn.Linear(64, 64), nn.ReLU(), shared)
    forward = {"quantize_weight_in_forward": True}
    section = {"weight_quantization": only(forward, {"start_bits": 8, "target_bits": 8}, ["*"])}
    init_compression(model, {"compression_training": section})
    x = torch.randn(3, 64)
    expected = at_the_end(model)(x)
    clean = redundancy_clean(model, {"compression_training": section})
    assert isinstance(clean[0], QuantizedLinear) and clean[2] is clean[0]
    assert clean.compression_report.bytes_after < 0.5 * clean.compression_report.bytes_before
    torch.testing.assert_close(clean(x), expected, rtol=1e-4, atol=1e-5)


class _ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(input=x)


@pytest.mark.parametrize("is_packed", [False, True])
def test_quantized_inputs_may_be_passed_by_keyword(is_packed):
    section = {"activation_quantization": only({}, {"bits": 4}, ["*"])}
    if is_packed:
        forward = {"quantize_weight_in_forward": True}
        section["weight_quantization"] = only(forward, {"start_bits": 8, "target_bits": 8}, ["*"])
    model = init_compression(_ByKeyword(), {"compression_training": section})
    x = torch.randn(3, 8)
    expected = at_the_end(model)(x)
    clean = redundancy_clean(model, {"compression_training": section})
    torch.testing.assert_close(clean(x), expected)
    assert isinstance(clean.layer, QuantizedLinear) == is_packed and clean.layer.activation_quantizer.is_acting
    assert not torch.allclose(clean(x), nn.functional.linear(x, clean.layer.weight, clean.layer.bias), atol=1e-4)


def test_a_model_that_is_one_layer_keeps_floats_and_says_so():
    forward = {"quantize_weight_in_forward": True}
    section = {"weight_quantization": only(forward, {"start_bits": 8, "target_bits": 8}, ["*"])}
    model = init_compression(nn.Linear(64, 64), {"compression_training": section})
    clean = redundancy_clean(model, {"compression_training": section})
    assert type(clean) is nn.Linear and "stored as floats (the layer is the model" in clean.compression_report.lines[""]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
def test_a_compressed_embedding_takes_ids_of_every_shape(shape):
    plain = nn.Embedding(5, 4)
    forward = {"quantize_weight_in_forward": True}
    section = {"weight_quantization": only(forward, {"start_bits": 8, "target_bits": 8}, ["*"])}
    model = init_compression(nn.Sequential(copy.deepcopy(plain)), {"compression_training": section})
    compression_scheduler(model).at(1)
    ids = torch.randint(0, 5, shape)
    torch.testing.assert_close(model(ids), plain(ids), rtol=0, atol=0.02 * plain.weight.detach().abs().max().item())


def test_the_halves_of_a_gated_layer_lose_the_same_rows():
    related = {"related_modules": [["down_proj", "gate_proj"]]}
    section = {"row_pruning": only({"method": "topk"}, {"dense_ratio": 0.5}, ["up_proj"], **related)}
    model = trained(llama(), section, {"input_ids": IDS})
    with torch.no_grad():
        expected = at_the_end(model)(IDS).logits
        clean = redundancy_clean(model, {"compression_training": section}).eval()
        torch.testing.assert_close(clean(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    layer = clean.model.layers[0].mlp
    shapes = [tuple(part.weight.shape) for part in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    assert shapes == [(24, 32), (24, 32), (32, 24)]


def test_heads_that_share_keys_stay():
    related = {"related_modules": [["q_proj"]]}
    section = {"head_pruning": only({"num_heads": 4}, {"dense_ratio": 0.5}, ["o_proj"], **related)}
    with pytest.raises(DeepSpeedConfigError, match="2 heads share keys and values, so single heads cannot be removed"):
        init_compression(llama(num_key_value_heads=2), {"compression_training": section})
    del section["head_pruning"]["different_groups"]["only"]["related_modules"]
    model = trained(llama(num_key_value_heads=2), section, {"input_ids": IDS})
    with torch.no_grad():
        expected = at_the_end(model)(IDS).logits
        clean = redundancy_clean(model, {"compression_training": section}).eval()
        torch.testing.assert_close(clean(IDS).logits, expected)


@on_ranks(1)
def test_attributes_of_programs_go_with_the_copies() -> None:
    engine = engine_of(tower(depth=1), 1)
    model = engine.module
    former = model.first.weight
    former.is_shared = ["a mark of the program"]
    own_parameters(model)
    assert model.first.weight is not former and torch.equal(model.first.weight, former)
    assert model.first.weight.is_shared is former.is_shared
    assert address_of(former) is not None and address_of(model.first.weight) is None
    assert not any(name.startswith(("ds_", "_ds_")) for name in vars(model.first.weight))
