"""Tiny mixture-of-experts models of the Transformers library."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

VOCABULARY = 50

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "use_cache": False,
}
_LATENT: dict[str, Any] = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "moe_intermediate_size": 12, "intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 4,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "moe_intermediate_size": 12, "intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2,
    "output_router_logits": True, "router_aux_loss_coef": 0.05,
}  # fmt: skip

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {
        "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
        "router_aux_loss_coef": 0.05,
    }),
    "qwen3_moe": ("Qwen3MoeConfig", _QWEN),
    "qwen2_moe": ("Qwen2MoeConfig", {**_QWEN, "shared_expert_intermediate_size": 12}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {
        **_QWEN, "shared_expert_intermediate_size": 12, "layer_types": ["full_attention", "full_attention"],
    }),
    "olmoe": ("OlmoeConfig", {
        "intermediate_size": 12, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
    }),
    "deepseek_v2": ("DeepseekV2Config", {**_LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "gpt_oss": ("GptOssConfig", {
        "intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True,
        "layer_types": ["full_attention", "full_attention"],
    }),
    "llama4": ("Llama4TextConfig", {
        "intermediate_size": 12, "intermediate_size_mlp": 24, "num_local_experts": 4, "num_experts_per_tok": 1,
        "moe_layers": [0, 1], "attention_chunk_size": 32, "layer_types": ["full_attention", "full_attention"],
    }),
}  # fmt: skip


_TWO: dict[str, Any] = {"num_experts_per_tok": 2}
_ONE_GROUP: dict[str, Any] = {
    "intermediate_size": 24, "moe_intermediate_size": 12, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, **_TWO,
}  # fmt: skip
_FULL = {"layer_types": ["full_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("NemotronHConfig", {
        **_ONE_GROUP, "layers_block_type": ["attention", "moe"], "moe_shared_expert_intermediate_size": 12,
    }),
    # with experts that give tokens back
    "longcat_flash": ("LongcatFlashConfig", {
        **_LATENT, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 12, "zero_expert_num": 2, "moe_topk": 2,
        "num_layers": 2,
    }),
    "inkling": ("InklingTextConfig", {
        **_ONE_GROUP, "swa_num_attention_heads": 2, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "n_shared_experts": 2, "sliding_window_size": 8, "d_rel": 4, "rel_extent": 16,
    }),
    "minimax_m3": ("MiniMaxM3VLTextConfig", {
        "intermediate_size": 12, "dense_intermediate_size": 24, "shared_intermediate_size": 12, "num_local_experts": 4,
        "mlp_layer_types": ["dense", "sparse"], "rotary_dim": 4, **_TWO,
    }),
}  # fmt: skip
"""Further ones, without a gate, with experts that have no weights, with shared stacks; all are in every_family.py."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "jetmoe": ("JetMoeConfig", {"intermediate_size": 12, "num_local_experts": 4, "kv_channels": 8, **_TWO}),
    "dbrx": ("DbrxConfig", {
        "d_model": 16, "n_layers": 1, "n_heads": 2, "max_seq_len": 32, "ffn_config": {"moe_num_experts": 4},
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4},
    }),
    "doge": ("DogeConfig", {"intermediate_size": 24, "num_experts": 4, "is_moe": True, **_TWO}),
}  # fmt: skip
"""Ones that do not."""


def build(kind: str, seed: int = 0, **more: Any) -> Any:
    """A model of that kind, with weights larger than usual so that every term of the gradient counts."""
    name, options = {**CONFIGS, **FAMILIES, **OTHERS}[kind]
    common = {key: value for key, value in _COMMON.items() if key != "num_hidden_layers" or "num_layers" not in options}
    config = getattr(transformers, name)(**{**common, **options, **more})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch(step: int, of_rank: int) -> dict[str, torch.Tensor]:
    """Two sentences, of another length on every rank."""
    draws = torch.Generator().manual_seed(100 * step + of_rank)
    ids = torch.randint(3, VOCABULARY, (2, 5 + 2 * (of_rank % 3)), generator=draws)
    return {"input_ids": ids, "labels": ids}
