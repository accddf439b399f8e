"""Small configurations of every family of the installed Transformers, found by trying: there are 800 types.

``python -m tests.zero.construction.families`` prints why there is none of a type, a line each.
"""

import copy
import importlib
import inspect
from collections.abc import Collection, Iterator
from typing import Any

import torch

_SIZES = {
    "vocab_size": 64, "image_size": 32, "patch_size": 8, "max_position_embeddings": 64, "n_positions": 64,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "mlp_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "projection_dim"), 32),
    **dict.fromkeys(("encoder_hidden_size", "out_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("head_dim", "d_kv", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim",), 8),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_key_value_heads", "num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
}  # fmt: skip
# Sizes that must agree, or have no default, in families where no rule finds them. A dict goes into what is there.
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TWO_ROPES = {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}}
_TEXT_AND_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16}
_WINDOWS = {"embed_dim": 24, "num_heads": [2, 2, 4, 4]}
_DETECTOR = {"out_indices": [1, 2], "window_block_indices": [0], "num_windows": 4}
_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), {"prediction_length": 4}),
    **dict.fromkeys(("donut-swin", "maskformer-swin", "swinv2"), _WINDOWS),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"), {"head_dim": 8}),
    **dict.fromkeys(("t5gemma2_decoder", "t5gemma2_text"), {"dropout_rate": 0.0}),
    **dict.fromkeys(("dots3_note_text", "esmc", "glm5_next_text"), {"num_key_value_heads": 4}),
    "bit": {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 4},
    "bridgetower": {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "text_config": {"num_attention_heads": 4},
        "vision_config": {"hidden_size": 64},
    },
    "bridgetower_vision_model": {"hidden_size": 64},
    "chameleon": {"vocabulary_map": {"<image>": 5}},
    "cohere_compass": {"text_config": _TWO_ROPES},
    "cohere_compass_text": _TWO_ROPES,
    "cosmos3_edge": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "cosmos3_edge_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48},
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"]},
        "vision_config": {"encoder_config": {"mlp_layer_types": ["dense", "dense"]}},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "diffusion_gemma": {"text_config": {"vocab_size": 64, **_EXPERTS}},
    "diffusion_gemma_text": {"vocab_size": 64, **_EXPERTS},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}, "vision_config": {"per_layer_config": {}}},
    "dots3_note_vision_encoder": {"per_layer_config": {}},
    "emu3": {"vocabulary_map": {"<image>": 5, "<|extra_200|>": 6}},
    "ernie4_5_vl_moe": {"text_config": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n_text": {"intermediate_size": 48, "activation_sparsity_pattern": [0.0, 0.0], **_TEXT_AND_LAYERS},
    "glm5_next": {"text_config": {"num_key_value_heads": 4}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_vl": {"text_config": {"head_dim": 8}},
    "kyutai_speech_to_text": {"pad_token_id": 3, "audio_pad_token_id": 3},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lw_detr": {"backbone_config": _DETECTOR},
    "lw_detr_vit": _DETECTOR,
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "moonshine_streaming": {"num_key_value_heads": 2},
    "muse_spark": {"audio_config": {"num_hidden_layers": 4}},
    "muse_spark_audio": {"num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron3_5_transcribe_word_timestamp": {"blank_token_id": 1},
    "nemotron3_diarization": {"audio_config": {"chunk_length": 64}, "head_config": {"audio_hidden_size": 32}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "neomme": {
        "rope_parameters": {"full_attention": {**_ROPE, "partial_rotary_factor": 0.5}, "sliding_attention": _ROPE}
    },
    "pvt": {"hidden_sizes": [16, 32, 32, 32], "num_attention_heads": [1, 2, 4, 4]},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 16}, "spatial_merge_size": 2}
    },
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 16},
    "reformer": {"axial_pos_embds_dim": [16, 16]},
    "swin2sr": {"embed_dim": 24, "num_heads": [2, 2], "depths": [1, 1]},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "vitmatte": {"fusion_hidden_sizes": [16, 8, 8, 8]},
    "vjepa2": {"num_attention_heads": 4, "pred_hidden_size": 32, "pred_num_attention_heads": 4},
    "zamba": {
        "layer_types": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "mamba_dt_rank": 2,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
    },
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
}
_MOST = 24_000_000  # parameters
_ENDINGS = ("ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "ForObjectDetection", "Model")


def small_families(kinds: Collection[str] = ()) -> Iterator[tuple[str, Any, Any]]:
    """Yields the type, the class and a small configuration of one model of each family, or of these types."""
    for kind, model_class, config, _ in tried_families(kinds):
        if config is not None:
            yield kind, model_class, config


def tried_families(kinds: Collection[str] = ()) -> Iterator[tuple[str, Any, Any, str]]:
    """Yields the type, the class, a small configuration and why there is none (empty where there is one).

    Args:
        kinds: The types to try; none: all.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind in sorted(kinds or CONFIG_MAPPING.keys()):
        config_class = CONFIG_MAPPING[kind]
        reasons = []
        for model_class in _classes(config_class):
            config, reason = _small(kind, model_class, config_class)
            if config is not None:
                yield kind, model_class, config, ""
                break
            reasons.append(f"{model_class.__name__}: {reason}")
        else:
            yield kind, None, None, "; ".join(reasons) or "no model in the module of its configuration"


def _classes(config_class: Any) -> list[Any]:
    """The models of a configuration, those first that have all of a family's weights."""
    from transformers import PreTrainedModel

    try:
        module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    except ImportError:
        return []
    found = [
        kind
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, PreTrainedModel) and kind.__module__ == module.__name__
        and kind.config_class is config_class and "PreTrained" not in name
    ]  # fmt: skip
    places = {ending: place for place, ending in enumerate(_ENDINGS)}
    return sorted(found, key=lambda k: next((p for e, p in places.items() if k.__name__.endswith(e)), len(_ENDINGS)))


