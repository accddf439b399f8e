"""Transformers models of many families are cut by config alone; the numeric check compares output and gradients."""

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
from deepspeed.parallel.tensor import structure
from deepspeed.parallel.tensor.cutting import cut_model
from deepspeed.parallel.tensor.rules import CutRule, CutStyle
from tests.ecosystem.support import needs_transformers
from tests.harness import on_ranks

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
BERT = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "head_dim")}
BART = {
    "d_model": 32,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 44 for side in ("encoder", "decoder")},
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    **LLAMA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    **EXPERTS,
}
LINEAR = {
    **LLAMA,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["full_attention", "linear_attention"],
}
BY_PLAN = {
    "llama": LLAMA,
    "qwen3": LLAMA,
    "phi3": LLAMA,
    "gpt_neox": BERT,
    "qwen3_moe": {**LLAMA, "num_experts": 4, **EXPERTS},
    "deepseek_v3": LATENT,
    # queries with a gate per head, as wide as packed queries, keys and values
    "qwen3_next": {**LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS},
    # its plan forgets the norms of queries and keys
    "qwen3_vl_moe_text": {
        **LLAMA, "num_experts": 4, **EXPERTS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1]},
    },
}  # fmt: skip
BY_STRUCTURE = {
    "gpt2": GPT2,
    "opt": {**BERT, "ffn_dim": 44, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "bert": BERT,
    "t5": {"d_model": 32, "d_ff": 44, "num_layers": 2, "num_heads": 4, "d_kv": 8},
}
MORE = {
    **dict.fromkeys(("mistral", "qwen2", "gemma", "gemma2", "gemma3_text", "cohere", "olmo2", "starcoder2"), LLAMA),
    **dict.fromkeys(("granite", "glm", "glm4", "helium", "smollm3", "phi", "nemotron", "stablelm"), LLAMA),
    "mixtral": {**LLAMA, "num_local_experts": 4, "intermediate_size": 48},
    "axk2": {**LATENT, "head_dim": 8, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "longcat_flash": {
        **{key: value for key, value in LATENT.items() if key != "num_hidden_layers"},
        "num_layers": 1,
        "ffn_hidden_size": 44,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "inkling_text": {
        **LLAMA,
        **EXPERTS,
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "rel_extent": 16,
        "sliding_window_size": 8,
    },
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS},
    "qwen2_moe": {**LLAMA, "num_experts": 4, "shared_expert_intermediate_size": 24, **EXPERTS},
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "gptj": {**GPT2, "rotary_dim": 4},
    "gpt_neo": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    "persimmon": BERT,
    "roberta": BERT,
    "electra": BERT,
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 44},
    "bart": BART,
    "vit": {**BERT, "image_size": 16, "patch_size": 8},
}


def _model(kind: str, sizes: dict[str, Any]) -> nn.Module:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = {"vocab_size": 65, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **ids, **sizes)
    try:
        return AutoModelForCausalLM.from_config(config)
    except ValueError:
        return AutoModel.from_config(config)


def _cut(model: nn.Module, size: int, **section: Any) -> int:
    mesh = Mesh((("data", dist.get_world_size() // size), ("tensor", size)))
    groups.set_mesh(mesh)
    cut_model(Job.adopt(), model, TensorParallel(autotp_size=size, verify=True, **section), mesh, torch.device("cpu"))
    return sum(parameter.numel() for parameter in model.parameters())


@needs_transformers
@pytest.mark.parametrize(
    ("ranks", "sizes", "size"),
    [
        pytest.param(2, {**BY_PLAN, **BY_STRUCTURE}, 2, id="two ranks"),
        pytest.param(2, MORE, 2, id="more families", marks=pytest.mark.slow),
        pytest.param(4, {**BY_PLAN, **BY_STRUCTURE}, 4, id="four ranks", marks=pytest.mark.slow),
    ],
)
@on_ranks(timeout=300)
def test_by_their_plan_or_by_their_structure(sizes: dict[str, dict[str, Any]], size: int) -> None:
    for kind, given in sizes.items():
        model = _model(kind, given)
        whole = sum(parameter.numel() for parameter in model.parameters())
        assert _cut(model, size) < 0.95 * whole, kind


@needs_transformers
def test_ranks_cut_bare_parameters_in_the_same_order():
    sizes = {"hidden_size": 32, "num_hidden_layers": 6, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2}
    model = _model("mamba2", {**sizes, "expand": 2})
    column = CutRule(CutStyle.COLUMN, "a test")
    bare = list(structure._per_head(model, {f"backbone.layers.{n}.mixer.in_proj": column for n in range(6)}))
    assert len(bare) == 18 and [name.split(".")[2] for name in bare] == [str(n) for n in range(6) for _ in range(3)]


def _raise(*_: Any) -> None:
    """Stands for a model that takes sound or images beside tokens, and gets none."""
    raise KeyError("sound")


def _refused():
    def fails(words: str, model: nn.Module, size: int = 2, **section: Any) -> None:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(DeepSpeedConfigError, match=words):
            _cut(model, size, **section)
        if "verify" not in words:  # nothing was changed
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    llama = _model("llama", LLAMA)
    specs = [{"patterns": [r".*q_proj\.weight"]}, {"patterns": [r".*mystery\.weight"]}]
    fails(r"layer_specs\[1\]: '.*mystery.*' fits no weight", llama, partition_config={"layer_specs": specs})
    fails("'\\[' is no regular expression", llama, partition_config={"layer_specs": [{"patterns": ["["]}]})
    strict = {"layer_specs": specs[:1], "strict_mode": True}
    fails("strict_mode: no pattern fits 'model.layers.0.self_attn.k_proj'", llama, partition_config=strict)
    fails("no rule cuts Sequential; .* its structure was not read", nn.Sequential(nn.Linear(4, 4)))
    silent = _model("bloom", BY_STRUCTURE["bloom"])
    silent.transformer.word_embeddings.register_forward_pre_hook(_raise)
    fails("does not run on input_ids, use_cache alone .KeyError: 'sound'.*layer_specs", silent)
    few = _model("llama", {**LLAMA, "num_attention_heads": 1, "num_key_value_heads": 1})
    fails("'model.layers.0.self_attn' cannot be cut: 1 query heads are fewer than the 2 ranks", few)
    skip = {"layer_specs": [{"patterns": [".*self_attn"], "partition_type": "skip"}]}
    _cut(few, 2, partition_config=skip)  # as the message advises
    assert few.model.layers[0].self_attn.q_proj.weight.shape == (8, 32)
    assert few.model.layers[0].mlp.up_proj.weight.shape == (22, 32)
    # A rule that is wrong for the model: the output of every layer would be a part of the stream.
    wrong = {"layer_specs": [{"patterns": [r".*down_proj\.weight"], "partition_type": "column"}]}
    fails("verify: the cut LlamaForCausalLM", llama, partition_config=wrong)
    deaf = _model("llama", LLAMA)
    deaf.register_forward_pre_hook(_raise)
    with pytest.raises(
        DeepSpeedConfigError, match="verify: LlamaForCausalLM does not run on input_ids, use_cache alone .KeyError"
    ):
        _cut(deaf, 2)


def _by_patterns():
    """Patterns, a preset, a gathered output; names of row-parallel outputs."""
    specs = [
        {"patterns": [r".*mlp\.(gate|up)_proj\.weight"], "partition_type": "column"},
        {"patterns": [r".*mlp\.down_proj\.weight"], "partition_type": "row"},
        {"patterns": [r".*q_proj\.weight"], "partition_type": "column", "gather_output": True},
    ]
    model = _model("llama", LLAMA)
    _cut(model, 2, partition_config={"layer_specs": specs})
    assert model.model.layers[0].self_attn.k_proj.weight.shape == (16, 32)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (16, 32)
    _cut(_model("llama", LLAMA), 2, preset_model="llama")
    _cut(_model("bloom", BY_STRUCTURE["bloom"]), 2, preset_model="bloom")
    _cut(_model("gpt2", GPT2), 2, injection_policy_tuple=["attn.c_proj", "mlp.c_proj"])


@needs_transformers
@on_ranks(2)
def test_own_rules_and_what_is_refused() -> None:
    _by_patterns()
    _refused()
