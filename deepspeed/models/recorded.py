"""Runs a decoder's own forward without its blocks, and records what it would call them with.

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


class BlockCall(NamedTuple):
    """What one block is called with: hidden states, then further positional and keyword arguments."""

    hidden: torch.Tensor
    arguments: tuple[Any, ...]
    named: dict[str, Any]


class _Result(torch.Tensor):
    """What stands for a block's result: models take it as it is, or as the first of a tuple."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        plain = self.as_subclass(torch.Tensor)
        return plain.as_subclass(_Result) if isinstance(index, int) and index == 0 else plain[index]


class _Recorder(nn.Module):
    """In the place of a block: notes what it is called with."""

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
