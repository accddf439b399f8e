"""Families of models with sizes that nothing divides: loss and every gradient of the cut model are those of the whole.

In fp64, so that a difference is no rounding; what computes in fp32 inside (norms, grouped products of experts) may
differ by as much as that.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.comm.job import groups
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mesh import Mesh
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.tensor.cutting import cut_model, inputs_of
from deepspeed.zero.tiling.parts import part_owners_of
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks
from tests.parallel.tensor.test_cutting import BART, BERT, EXPERTS, GPT2, LATENT, LLAMA, _model

GROUPED = {**LLAMA, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6}
GROUPED |= {"intermediate_size": 37, "tie_word_embeddings": True}
ONE_KEY = {**GROUPED, "num_key_value_heads": 1, "tie_word_embeddings": False}
FIVE = {**GROUPED, "hidden_size": 30, "num_attention_heads": 5, "num_key_value_heads": 5}
PLAIN = {**BERT, "hidden_size": 30, "num_attention_heads": 5, "intermediate_size": 37}
FALCON = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6}
T5 = {"d_model": 30, "d_ff": 37, "num_layers": 2, "num_heads": 5, "d_kv": 6}
MIXED = {**GROUPED, "intermediate_size": 48}
SIDES = {f"{side}_attention_heads": 5 for side in ("encoder", "decoder")}
LATENT_SIX = {**LATENT, "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6}

GATED = {**GROUPED, "num_key_value_heads": 3, "layer_types": ["full_attention", "full_attention"]}

AWKWARD = {
    "llama, grouped, tied": ("llama", GROUPED),
    "qwen3, one key/value head": ("qwen3", ONE_KEY),
    "apertus: an activation with parameters": ("apertus", GROUPED),
    "falcon, packed by groups": ("falcon", {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon, ALiBi": ("falcon", {**FALCON, "multi_query": False, "alibi": True, "bias": True}),
    "gpt_oss: a number for every head": ("gpt_oss", {**GROUPED, "num_local_experts": 4, "intermediate_size": 32}),
    "qwen3_5: queries with a gate per head": ("qwen3_5_text", GATED),
    "ctrl: the embedding is scaled in place": ("ctrl", {"n_embd": 30, "n_head": 5, "n_layer": 2, "dff": 37}),
    "mpt": ("mpt", {"d_model": 30, "n_heads": 5, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2}),
}
LIKE_LLAMA = (
    "mistral qwen2 qwen3 gemma gemma2 gemma3_text phi3 cohere cohere2 olmo2 olmo3 stablelm starcoder2 granite glm glm4 "
    "nemotron smollm3 exaone4 helium hunyuan_v1_dense ernie4_5 arcee apertus seed_oss lfm2"
).split()
EVERYTHING = {
    **AWKWARD,
    **{f"{kind}, {label}": (kind, sizes)
       for kind in LIKE_LLAMA
       for label, sizes in (("grouped, tied", GROUPED), ("one key/value head", ONE_KEY), ("5 heads", FIVE))},
    "gpt2": ("gpt2", {**GPT2, "n_embd": 30, "n_head": 5}),
    "gpt_neox": ("gpt_neox", PLAIN),
    "bloom": ("bloom", {"hidden_size": 30, "n_layer": 2, "n_head": 5}),
    "opt, norms last": ("opt", {**PLAIN, "ffn_dim": 37, "word_embed_proj_dim": 14, "do_layer_norm_before": False}),
    "biogpt": ("biogpt", PLAIN),
    "bert": ("bert", PLAIN),
    "electra": ("electra", PLAIN),
    "albert": ("albert", {**PLAIN, "embedding_size": 16}),
    "t5, gated, untied": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", {**BART, **SIDES, "d_model": 30, "encoder_ffn_dim": 37}),
    "vit": ("vit", {**PLAIN, "image_size": 16, "patch_size": 8}),
    "clip": ("clip_text_model", PLAIN),
    "dinov2": ("dinov2", {**PLAIN, "image_size": 16, "patch_size": 8}),
    "mixtral": ("mixtral", {**MIXED, "num_local_experts": 5}),
    "mixtral, 5 times 4 features": ("mixtral", {**MIXED, "num_local_experts": 5, "intermediate_size": 20}),
    "qwen3_moe": ("qwen3_moe", {**GROUPED, "num_experts": 5, **EXPERTS}),
    "olmoe": ("olmoe", {**MIXED, "num_experts": 5, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", {**LATENT_SIX, "q_lora_rank": None}),
    "deepseek_v3": ("deepseek_v3", LATENT_SIX),
}  # fmt: skip


def _ask(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    out = model(**inputs)
    loss = getattr(out, "loss", None)
    if loss is None:
        tensors = [value for value in out.values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
        loss = sum(value.square().mean() for value in tensors)
    loss.backward()
    return loss.detach()


def _compare(label: str, kind: str, sizes: dict[str, Any], size: int) -> None:
    whole = _model(kind, sizes).eval()
    has_experts = any("expert" in name for name, _ in whole.named_parameters())  # their kernels know no fp64
    dtype, allowed = (torch.float32, 2e-6) if has_experts else (torch.float64, 2e-7)
    cut = copy.deepcopy(whole.to(dtype))
    inputs = inputs_of(whole)
    assert inputs is not None, label
    if getattr(whole, "loss_type", None) == "ForCausalLM":
        inputs["labels"] = inputs["input_ids"]
    mesh = Mesh((("data", dist.get_world_size() // size), ("tensor", size)))
    groups.set_mesh(mesh)
    expected = _ask(whole, inputs)
    cut_model(Job.adopt(), cut, TensorParallel(autotp_size=size, verify=False), mesh, torch.device("cpu"))
    assert sum(p.numel() for p in cut.parameters()) < 0.95 * sum(p.numel() for p in whole.parameters()), label
    torch.testing.assert_close(_ask(cut, inputs), expected, rtol=allowed, atol=0.0, msg=lambda text: f"{label}: {text}")
    largest = max(p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None)
    for (name, one), (_, other) in zip(whole.named_parameters(), cut.named_parameters(), strict=True):
        if one.grad is None:
            assert other.grad is None or not other.grad.any(), (label, name)
            continue
        gradient, owners = other.grad, part_owners_of(other)
        gradient = torch.zeros_like(other) if gradient is None else gradient
        found = gradient if owners is None else owners.whole(gradient, name)
        assert found.shape == one.grad.shape, (label, name)
        assert (found - one.grad).abs().max().item() <= allowed * largest, (label, name)


@needs_transformers
@pytest.mark.parametrize(
    ("ranks", "size", "everything"),
    [
        pytest.param(2, 2, False, id="unusual"),
        *(pytest.param(size, size, True, marks=pytest.mark.slow) for size in (2, 3, 4)),
    ],
)
@on_ranks(timeout=900)
def test_unusual_models(size: int, everything: bool) -> None:
    for label, (kind, sizes) in (EVERYTHING if everything else AWKWARD).items():
        try:
            _compare(label, kind, sizes, size)
        except (
            DeepSpeedConfigError
        ) as error:  # heads that so many ranks cannot share: the message names the layer and what to write
            words = str(error)
            assert size > 2 and "autotp_size" in words and "layer_specs" in words, (label, words)


@needs_transformers
@on_ranks(2)
def test_a_packed_weight_with_one_key_value_head_is_refused() -> None:
    model = _model("falcon", {**FALCON, "multi_query": True})
    words = "query_key_value' packs 6 query heads with 1 key/value heads, .*layer_specs with the pattern '.*query_key"
    with pytest.raises(DeepSpeedConfigError, match=words):
        cut_model(Job.adopt(), model, TensorParallel(autotp_size=2), Mesh((("tensor", 2),)), torch.device("cpu"))
