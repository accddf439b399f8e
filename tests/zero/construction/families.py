"""Small configurations of every family of the installed Transformers, found by trying: there are 800 types.

``python -m tests.zero.construction.families`` prints why there is none of a type, a line each.
"""

from __future__ import annotations

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
_MOST = 12_000_000  # parameters
_ENDINGS = ("ForConditionalGeneration", "ForCausalLM", "ForMaskedLM", "ForObjectDetection", "Model")


def small_families() -> Iterator[tuple[str, Any, Any]]:
    """Yields the type, the class and a small configuration of one model of each family."""
    for kind, model_class, config, _ in tried_families():
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
            config, reason = _small(model_class, config_class)
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


def _small(model_class: Any, config_class: Any) -> tuple[Any, str]:
    """A configuration that can be built; None and the last reason where no try gives one.

    Reasons are missing libraries, and sizes that must agree in a way that is not known here.
    """
    reason = ""
    for level in range(3):
        try:
            config = config_class(**_smaller(config_class(), level))
            with torch.device("meta"):
                made = model_class(copy.deepcopy(config))
            numel = sum(parameter.numel() for parameter in made.parameters())
            if numel <= _MOST:
                return config, ""
            reason = f"{numel:,} parameters, more than {_MOST:,}"
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None, reason


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
