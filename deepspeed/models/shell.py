"""Runs a causal language model's own forward from its decoder's output on, without the decoder's modules.

What a family does to its logits, and the balance loss of a mixture of experts, is computed by the model's own code. The
decoder is replaced by a module that returns hidden states that are there already, the head by a call of it.

Likewise a decoder's own forward runs without its blocks, and what it would call them with is recorded.

Whatever a family computes for its blocks (masks, positions, rotary tables) is in the recorded calls. A recorder stands
in the place of each block: it has the block's plain attributes, notes its arguments and returns its input.
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

    def finish(
        self, hidden: torch.Tensor, router_outputs: RouterOutputs, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> Any:
        """Returns logits; where routers count, a pair of logits and the weighted balance loss.

        Args:
            hidden: The decoder's output, ``[batch, tokens, width]``.
            router_outputs: Outputs of the routers.
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
        requested = {"attention_mask": router_outputs["attention_mask"], "output_router_logits": True}
        found = running(input_ids=None, use_cache=False, **requested)
        balance = getattr(found, "aux_loss", None)
        if not isinstance(balance, torch.Tensor):
            return found.logits
        return found.logits, float(running.router_aux_loss_coef) * balance


class _GivenOutput(nn.Module):
    """Replaces the decoder: returns hidden states that were computed before."""

    def __init__(self, hidden: torch.Tensor, router_outputs: RouterOutputs) -> None:
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
    """Stands for a block's result: models take it as it is, or as the first of a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return plain.as_subclass(_Result) if isinstance(index, int) and index == 0 else plain[index]


class _Recorder(nn.Module):
    """Replaces a block: records its arguments."""

    calls: list[BlockCall]

    def __init__(self, block: nn.Module, calls: list[BlockCall]) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        self.__dict__.update({name: value for name, value in plain.items() if name not in self.__dict__})
        self.__dict__["calls"] = calls

    def forward(self, hidden: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        self.calls.append(BlockCall(hidden, arguments, named))
        return hidden.as_subclass(_Result)


class Recording:
    """A copy of a decoder whose blocks are recorders.

    Args:
        decoder: Not changed.
        blocks: Name of its list of blocks.
        child: From the name of another child to what stands in its place.

    Attributes:
        decoder: The copy, for a module that holds its parameters.
    """

    def __init__(self, decoder: nn.Module, blocks: str, child: Callable[[str], nn.Module]) -> None:
        self.decoder: Any = copy.copy(decoder)
        for name, held in vars(self.decoder).items():  # hooks on the copy are none of the model's
            if isinstance(held, OrderedDict):
                vars(self.decoder)[name] = held.copy()
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
        """Runs the decoder and returns what it calls each block with, in order.

        Raises:
            NotYetSupportedError: It does not call every block once.
        """
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
"""Classes of routers, and which of their outputs the logits are."""


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
                module.register_forward_hook(functools.partial(_note, logits, index))


def _note(logits: list[torch.Tensor], index: int, _module: Any, _arguments: Any, made: Any) -> None:
    logits.append(made[index] if isinstance(made, tuple) else made)
