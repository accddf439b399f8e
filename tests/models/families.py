"""Small configurations of many families of the Transformers library, and their models without values."""

from __future__ import annotations

from typing import Any

import torch

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8},
    "gemma3_text": {**GROUPED, "head_dim": 8},
    "olmo2": GROUPED,
    "granite": GROUPED,
    "cohere": GROUPED,
    "starcoder2": GROUPED,
    "phi": GROUPED,
    "phi3": GROUPED,
    "persimmon": SIZES,
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "moe_intermediate_size": 8},
    "gpt_oss": {**GROUPED, "num_local_experts": 4, "head_dim": 4},
    "gpt2": GPT,
    "gpt_neo": {
        "vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
    },
    "gptj": {**GPT, "rotary_dim": 4},
    "gpt_neox": SIZES,
    "gpt_bigcode": GPT,
    "bloom": {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 4},
    "opt": {
        "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 24,
        "max_position_embeddings": 32, "word_embed_proj_dim": 8,
    },
    "falcon": {**SIZES, "multi_query": True},
    "mpt": {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
    "mamba": {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4},
    "bert": SIZES,
    "roberta": SIZES,
}  # fmt: skip


def family(name: str, **more: Any) -> Any:
    """Returns the language model of a family, without values."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(name, **{**FAMILIES[name], **more})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)
