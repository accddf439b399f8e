"""The head and the loss of causal language models: the part of their forward after the decoder."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.models.anatomy import is_causal_lm, output_head
from deepspeed.models.configurations import counts_routers, text_config

IGNORED = -100
"""The label of tokens that do not count in the loss."""

_AFTER_HEAD = ("final_logit_softcapping", "logit_scale", "logits_scaling", "logits_scale", "lm_head_multiplier")
"""Fields of a configuration by which models change their logits after the head."""

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes the decoder's output and the shifted labels; returns one loss for each label."""


def has_plain_head(model: Any) -> bool:
    """Returns whether a model is a causal language model whose decoder and head can be called one after the other."""
    return output_head(model) is not None and is_causal_lm(model) and hasattr(model, "get_decoder")


def changes_behind_head(config: Any) -> list[str]:
    """Returns the fields of a configuration that change logits or loss after the head; empty if none does."""
    text = text_config(config)
    found = [name for name in _AFTER_HEAD if getattr(text, name, None) not in (None, 1, 1.0)]
    return found or (["output_router_logits"] if counts_routers(config) else [])


def forward_by_losses(
    model: Any,
    losses_of: Losses,
    labels: torch.Tensor | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: Any = None,
    logits_to_keep: Any = 0,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Returns what a causal language model's forward returns for labels, without logits.

    Args:
        model: One with :func:`has_plain_head` and without :func:`changes_behind_head`, which are not applied here.
        labels: ``[batch, tokens]``; shifted here. Or ``shift_labels``.
        shift_labels: Label of each token: the next token.
        num_items_in_batch: Divisor of the sum of losses; None: the number of labels that count.
        return_dict: False: a tuple is returned.
    """
    outputs = model.get_decoder()(**kwargs)
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    losses = losses_of(outputs[0], shift_labels)
    divisor: Any = num_items_in_batch
    if divisor is None:
        divisor = (shift_labels != IGNORED).sum().clamp(min=1).to(losses.device)
    others = {name: getattr(outputs, name, None) for name in ("past_key_values", "hidden_states", "attentions")}
    return causal_output(return_dict, loss=losses.sum() / divisor, **others)


def causal_output(return_dict: bool | None, **fields: Any) -> Any:
    """Returns the output object of causal language models with these ``fields``, or a tuple of them."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    found = CausalLMOutputWithPast(**fields)
    return found.to_tuple() if return_dict is False else found


def losses_of_logits(logits: torch.Tensor, labels: torch.Tensor, *, ignore_index: int = IGNORED) -> torch.Tensor:
    """Returns the fp32 cross entropy of ``[tokens, vocabulary]`` and ``[tokens]``; 0 where a label does not count."""
    return nn.functional.cross_entropy(logits.float(), labels, ignore_index=ignore_index, reduction="none")


def token_losses_of(head: Any) -> Callable[..., torch.Tensor]:
    """Returns the function that computes the losses of a head's logits, called as :func:`losses_of_logits`."""
    return getattr(head, "token_losses", losses_of_logits)


def use_token_losses(head: Any, losses: Callable[..., torch.Tensor]) -> None:
    """Sets the function that computes the losses of a head's logits; for heads that are cut over the vocabulary."""
    head.token_losses = losses


def logits_change(config: Any) -> tuple[float, float | None]:
    """Returns what models multiply the head's logits by, and the softcap that follows, by their configuration."""
    text = text_config(config)
    names = ("logit_scale", "logits_scale", "lm_head_multiplier", "output_multiplier")
    factor = math.prod(float(value) for name in names if (value := getattr(text, name, None)) is not None)
    scaling = float(getattr(text, "logits_scaling", None) or 1.0)
    multiplies = str(getattr(text, "model_type", "")).startswith("hyperclovax")  # the other families divide by it
    softcap = getattr(text, "final_logit_softcapping", None)
    return factor * scaling if multiplies else factor / scaling, None if softcap is None else float(softcap)


def takes_loss_function(model: Any, *, with_inputs: bool = False) -> bool:
    """Returns whether a model computes the loss of causal language models by a function that can be replaced.

    Args:
        with_inputs: Models that read images or sound beside text count too.
    """
    kinds = ("ForCausalLM", "ForConditionalGeneration") if with_inputs else ("ForCausalLM",)
    return getattr(model, "loss_type", None) in kinds


def is_library_loss(function: Callable[..., Any]) -> bool:
    """Returns whether a loss function is the Transformers library's own."""
    return function.__module__.startswith("transformers.")


def loss_function_of(model: Any) -> Callable[..., torch.Tensor]:
    """Returns the function that :func:`use_loss_function` replaces."""
    return model.loss_function


def use_loss_function(model: Any, loss_function: Callable[..., torch.Tensor]) -> None:
    """Makes a model compute its 0-dim loss by ``loss_function(logits, labels, vocab_size, **more)``, in place."""
    model.loss_function = loss_function
