"""Attention implementations are registered, given to models, called for layers; masks are recognized."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models import attention, masks
from tests.models.families import FAMILIES, family

transformers = pytest.importorskip("transformers")

NAME = "deepspeed_of_this_test"
SUPPORTED = [
    name for name in FAMILIES if name not in ("bloom", "falcon", "mpt", "gptj", "gpt_neo")
]  # Mamba has no attention


@pytest.fixture
def registered():
    """Takes the name out of the library's registries again."""
    yield
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        registry._global_mapping.pop(NAME, None)


def _function(layer, query, key, value, mask, **more):
    return attention.call_attention("sdpa", layer, query, key, value, mask)


def _mask(**more):
    return masks.mask_of_implementation("sdpa", **more)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_models_take_it_or_are_refused(name, registered):
    model = family(name)
    before = attention.attention_name(model.config)
    assert attention.takes_attention_by_name(model) and attention.names_attention(model.config)
    if name in SUPPORTED:
        attention.check_use_of_attention(model, NAME, _function, _mask, "a test")
        assert attention.attention_name(model.config) == before  # only a question
        attention.use_attention(model, NAME, _function, _mask, "a test")
        assert {attention.attention_name(each.config) for each in attention.configured_modules(model)} == {NAME}
        assert attention.has_attention(NAME) and NAME in attention.known_attention_names()
    else:
        with pytest.raises((DeepSpeedConfigError, ValueError), match="AttentionInterface|attention"):
            attention.use_attention(model, NAME, _function, _mask, "a test")


def test_the_same_result_by_a_registered_name(registered):
    config = transformers.AutoConfig.for_model("llama", **FAMILIES["llama"])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    other = transformers.AutoModelForCausalLM.from_config(config).eval()
    tokens = torch.arange(12).view(2, 6)
    padding = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.no_grad():
        expected = model(input_ids=tokens, attention_mask=padding).logits
        attention.own_configurations(model)
        attention.use_attention(model, NAME, _function, _mask, "a test")
        torch.testing.assert_close(model(input_ids=tokens, attention_mask=padding).logits, expected)
    assert attention.attention_name(other.config) == "sdpa"


def test_layers_without_their_model(registered):
    layers = nn.ModuleList(family("llama").model.layers)
    attention.own_configurations(layers)
    attention.name_attention(layers, NAME)
    assert {attention.attention_name(each.config) for each in attention.configured_modules(layers)} == {NAME}


def test_objects_of_other_libraries():
    assert not attention.takes_attention_by_name(nn.Linear(1, 1)) and attention.attention_name(None) is None
    assert not attention.has_attention("no_such")


def test_masks_are_recognized():
    from transformers import masking_utils as library

    window = library.sliding_window_causal_mask_function(5)
    causal = library.causal_mask_function
    both = library.and_masks(window, library.padding_mask_function(torch.ones(1, 4)))
    cases = {
        causal: masks.MaskKind(),
        library.bidirectional_mask_function: masks.MaskKind(is_causal=False),
        window: masks.MaskKind(window=5),
        both: masks.MaskKind(window=5),
        library.and_masks(causal, library.packed_sequence_mask_function(torch.zeros(1, 4))): masks.MaskKind(),
        library.and_masks(causal, library.bidirectional_mask_function): masks.MaskKind(),
        library.and_masks(library.padding_mask_function(torch.ones(1, 4))): masks.MaskKind(is_causal=False),
    }
    for function, expected in cases.items():
        assert masks.mask_kind(function) == expected
    assert masks.is_plain_mask(causal) and not masks.is_plain_mask(window)
    with pytest.raises(masks.UnknownMaskError, match="chunked_overlay"):
        masks.mask_kind(library.chunked_causal_mask_function(4, torch.zeros(2)))
    with pytest.raises(masks.UnknownMaskError, match="sliding_window_overlay"):
        masks.mask_kind(library.and_masks(library.sliding_window_overlay(5), library.bidirectional_mask_function))
