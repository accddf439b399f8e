"""Reads the configuration of a Transformers model; families differ in the names and places of its fields."""

from __future__ import annotations

from typing import Any

_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")


def text_config(config: Any) -> Any:
    """Returns a configuration's only text part; any other object, or one with several (MusicGen), unchanged."""
    if not is_library_config(config):
        return config
    try:
        return config.get_text_config()
    except ValueError:  # raised by the library where there are several
        return config


def is_library_config(config: Any) -> bool:
    """Returns whether a configuration is one of the Transformers library."""
    return hasattr(config, "get_text_config")


def model_type_of(model: Any) -> str | None:
    """Returns the family of a Transformers model, such as "llama"; None for a model of another library."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else None


def heads_of(config: Any) -> int | None:
    """Returns the number of query heads of every layer; None where the configuration has no single number."""
    text = text_config(config)
    heads = None if _differs(text, "num_attention_heads") else getattr(text, "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


def kv_heads_of(config: Any) -> int | None:
    """Returns the number of key/value heads of every layer; None where :func:`heads_of` is None, or layers differ."""
    heads, text = heads_of(config), text_config(config)
    if heads is None or any(_differs(text, name) for name in _KEY_VALUE_HEADS):
        return None
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return 1
    return next((found for name in _KEY_VALUE_HEADS if (found := getattr(text, name, None))), heads)


def _differs(config: Any, name: str) -> bool:
    """Returns whether a field has one value for each layer; the library raises when such a field is read."""
    return name in (getattr(config, "per_layer_attributes", None) or ())


def vocabulary_of(config: Any) -> int | None:
    """Returns the number of tokens in the vocabulary; None where the configuration does not have it."""
    size = getattr(text_config(config), "vocab_size", None)
    return size if isinstance(size, int) else None


def longest_sequence_of(config: Any) -> int | None:
    """Returns the number of positions that the model has; None if it has no limit."""
    return getattr(text_config(config), "max_position_embeddings", None) or None


_SIZE_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "vocab": ("vocab_size",),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"),
    "head_size": ("head_dim",),
}


def decoder_sizes_of(config: Any) -> dict[str, int]:
    """Returns the sizes of a decoder that its configuration has as single numbers, by the planner's names for them.

    ``layers``, ``hidden``, ``heads``, ``kv_heads``, ``head_size``, ``vocab``, ``intermediate`` (of an expert, where
    there are experts), ``experts`` and ``experts_per_token``; what the configuration lacks, or has per layer, is left
    out.
    """
    text = text_config(config)
    sizes = {name: _first_number(text, names) for name, names in _SIZE_NAMES.items()}
    sizes |= {"heads": heads_of(config), "kv_heads": kv_heads_of(config)}
    dense = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    of_expert = ("moe_intermediate_size", "expert_ffn_hidden_size") if sizes["experts"] else ()
    sizes["intermediate"] = _first_number(text, (*of_expert, *dense))
    return {name: size for name, size in sizes.items() if size is not None}


def _first_number(config: Any, names: tuple[str, ...]) -> int | None:
    found = (None if _differs(config, name) else getattr(config, name, None) for name in names)
    return next((size for size in found if isinstance(size, int)), None)


def attends_across_sequences(config: Any) -> bool:
    """Returns whether the model attends from one sequence to another, as an encoder-decoder does."""
    return bool(getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False))


def counts_routers(config: Any) -> bool:
    """Returns whether the loss of a mixture of experts has a term for the balance of its routers."""
    return bool(getattr(text_config(config), "output_router_logits", False))


def layer_types_of(config: Any) -> tuple[str, ...]:
    """Returns the kind of each layer, such as "sliding_attention"; empty where the family has one kind."""
    return tuple(getattr(text_config(config), "layer_types", None) or ())


def rotary_width_of(*sources: Any) -> int | None:
    """Returns how many of a latent attention's outputs are rotary, from the first source that states it."""
    found = (getattr(source, "qk_rope_head_dim", None) for source in sources)
    return next((width for width in found if isinstance(width, int)), None)


def name_or_path_of(model: Any) -> str:
    """Returns the name on the hub or the folder that a model was loaded by; empty where it was not."""
    return str(getattr(getattr(model, "config", None), "_name_or_path", ""))


def architecture_of(config: Any) -> str | None:
    """Returns the name of the first model class that a configuration is for; None where it names none."""
    return next(iter(getattr(config, "architectures", None) or []), None)