def _small(kind: str, model_class: Any, config_class: Any) -> tuple[Any, str]:
    """A configuration that can be built; None and the last reason where no try gives one.

    Reasons are missing libraries, and sizes that must agree in a way that is neither known to a rule nor in _FAMILIES.
    """
    reason = ""
    for level in range(3):
        try:
            config = config_class(**_merged(_smaller(config_class(), level), _FAMILIES.get(kind, {})))
            with torch.device("meta"):
                made = model_class(copy.deepcopy(config))
            numel = sum(parameter.numel() for parameter in made.parameters())
            if numel <= _MOST:
                return config, ""
            reason = f"{numel:,} parameters, more than {_MOST:,}"
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None, reason


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both; where both have a dict, these merged, but for rope parameters, whose keys depend on each other."""
    made = dict(below)
    for key, value in above.items():
        is_part = isinstance(value, dict) and isinstance(made.get(key), dict) and key != "rope_parameters"
        made[key] = _merged(made[key], value) if is_part else value
    return made


def _smaller(config: Any, level: int) -> dict[str, Any]:
    """Arguments for a smaller configuration: known sizes, then all that are large, then lists of them."""
    below = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", None) or {}}
    made: dict[str, Any] = {}
    for key, value in config.to_dict().items():
        if key in below:
            continue
        is_size = type(value) is int and "token" not in key and not key.endswith("_id")
        if is_size and value > _SIZES.get(key, 64 if level else value):
            made[key] = _SIZES.get(key, 32)
        elif level == 2 and isinstance(value, list) and value and all(type(each) is int for each in value):
            made[key] = [min(each, 32) for each in value]
    for key, part in below.items():
        if part is not None and hasattr(part, "to_dict"):
            made[key] = {**_smaller(part, level), "model_type": part.model_type}
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if isinstance(getattr(config, key, None), int) and getattr(config, key) >= 64:
            made[key] = 1
    return made


if __name__ == "__main__":
    for kind, _, config, reason in tried_families():
        if config is None:
            print(f"{kind}: {reason}", flush=True)
