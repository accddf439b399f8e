"""The ready rules that ``tensor_parallel.preset_model`` names."""

from __future__ import annotations

from typing import Any

_ATTENTION_OF_LLAMA = [
    {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
]
_MLP_OF_LLAMA = [
    {"patterns": [r".*mlp\.(gate|up)_proj\.weight$"], "partition_type": "column"},
    {"patterns": [r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
]

SPECS: dict[str, list[dict[str, Any]]] = {
    "llama": [*_ATTENTION_OF_LLAMA, *_MLP_OF_LLAMA],
    "qwen2": [*_ATTENTION_OF_LLAMA, *_MLP_OF_LLAMA],
    "bloom": [
        {"patterns": [r".*self_attention\.query_key_value\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attention\.dense\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.dense_h_to_4h\.weight$"], "partition_type": "column"},
        {"patterns": [r".*mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ],
    "chatglm": [
        {"patterns": [r".*self_attention\.query_key_value\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attention\.dense\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.dense_h_to_4h\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*mlp\.dense_4h_to_h\.weight$"], "partition_type": "row"},
    ],
    "mixtral": [
        *_ATTENTION_OF_LLAMA,
        {"patterns": [r".*experts\.\d+\.w[13]\.weight$"], "partition_type": "column"},
        {"patterns": [r".*experts\.\d+\.w2\.weight$"], "partition_type": "row"},
    ],
    "deepseek_v2": [
        {"patterns": [r".*self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.(.*\.)?(gate|up)_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*mlp\.(.*\.)?down_proj\.weight$"], "partition_type": "row"},
    ],
    "phi3": [
        {"patterns": [r".*self_attn\.qkv_proj\.weight$"], "partition_type": "column"},
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*mlp\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
        {"patterns": [r".*mlp\.down_proj\.weight$"], "partition_type": "row"},
    ],
}
"""As entries of ``tensor_parallel.partition_config.layer_specs``, by name."""
