"""Finds the parts of a Transformers model: its decoder, blocks, last norm, embedding and head.

Nothing here imports the library. Models of other libraries are read too; what is not found is None or empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from deepspeed.models.configurations import text_config

_LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f", "ln_out")
_AFTER_NORM = ("project_out",)  # of OPT, where vectors of tokens are narrower than those of blocks


@dataclass(frozen=True)
class Anatomy:
    """The parts of a model. Paths are qualified names in ``model``."""

    model: Any  # the model, without PEFT's wrappers
    decoder: Any  # the module that calls the blocks; None where no module with a list of blocks was found
    decoder_path: str
    is_whole_base: bool  # whether the decoder is all that the model has beside its head
    block_lists: tuple[str, ...]  # names in the decoder of the lists of blocks; one for decoder-only models
    norms: tuple[str, ...]  # names in the decoder of the last norm; at most one for decoder-only models
    after_norm: tuple[str, ...]  # names in the decoder of what follows the last norm
    embedding_path: str  # path of the embedding of tokens; empty where there is none
    head: Any  # the layer that makes logits; None where there is none
    head_path: str
    is_tied: bool  # whether the head has the weight of the embedding

    @property
    def blocks(self) -> tuple[nn.Module, ...]:
        """The repeated blocks, in order; empty unless the decoder has exactly one list of blocks."""
        return tuple(getattr(self.decoder, self.block_lists[0])) if len(self.block_lists) == 1 else ()


def anatomy(model: nn.Module) -> Anatomy:
    """Returns the parts of a model. ``model``: A Transformers model with values or without, or one wrapped by PEFT."""
    inner: Any = unwrapped(model)
    paths = {id(module): name for name, module in inner.named_modules()}
    base, config = base_of(inner), getattr(inner, "config", None)
    decoder = _decoder_of(inner, base)
    head = output_head(inner)
    embedding = input_embedding(inner if decoder is None else decoder)
    embedding = input_embedding(inner) if embedding is None else embedding
    shares_weight = head is not None and getattr(embedding, "weight", 0) is getattr(head, "weight", None)
    return Anatomy(
        model=inner,
        decoder=decoder,
        decoder_path=paths.get(id(decoder), ""),
        is_whole_base=decoder is not None and (decoder is base or [*base.children()] == [decoder]),
        block_lists=_lists_of(decoder),
        norms=_modules_of(decoder, _LAST_NORMS),
        after_norm=_modules_of(decoder, _AFTER_NORM),
        embedding_path=paths.get(id(embedding), ""),
        head=head,
        head_path=paths.get(id(head), ""),
        is_tied=shares_weight or bool(head is not None and getattr(text_config(config), "tie_word_embeddings", False)),
    )


def unwrapped(model: nn.Module) -> Any:
    """Returns the model without PEFT's wrappers; ``model`` where there are none."""
    unwrap: Any = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def base_of(model: Any) -> Any:
    """Returns the model without its head; ``model`` where it has none."""
    found = getattr(model, base_prefix_of(model) or "base_model", None)
    return found if isinstance(found, nn.Module) else model


def base_prefix_of(model: Any) -> str:
    """Returns the attribute that holds the model without its head; names in files may begin with it. Empty: none."""
    return str(getattr(model, "base_model_prefix", ""))


def is_causal_lm(model: nn.Module) -> bool:
    """Returns whether a model, without PEFT's wrappers, is a causal language model by its class."""
    return type(model).__name__.endswith("ForCausalLM")


def decoder_beside_towers(model: Any) -> Any:
    """Returns the decoder of a model that reads images or sound beside text; None for a model of text only."""
    base, config = base_of(model), getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) or text_config(config) is config:
        return None
    # A text_model without a head is an encoder beside one of images.
    names = ("language_model", "text_model") if output_head(model) is not None else ("language_model",)
    found = (getattr(base, name, None) for name in names)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def output_head(model: Any) -> nn.Module | None:
    """Returns the layer that makes logits; None where the model has none."""
    return _call_getter(model, "get_output_embeddings")


def input_embedding(model: Any) -> nn.Module | None:
    """Returns the embedding of tokens; None where the model has none."""
    return _call_getter(model, "get_input_embeddings")


def _call_getter(model: Any, method: str) -> nn.Module | None:
    try:
        found: nn.Module | None = getattr(model, method, lambda: None)()
    except (AttributeError, NotImplementedError):  # raised by the library where a model has none
        return None
    return found


def _decoder_of(model: Any, base: Any) -> Any:
    """Returns ``base``, or the module right below it that has a list of blocks: the only one, or the decoder."""
    if _lists_of(base):
        return base
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_decoder"):
        return model.get_decoder()
    inside = [child for child in base.children() if _lists_of(child)]
    return inside[0] if len(inside) == 1 else None


def _lists_of(module: Any) -> tuple[str, ...]:
    if module is None:
        return ()
    return tuple(name for name, child in module.named_children() if isinstance(child, nn.ModuleList))


def _modules_of(module: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if isinstance(getattr(module, name, None), nn.Module))
