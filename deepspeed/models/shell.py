"""Runs a causal language model's own forward from its decoder's output on, without the decoder's modules.

The model's own code computes what a family does to its logits, and the balance loss of a mixture of experts. The
decoder is replaced by a module that returns hidden states computed before, the head by a call of it.

A decoder's own forward also runs without its blocks, to record the arguments of each block: all that a family computes
for its blocks (masks, positions, rotary tables). A recorder replaces each block: it has the block's public attributes,
records its arguments and returns its input.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.errors import NotYetSupportedError
from deepspeed.models.anatomy import Anatomy, base_prefix_of

RouterOutputs = dict[str, Any] | None
"""``router_logits`` of all blocks so far, and the ``attention_mask``; None where the loss does not request them."""


class Shell:
    """A causal language model without its parts. ``found``: its anatomy; the head must lie in the model itself."""

    def __init__(self, found: Anatomy) -> None:
        self.head_path = found.head_path  # name of the head in the model
        self._decoder = base_prefix_of(found.model)
        self._model = copy.copy(found.model)
        self._model._modules = {**found.model._modules, self._decoder: None, self.head_path: None}

    def finish(
        self, hidden: torch.Tensor, router_outputs: RouterOutputs, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """Returns logits; with a balance loss of routers, a pair of logits and the weighted balance loss.

        Args:
            hidden: The decoder's output, ``[batch, tokens, width]``.
            router_outputs: See :data:`RouterOutputs`.
            head: Makes logits ``[batch, tokens, vocabulary]`` of ``hidden``.
        """
        running = copy.copy(self._model)
        running._modules = {
            **self._model._modules,
            self._decoder: _PrecomputedOutput(hidden, router_outputs),
            self.head_path: _HeadCall(head),
        }
        if router_outputs is None:
            return running(input_ids=None, use_cache=False).logits
        requested = {"attention_mask": router_outputs["attention_mask"], "output_router_logits": True}
        found = running(input_ids=None, use_cache=False, **requested)
        balance = getattr(found, "aux_loss", None)
        if not isinstance(balance, torch.Tensor):
            return found.logits
        return found.logits, float(running.router_aux_loss_coef) * balance


class _PrecomputedOutput(nn.Module):
    """Replaces the decoder: returns hidden states that were computed before."""

    def __init__(self, hidden: torch.Tensor, router_outputs: RouterOutputs) -> None:
        super().__init__()
        self._hidden, self._router_outputs = hidden, router_outputs

    @property
    def decoder(self) -> _PrecomputedOutput:
        """This module: some models call ``model.decoder``, where this one replaces ``model``."""
        return self

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        found = MoeModelOutputWithPast(last_hidden_state=self._hidden)
        if self._router_outputs is not None:
            found.router_logits = tuple(self._router_outputs["router_logits"])
        found.cross_attentions = None  # some models pass it on
        return found


class _HeadCall(nn.Module):
    """Replaces the head: calls it, though it belongs to another layer."""

    head: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.__dict__["head"] = head  # not registered here

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)


class BlockCall(NamedTuple):
    """Holds the arguments of one block: hidden states, then further positional and keyword arguments."""

    hidden: torch.Tensor
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Result(torch.Tensor):
    """Result of a recorder: models use it as a tensor, or as a tuple whose first item is the tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        tensor = self.as_subclass(torch.Tensor)
        return tensor.as_subclass(_Result) if isinstance(index, int) and index == 0 else tensor[index]


class _Recorder(nn.Module):
    """Replaces a block: records its arguments."""

    calls: list[BlockCall]

    def __init__(self, block: nn.Module, calls: list[BlockCall]) -> None:
        super().__init__()
        public = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in public.items() if name not in self.__dict__})
        self.__dict__["calls"] = calls

    def forward(self, hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        self.calls.append(BlockCall(hidden, arguments, named))
        return hidden.as_subclass(_Result)


class Recording:
    """A copy of a decoder with recorders as ``blocks``, and each other child replaced by ``child(name)``."""

    def __init__(self, decoder: nn.Module, blocks: str, child: Callable[[str], nn.Module]) -> None:
        self.decoder: Any = copy.copy(decoder)  # the copy, for a module that holds its parameters
        for name, value in vars(self.decoder).items():  # hooks on the copy must not become the model's
            if isinstance(value, OrderedDict):
                vars(self.decoder)[name] = value.copy()
        self._calls: list[BlockCall] = []
        modules: dict[str, Any] = {}
        for name, present in self.decoder._modules.items():
            if name == blocks:
                modules[name] = nn.ModuleList(_Recorder(block, self._calls) for block in getattr(decoder, blocks))
            else:
                modules[name] = None if present is None else child(name)
        self.decoder._modules = modules
        self._count = len(modules[blocks])

    def calls(self, **inputs: Any) -> list[BlockCall]:
        """Runs the decoder; returns its blocks' calls. Raises NotYetSupportedError: they are not one per block."""
        self._calls.clear()
        self.decoder(**inputs, use_cache=False)
        calls = list(self._calls)
        self._calls.clear()
        if len(calls) != self._count:
            raise NotYetSupportedError(
                f"from_transformers: {type(self.decoder).__name__} calls {len(calls)} of its {self._count} blocks; a "
                "pipeline needs every block once in each forward, so switch off what skips or repeats them (layerdrop)"
            )
        return calls


Routers = list[tuple[type[nn.Module], int]]
"""Classes of routers, each with the index of the logits among its outputs."""


def recorded_routers(decoder: Any) -> Routers:
    """Returns the routers whose outputs a model records for its loss; empty where it records none."""
    entries = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits", [])
    found = []
    for entry in entries if isinstance(entries, list) else [entries]:
        target = getattr(entry, "target_class", entry)
        if isinstance(target, type):
            found.append((target, int(getattr(entry, "index", 1))))
    return found


def record_routers(block: nn.Module, routers: Routers, logits: list[torch.Tensor]) -> None:
    """Makes the routers in a block append their logits, in the shape that they return, to a list at each forward."""
    for module in block.modules():
        for target, index in routers:
            if isinstance(module, target):
                module.register_forward_hook(functools.partial(_append_logits, logits, index))


def _append_logits(logits: list[torch.Tensor], index: int, _module: Any, _arguments: Any, output: Any) -> None:
    logits.append(output[index] if isinstance(output, tuple) else output)
