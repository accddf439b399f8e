"""A tiny model of every family of the Transformers library that has stacked experts."""

import importlib
import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed.parallel.expert.spread import is_stack

transformers = pytest.importorskip("transformers")
errors = pytest.importorskip("huggingface_hub.errors")

VOCABULARY = 50
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0,
    "use_cache": False, "sliding_window": 8, "rotary_dim": 4,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "dense_intermediate_size"), 24),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "moe_shared_expert_intermediate_size", "share_expert_dim", "moe_hidden_size"), 12,
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "decoder_sparse_step"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 8, "router_hidden_size": 8, "hc_lowrank": 8,
    "index_n_heads": 2, "hidden_size_per_layer_input": 8, "output_router_logits": False,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
_FULL = {"layer_types": ["full_attention", "full_attention"]}
_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_SWA = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "rel_extent": 16, "d_rel": 4}

OWN: dict[str, dict[str, Any]] = {
    "beam": _SPARSE,
    "deepseek_ocr2_text": {**_SPARSE, "num_key_value_heads": 4},
    "deepseek_v4": {"o_lora_rank": 4},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [12, 12], "num_attention_heads": 2,
        "rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]},
    },
    "flint": {"mlp_only_layers": [0]},
    "gemma4_text": {"enable_moe_block": True, "global_head_dim": 8},
    "glm4v_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 1.0}},
    "glm5_next_text": {"index_topk": 16, "qk_rope_head_dim": 0, **_SPARSE},
    "granitemoehybrid": {
        "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "layer_types": ["mamba", "attention"],
    },
    "inkling_text": {**_SWA, "sliding_window_size": 8, "n_shared_experts": 2},
    "inkling2_text": {**_SWA, "sliding_window_size": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0, "mamba_d_state": 4, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2},
    "minimax": {"layer_types": ["full_attention", "linear_attention"], "block_size": 8},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 8,
        "ssm_state_size": 4, "n_groups": 2,
    },
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen3_5_moe_text": {"layer_types": ["full_attention", "linear_attention"]},
    "qwen3_next": {"layer_types": ["full_attention", "linear_attention"]},
    "step3p5": {**_SPARSE, **_FULL},
    "unlimited_ocr_text": {**_SPARSE, "num_key_value_heads": 4, "head_dim": 4},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""What the families need beside the common sizes."""


_NOT_BY_ITSELF = ("qwen3_omni_moe_talker_text",)
"""Decoders that do not take tokens: this one speaks what another one has understood."""


def families(kinds: Collection[str] = ()) -> dict[str, type[Any]]:
    """Returns the model class of every family with stacked experts, or of these, by the type of its configuration."""
    found = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        if "down_proj = nn.Parameter" not in path.read_text():
            continue
        if kinds and not any(kind.startswith(path.parent.name) for kind in kinds):
            continue
        module = importlib.import_module(f"transformers.models.{path.parent.name}.{path.stem}")
        for ending in ("Model", "TextModel", "ForCausalLM"):  # the last one found counts
            for kind in vars(module).values():
                if not (inspect.isclass(kind) and kind.__module__ == module.__name__ and hasattr(kind, "config_class")):
                    continue
                if kind.__name__.endswith(ending) and not kind.__name__.endswith("PreTrainedModel"):
                    found[kind.config_class.model_type] = kind
    return {name: kind for name, kind in found.items() if name not in _NOT_BY_ITSELF and _has_experts(kind)}


def _has_experts(kind: type[Any]) -> bool:
    if getattr(kind.config_class, "sub_configs", None):
        return False  # a decoder beside towers has a configuration of its own
    try:
        with torch.device("meta"):
            model = kind._from_config(configuration(kind))
    except (errors.StrictDataclassError, ValueError, ImportError):
        assert not kind.__name__.endswith(("TextModel", "ForCausalLM")), kind  # say how to build a tiny one
        return False  # a tower
    return any(is_stack(module) for module in model.modules())


def configuration(kind: type[Any], **more: Any) -> Any:
    """Returns a tiny configuration for a model class."""
    cls = kind.config_class
    names = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    sizes = {key: value for key, value in _SIZES.items() if key in names}
    if "kv_lora_rank" in names:
        sizes |= {"num_key_value_heads": 4, "head_dim": 4}
    return cls(**{**sizes, **OWN.get(cls.model_type, {}), **more})


def build(kind: type[Any], seed: int = 0) -> Any:
    """Returns a model, with weights larger than usual so that every term of the gradient counts."""
    torch.manual_seed(seed)
    model = kind._from_config(configuration(kind), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Returns the model's loss, or the mean square of what a model without head gives."""
    if hasattr(model, "lm_head") or hasattr(getattr(model, "module", None), "lm_head"):
        return model(input_ids=ids, labels=ids).loss
    made = model(input_ids=ids)[0].float()
    return (made * torch.linspace(-3, 3, made.numel()).cos().view_as(made)).mean()
