"""Blocks that run one by one with what was recorded for them, and the model's own end, compute what the model does."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepspeed.errors import NotYetSupportedError
from deepspeed.models.anatomy import anatomy
from deepspeed.models.parts import ModelPart
from deepspeed.models.shell import Recording, Shell, record_routers, recorded_routers
from tests.models.families import FAMILIES

transformers = pytest.importorskip("transformers")

# The others have no single row of blocks, or take their tokens in ways of their own.
ROWS = [name for name in FAMILIES if name not in ("bert", "roberta", "mamba")]
TOKENS = torch.arange(12).view(2, 6) % 7 + 1


def _model(name, **more):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**FAMILIES[name], **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def _recording(found):
    part = ModelPart(found.model, found.model, found.decoder_path)
    left_out = {found.embedding_path.rpartition(".")[2], *found.norms, *found.after_norm}
    return Recording(
        found.decoder,
        found.block_lists[0],
        lambda name: nn.Identity() if name in left_out else part.inside(name).get(),
    )


def _by_parts(model, mask):
    found = anatomy(model)
    calls = _recording(found).calls(inputs_embeds=model.get_input_embeddings()(TOKENS), attention_mask=mask)
    hidden, router_outputs = calls[0].hidden, None
    for block, call in zip(found.blocks, calls, strict=True):
        made = block(hidden, *call.arguments, **call.named)
        hidden = made[0] if isinstance(made, tuple) else made
    for name in (*found.norms, *found.after_norm):
        hidden = getattr(found.decoder, name)(hidden)
    return Shell(found).finish(hidden, router_outputs, found.head)


@pytest.mark.parametrize("name", ROWS)
def test_a_model_by_its_parts(name):
    model = _model(name)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    with torch.no_grad():
        expected = model(input_ids=TOKENS, attention_mask=mask, use_cache=False).logits
        made = _by_parts(model, mask)
    assert torch.equal(made[mask.bool()], expected[mask.bool()])


def test_the_model_is_left_as_it_is():
    model = _model("llama")
    before = {name: type(module) for name, module in model.named_modules()}
    with torch.no_grad():
        _by_parts(model, None)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_decoder_that_skips_blocks_is_refused():
    model = _model("opt", layerdrop=1.0).train()
    found = anatomy(model)
    with pytest.raises(NotYetSupportedError, match="OPTDecoder calls 0 of its 2 blocks"):
        _recording(found).calls(inputs_embeds=torch.zeros(2, 6, 8))


def test_routers_are_heard():
    found = anatomy(_model("mixtral"))
    routers = recorded_routers(found.decoder)
    assert [kind.__name__ for kind, _ in routers] == ["MixtralTopKRouter"]
    logits: list[torch.Tensor] = []
    record_routers(found.blocks[0], routers, logits)
    with torch.no_grad():
        found.model(input_ids=TOKENS)
    assert [tuple(each.shape) for each in logits] == [(12, 4)]
    assert recorded_routers(anatomy(_model("llama")).decoder) == []


def test_parts_are_built_alone():
    model = _model("llama")
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(model.config)
    part = ModelPart(skeleton, None, "model").inside("layers").inside("1")
    assert part.name == "model.layers.1." and part.original() is skeleton.model.layers[1]
    made = part.get()
    shapes = {name: tensor.shape for name, tensor in model.model.layers[1].state_dict().items()}
    assert {name: tensor.shape for name, tensor in made.state_dict().items()} == shapes
    assert all(not tensor.is_meta and tensor.isfinite().all() for tensor in made.state_dict().values())
    with torch.device("meta"):
        assert all(tensor.is_meta for tensor in part.get().state_dict().values())
    rotary = ModelPart(skeleton, None, "model.rotary_emb").get()
    assert torch.equal(rotary.inv_freq, model.model.rotary_emb.inv_freq)
    assert part.tensor_plan("part")["part.self_attn.q_proj"] == "colwise"
    assert ModelPart(model, model, "lm_head").get() is model.lm_head
