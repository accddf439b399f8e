"""How each registered model's sequences are shared, and what its passes have found out once for all layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.comm.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.documents import Documents, document_numbers, documents_of
from deepspeed.parallel.sequence.wire import wire_of

NAME = "deepspeed_sequence"
"""The attention implementation of registered models, in both registries of transformers."""


@dataclass
class Sharing:
    """How one model's sequences are shared.

    Attributes:
        model: The model whose ``training`` decides where evaluation is not sharded.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences.
        disable_in_eval: In evaluation the model is left to itself, with whole sequences on each rank.
        heads_group: The ranks among which heads are divided inside attention; None: keys and values go round instead.
        ring_group: The ranks around which keys and values go; None: they do not.
        recompute_exchange: Attention's result is kept once for backward; see ``KeptOnce``.
        given_positions: Position ids of the pass that the model is in; None: it is in none.
    """

    model: weakref.ref[nn.Module]
    group: Any
    core: str
    disable_in_eval: bool
    heads_group: Any
    ring_group: Any = None
    recompute_exchange: bool = False
    given_positions: torch.Tensor | None = None
    _evaluates: bool = False
    _is_left_alone: bool = False
    _gathered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _documents: list[tuple[tuple[int, int, int], Any]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Whether the model's present pass has parts of sequences."""
        model = self.model()
        if self._is_left_alone:
            return False
        return not self.disable_in_eval or self._evaluates or model is None or model.training

    @contextmanager
    def evaluating(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Within it evaluation has parts of sequences too; ``positions`` are their position ids."""
        self._evaluates, self.given_positions = True, positions
        try:
            yield
        finally:
            self._evaluates, self.given_positions = False, None

    def wire(self, device: torch.device) -> Transport:
        """What carries the exchange."""
        return wire_of(self.group, device)

    def whole(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """``[batch, tokens]`` of whole sequences from this rank's part; gathered once for all layers of a pass.

        Kept by identity: all layers get the same tensor. A recomputation in backward finds it too.
        """
        if part is None:
            return None
        for known, whole in self._gathered:
            if known is part:
                return whole
        wire = self.wire(part.device)
        self._check_sizes(part, wire)
        flat = part.new_empty(wire.size * part.numel())
        wire.my_slice(flat).copy_(part.reshape(-1))
        wire.all_gather(flat, key=wire.next_move(), label="position ids or padding mask (sequence parallel)").wait()
        whole = flat.view(wire.size, *part.shape).movedim(0, 1).reshape(part.size(0), -1)
        self._gathered = [*self._gathered[-7:], (part, whole)]
        return whole

    def _check_sizes(self, part: torch.Tensor, wire: Transport) -> None:
        """Every rank has the same part of as many sequences; raised on all of them, before anything else moves."""
        mine = torch.tensor([part.size(0) << 40 | part.size(1)])
        found = wire.gather_small(mine, channel="call", label="the sizes of the parts of sequences").flatten().tolist()
        if len(set(found)) == 1:
            return
        parts = [f"rank {rank}: {each >> 40} of {each & (1 << 40) - 1} tokens" for rank, each in enumerate(found)]
        model = self.model()
        raise DeepSpeedConfigError(
            f"sequence parallel: the parts of sequences that {type(model).__name__} got are not alike on all ranks of "
            f"the group: {', '.join(parts)}; pad the sequences, so that every rank has as many tokens of as many "
            "(UlyssesSPDataLoaderAdapter does)"
        )

    def documents(self, positions: torch.Tensor | None, visible: torch.Tensor | None, batch: int) -> Documents | None:
        """See ``documents_of``, once for all layers; both of whole sequences, as :meth:`whole` gave them."""

        def find() -> Documents | None:
            found = documents_of(positions, visible)
            return found * batch if found is not None and len(found) == 1 else found

        return self._once((id(positions), id(visible), batch), find)  # type: ignore[no-any-return]

    def numbers(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
        """See ``document_numbers``, likewise."""
        key = id(positions), id(visible), 0
        return self._once(key, lambda: document_numbers(positions, visible))  # type: ignore[no-any-return]

    def _once(self, key: tuple[int, int, int], find: Callable[[], Any]) -> Any:
        """The tensors of a key are alive as long as the list of what was gathered, which is the longer one."""
        for known, found in self._documents:
            if known == key:
                return found
        found = find()
        self._documents = [*self._documents[-3:], (key, found)]
        return found


_by_module: weakref.WeakKeyDictionary[nn.Module, Sharing] = weakref.WeakKeyDictionary()
_by_config: dict[int, tuple[Any, Sharing]] = {}


def remember(model: nn.Module, sharing: Sharing) -> None:
    """Makes every module of a model, and every configuration in it, findable."""
    for module in model.modules():
        _by_module[module] = sharing
        own = getattr(module, "config", None)
        if hasattr(own, "_attn_implementation"):
            _by_config[id(own)] = own, sharing


def sharing_of(model: nn.Module) -> Sharing | None:
    """How a model's sequences are shared; None if it was not registered."""
    return _by_module.get(model)


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Within it a model computes whole sequences by itself, as if it were not registered."""
    found = sharing_of(model)
    if found is None:
        yield
        return
    found._is_left_alone = True
    try:
        yield
    finally:
        found._is_left_alone = False


def registered(module: nn.Module) -> Sharing:
    """How the sequences of a registered model are shared, of which this is a module.

    Raises:
        DeepSpeedConfigError: It was not registered.
    """
    return _there(_by_module.get(module))


def registered_by(config: Any) -> Sharing:
    """Likewise, of which this is a configuration."""
    known, found = _by_config.get(id(config), (None, None))
    return _there(found if known is config else None)


def _there(found: Sharing | None) -> Sharing:
    if found is None:
        raise DeepSpeedConfigError(
            f'sequence parallel: a model has attn_implementation "{NAME}" and was not registered (a copy of one that '
            "was?); set its attention implementation, or register it too"
        )
    return found
