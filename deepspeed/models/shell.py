"""Runs a causal language model's own forward from its decoder's output on, without the decoder's modules.

What a family does to its logits, and the balance loss of a mixture of experts, is computed by the model's own code. The
decoder is replaced by a module that returns hidden states that are there already, the head by a call of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from deepspeed.models.anatomy import Anatomy, base_prefix_of

Heard = dict[str, Any] | None
"""``router_logits`` of all blocks so far, and the ``attention_mask``; None where the loss does not ask for them."""


class Shell:
    """A causal language model without its parts.

    Args:
        found: Its anatomy; the head must lie in the model itself.

    Attributes:
        head_path: Name of the head in the model.
    """

    def __init__(self, found: Anatomy) -> None:
        self.head_path = found.head_path
        self._decoder = base_prefix_of(found.model)
        self._model = copy.copy(found.model)
        self._model._modules = {**found.model._modules, self._decoder: None, self.head_path: None}

    def finish(self, hidden: torch.Tensor, router_outputs: Heard, head: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """Returns logits; where routers count, a pair of logits and the weighted balance loss.

        Args:
            hidden: The decoder's output, ``[batch, tokens, width]``.
            router_outputs: What routers said.
            head: Makes logits ``[batch, tokens, vocabulary]`` of ``hidden``.
        """
        running = copy.copy(self._model)
        running._modules = {
            **self._model._modules,
            self._decoder: _GivenOutput(hidden, router_outputs),
            self.head_path: _HeadCall(head),
        }
        if router_outputs is None:
            return running(input_ids=None, use_cache=False).logits
        asked = {"attention_mask": router_outputs["attention_mask"], "output_router_logits": True}
        found = running(input_ids=None, use_cache=False, **asked)
        balance = getattr(found, "aux_loss", None)
        if not isinstance(balance, torch.Tensor):
            return found.logits
        return found.logits, float(running.router_aux_loss_coef) * balance


class _GivenOutput(nn.Module):
    """In the place of the decoder: returns hidden states that were computed before."""

    def __init__(self, hidden: torch.Tensor, router_outputs: Heard) -> None:
        super().__init__()
        self._hidden, self._heard = hidden, router_outputs

    @property
    def decoder(self) -> _GivenOutput:
        """Itself: some models call the decoder of what is in its place."""
        return self

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        found = MoeModelOutputWithPast(last_hidden_state=self._hidden)
        if self._heard is not None:
            found.router_logits = tuple(self._heard["router_logits"])
        found.cross_attentions = None  # some models pass it on
        return found


class _HeadCall(nn.Module):
    """In the place of the head: calls it, though it belongs to a layer elsewhere."""

    head: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not registered here

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)
