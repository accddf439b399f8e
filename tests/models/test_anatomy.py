"""The parts of models of many families are found."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.models import configurations
from deepspeed.models.anatomy import anatomy, base_of, is_causal_lm, unwrapped
from tests.models.families import FAMILIES, GROUPED, family

transformers = pytest.importorskip("transformers")

# Path of the decoder, name of its list of blocks, path of the embedding, last norm, path of the head, heads, key/value
# heads, whether the head is the embedding.
USUAL = ("model", "layers", "model.embed_tokens", "norm", "lm_head", 4, 2, False)
OF_GPT = ("transformer", "h", "transformer.wte", "ln_f", "lm_head", 4, 4, True)
EXPECTED = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere", "starcoder2"), (*USUAL[:7], True)),
    "phi": ("model", "layers", "model.embed_tokens", "final_layernorm", "lm_head", 4, 2, False),
    "persimmon": ("model", "layers", "model.embed_tokens", "final_layernorm", "lm_head", 4, 4, False),
    "gpt2": OF_GPT,
    "gpt_neo": OF_GPT,
    "gptj": (*OF_GPT[:7], False),
    "gpt_neox": ("gpt_neox", "layers", "gpt_neox.embed_in", "final_layer_norm", "lm_head", 4, 4, False),
    "gpt_bigcode": (*OF_GPT[:6], 1, True),
    "bloom": ("transformer", "h", "transformer.word_embeddings", "ln_f", "lm_head", 4, 4, True),
    "opt": ("model.decoder", "layers", "model.decoder.embed_tokens", "final_layer_norm", "lm_head", 4, 4, True),
    "falcon": ("transformer", "h", "transformer.word_embeddings", "ln_f", "lm_head", 4, 1, True),
    "mpt": ("transformer", "blocks", "transformer.wte", "norm_f", "lm_head", 4, 4, True),
    "mamba": ("backbone", "layers", "backbone.embeddings", "norm_f", "lm_head", None, None, True),
    "bert": (
        "bert.encoder", "layer", "bert.embeddings.word_embeddings", None, "cls.predictions.decoder", 4, 4, True,
    ),
    "roberta": (
        "roberta.encoder", "layer", "roberta.embeddings.word_embeddings", None, "lm_head.decoder", 4, 4, True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAMILIES))
def test_parts_of_a_family(name):
    model = family(name)
    found = anatomy(model)
    decoder, blocks, embedding, norm, head, heads, kv_heads, tied = EXPECTED.get(name, USUAL)
    assert found.decoder_path == decoder and model.get_submodule(decoder) is found.decoder
    assert found.block_lists == (blocks,) and len(found.blocks) == 2
    assert found.blocks[1] is model.get_submodule(f"{decoder}.{blocks}.1")
    assert (found.embedding_path, found.head_path) == (embedding, head)
    assert model.get_submodule(embedding) is model.get_input_embeddings()
    assert found.head is model.get_output_embeddings()
    assert found.norms == ((norm,) if norm else ())
    sizes = configurations.heads_of(model.config), configurations.kv_heads_of(model.config)
    assert (*sizes, found.is_tied) == (heads, kv_heads, tied)
    assert found.is_whole_base == (name not in ("bert", "roberta"))
    assert is_causal_lm(model) == type(model).__name__.endswith("ForCausalLM")


def test_what_follows_the_last_norm():
    narrow = anatomy(family("opt", do_layer_norm_before=False))
    assert (narrow.norms, narrow.after_norm) == ((), ("project_out",))
    assert anatomy(family("opt", word_embed_proj_dim=16)).norms == ("final_layer_norm",)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma", "mixtral", "persimmon"])
def test_heads_are_those_of_the_attention(name):
    model = family(name)
    attention = next(each for each in anatomy(model).blocks[0].modules() if "Attention" in type(each).__name__)
    heads, kv_heads = configurations.heads_of(model.config), configurations.kv_heads_of(model.config)
    assert heads // kv_heads == getattr(attention, "num_key_value_groups", 1)


def test_encoder_decoders_have_the_decoders_blocks():
    config = transformers.T5Config(d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, vocab_size=40)
    with torch.device("meta"):
        model = transformers.T5ForConditionalGeneration(config)
    found = anatomy(model)
    assert found.decoder is model.decoder and found.blocks == tuple(model.decoder.block)
    assert found.head is model.lm_head and not found.is_whole_base and not is_causal_lm(model)
    assert configurations.attends_across_sequences(config)


def test_models_without_a_head():
    model = family("llama").model
    found = anatomy(model)
    assert found.decoder is model and found.decoder_path == "" and found.head is None and not found.is_tied
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=8, patch_size=4
    )
    with torch.device("meta"):
        vision = anatomy(transformers.ViTForImageClassification(config))
    assert vision.head is None and configurations.heads_of(config) == 4


def test_adapters_are_taken_off():
    peft = pytest.importorskip("peft")
    model = family("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    assert unwrapped(adapted) is model and base_of(model) is model.model
    assert anatomy(adapted).decoder is model.model


def test_models_of_other_libraries():
    found = anatomy(nn.Sequential(nn.Linear(2, 2)))
    assert (found.decoder, found.head, found.embedding_path, found.blocks) == (None, None, "", ())
    assert configurations.text_config(None) is None and configurations.model_type_of(nn.Linear(1, 1)) is None


def test_configurations():
    config = transformers.MixtralConfig(**GROUPED, output_router_logits=True)
    assert configurations.counts_routers(config) and configurations.longest_sequence_of(config) == 32
    assert configurations.vocabulary_of(config) == 40 and configurations.is_library_config(config)
    inner = transformers.LlavaConfig(text_config=transformers.LlamaConfig(**GROUPED))
    assert configurations.kv_heads_of(inner) == 2 and configurations.text_config(inner).hidden_size == 16
    several = transformers.MusicgenConfig(
        text_encoder=transformers.T5Config(), audio_encoder=transformers.EncodecConfig(),
        decoder=transformers.MusicgenDecoderConfig(),
    )  # fmt: skip
    assert configurations.text_config(several) is several and configurations.vocabulary_of(several) is None
