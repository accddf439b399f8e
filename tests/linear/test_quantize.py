"""Models with linear layers in 8 and 4 bits: what is replaced, how far results are off, files."""

import pytest
import torch
from rich.console import Console
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.linear import QuantizationConfig, QuantizedLinear, quantize_model
from deepspeed.linear.parts import quantize_parts
from tests.harness.toy_models import causal_model

pytest.importorskip("transformers")


def llama(**kwargs):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return causal_model(vocab_size=120, **sizes | kwargs).eval()


def gpt2():
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 32}
    return causal_model("GPT2", **sizes, bos_token_id=0, eos_token_id=0).eval()


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(("bits", "bound"), [(8, 0.03), (4, 0.3)])
def test_the_model_computes_with_the_rounded_weights(make, bits, bound):
    model, reference = make(), make()
    ids = torch.arange(24).view(2, 12)
    with torch.no_grad():
        before = reference(ids).logits
        report = quantize_model(model, bits=bits, group_size=32)
        assert ((model(ids).logits - before).norm() / before.norm()) < bound
        for layer in report.layers:  # the plain model with the rounded weights
            weight = model.get_submodule(layer.name).weight
            plain = reference.get_submodule(layer.name)
            plain.weight.copy_(weight if isinstance(plain, nn.Linear) else weight.t())
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5)
    assert all(isinstance(model.get_submodule(layer.name), QuantizedLinear) for layer in report.layers)
    assert report.bytes_after == sum(t.nbytes for t in (*model.parameters(), *model.buffers())) < report.bytes_before


def test_sizes_of_weights_and_what_is_kept():
    model = llama(tie_word_embeddings=True)
    report = quantize_model(model, bits=8, skip=["down_proj"])
    assert {layer.name.rpartition(".")[2] for layer in report.layers} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"
    }  # fmt: skip
    assert all(layer.bytes_after <= 0.28 * layer.bytes_before for layer in report.layers)
    assert set(report.kept) == {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    console = Console(record=True, width=120, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report.table())
    text = console.export_text()
    assert "12 linear layers in 8 bits" in text and "shares its weight with another layer" in text


def test_groups_that_do_not_divide_are_named():
    model = llama(intermediate_size=72)
    report = quantize_model(model, bits=4, group_size=32)
    kept = report.kept["model.layers.0.mlp.down_proj"]
    assert kept == "its 72 input features are not a multiple of the group size 32"


@pytest.mark.parametrize("bits", [8, 4])
def test_a_state_dict_goes_into_a_model_on_meta(bits, tmp_path):
    from safetensors.torch import load_file, save_file

    model = llama()
    quantize_model(model, bits=bits, group_size=32)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = llama()
    quantize_model(other, bits=bits, group_size=32)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"), assign=True)
    other.model.rotary_emb = model.model.rotary_emb  # no part of a state dict
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(model(ids).logits, other(ids).logits)


def test_bfloat16_generates():
    model = llama().bfloat16()
    quantize_model(model, bits=8)
    ids = torch.arange(8).view(1, 8)
    assert model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape == (1, 12)


def test_adapters_train_through_a_quantized_base():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    quantize_model(model, bits=8, skip=["0"])
    model(torch.randn(5, 32)).square().sum().backward()
    assert model[0].weight.grad.norm() > 0 and model[1].bias.grad.norm() > 0
    assert model[1].codes.grad is None and not model[1].codes.requires_grad


def test_bad_input_raises_and_changes_nothing():
    with pytest.raises(DeepSpeedConfigError, match="QuantizedLinear\\(48, 8\\): its 48 input features"):
        QuantizedLinear(48, 8, quantization_config=QuantizationConfig(q_bits=4, group_size=32))
    with pytest.raises(DeepSpeedConfigError, match="q_bits=6"):
        QuantizationConfig(q_bits=6)
    layer = QuantizedLinear(4, 2)
    with pytest.raises(ValueError, match=r"expected a weight of shape \(2, 4\), found \(4, 2\)"):
        layer.pack(torch.ones(4, 2))
    with pytest.raises(ValueError, match="not finite"):
        layer.pack(torch.full((2, 4), float("nan")))
    assert not layer.codes.any()


def test_two_parts_that_match_a_conv1d_layer_are_refused_before_a_change():
    model = gpt2()
    with pytest.raises(
        DeepSpeedConfigError, match="'attn' and 'c_attn' both match the layer 'transformer.h.0.attn.c_attn'"
    ):
        quantize_parts(model, {"attn": {"num_bits": 8}, "c_attn": {"num_bits": 4}})
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())


def test_a_layer_with_two_names_is_quantized_under_both():
    model = nn.Sequential(shared := nn.Linear(32, 32), nn.Sequential(shared))
    report = quantize_model(model)
    assert len(report.layers) == 1 and isinstance(model[0], QuantizedLinear) and model[1][0] is model[0]
