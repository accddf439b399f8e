"""How each registered model's sequences are shared, and what its passes have found out once for all layers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.comm.job.world import size_of
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention import configured_modules
from deepspeed.parallel.sequence.documents import (
    Documents,
    document_numbers,
    documents_of,
    holds_one_sequence_per_rank,
)
from deepspeed.parallel.sequence.exchange import transport_of

NAME = "deepspeed_sequence"
"""The attention implementation of registered models, in both registries of transformers."""


@dataclass
class SequenceParallelContext:
    """How one model's sequences are shared.

    Attributes:
        model: The model whose ``training`` decides where evaluation is not sharded.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences.
        disable_in_eval: In evaluation the model is left to itself, with whole sequences on each rank.
        heads_group: The ranks among which heads are divided inside attention; None: keys and values go round instead.
        ring_group: The ranks around which keys and values go; None: they do not.
        recompute_exchange: Attention's result is kept once for backward; see ``SavedResult``.
        recompute_core: What attends between the exchanges runs again in backward (selective recomputation).
        given_positions: Position ids of the pass that the model is in; None: it is in none.
        whole_for: The module with towers that is in a pass with whole sequences, gathered at its entry; None: none is.
    """

    model: weakref.ref[nn.Module]
    group: Any
    core: str
    disable_in_eval: bool
    heads_group: Any
    ring_group: Any = None
    recompute_exchange: bool = False
    recompute_core: bool = False
    given_positions: torch.Tensor | None = None
    whole_for: nn.Module | None = None
    _evaluates: bool = False
    _is_left_alone: bool = False
    _gathered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _found: list[tuple[str, torch.Tensor | None, torch.Tensor | None, Any]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Returns whether the model's present pass has parts of sequences."""
        model = self.model()
        if self._is_left_alone:
            return False
        return not self.disable_in_eval or self._evaluates or model is None or model.training

    @contextmanager
    def evaluating(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Within it, evaluation shards sequences too; ``positions`` are their position ids, ``[batch, tokens]``."""
        self._evaluates, self.given_positions = True, positions
        try:
            yield
        finally:
            self._evaluates, self.given_positions = False, None

    def transport(self, device: torch.device) -> Transport:
        """Returns what carries the exchange."""
        return transport_of(self.group, device)

    def whole(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """``[batch, tokens]`` of whole sequences from this rank's part; gathered once for all layers of a pass.

        Kept by identity: all layers get the same tensor. A recomputation in backward finds it too.
        """
        if part is None:
            return None
        for known, whole in self._gathered:
            if known is part:
                return whole
        transport = self.transport(part.device)
        self._check_sizes(part, transport)
        flat = part.new_empty(transport.size * part.numel())
        transport.my_slice(flat).copy_(part.reshape(-1))
        transport.all_gather(
            flat, key=transport.next_move(), label="position ids or padding mask (sequence parallel)"
        ).wait()
        whole = flat.view(transport.size, *part.shape).movedim(0, 1).reshape(part.size(0), -1)
        self._gathered = [*self._gathered[-7:], (part, whole)]
        return whole

    def _check_sizes(self, part: torch.Tensor, transport: Transport) -> None:
        """Every rank has the same part of as many sequences; raised on all of them, before anything else moves."""
        mine = torch.tensor([part.size(0) << 40 | part.size(1)])
        found = (
            transport.gather_small(mine, channel="call", label="the sizes of the parts of sequences").flatten().tolist()
        )
        if len(set(found)) == 1:
            return
        parts = [
            f"rank {rank}: {each >> 40} sequences of {each & (1 << 40) - 1} tokens" for rank, each in enumerate(found)
        ]
        model = self.model()
        raise DeepSpeedConfigError(
            f"sequence parallel: the ranks of a group called {type(model).__name__} with parts of different shapes: "
            f"{', '.join(parts)}. Pad the sequences, so that every rank has equally many sequences and tokens "
            "(UlyssesSPDataLoaderAdapter does)"
        )

    def documents(self, positions: torch.Tensor | None, visible: torch.Tensor | None, batch: int) -> Documents | None:
        """Returns the documents of whole sequences, see ``documents_of``, found once for all layers.

        Args:
            positions: ``[batch or 1, tokens]``, as :meth:`whole` gave them.
            visible: The padding mask ``[batch, tokens]``, as :meth:`whole` gave it.
            batch: Sequences of the batch.
        """

        def find() -> Documents | None:
            found = documents_of(positions, visible, self.parts(positions, visible))
            return found * batch if found is not None and len(found) == 1 else found

        return self._once(f"documents of {batch}", positions, visible, find)  # type: ignore[no-any-return]

    def numbers(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the document numbers of whole sequences, see ``document_numbers``, found once for all layers.

        Args:
            positions: ``[batch or 1, tokens]``, as :meth:`whole` gave them.
            visible: The padding mask ``[batch, tokens]``, as :meth:`whole` gave it.
        """

        def find() -> torch.Tensor | None:
            return document_numbers(positions, visible, self.parts(positions, visible))

        return self._once("numbers", positions, visible, find)  # type: ignore[no-any-return]

    def parts(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> int:
        """Returns the number of parts of the tokens that do not see each other; the same on all ranks.

        1 for sequences that the ranks share. The size of the group where an evaluation with a padding mask gave each
        rank its own whole sequences: the mask does not say so, and positions do not count beside it.

        Args:
            positions: ``[batch or 1, tokens]``, as :meth:`whole` gave them.
            visible: The padding mask ``[batch, tokens]``, as :meth:`whole` gave it.
        """
        ranks, model = size_of(self.group), self.model()
        if positions is None or visible is None or model is None or model.training:
            return 1

        def find() -> int:
            return ranks if holds_one_sequence_per_rank(positions, visible, ranks) else 1

        return self._once("parts", positions, visible, find)  # type: ignore[no-any-return]

    def _once(
        self, what: str, positions: torch.Tensor | None, visible: torch.Tensor | None, find: Callable[[], Any]
    ) -> Any:
        """What ``find`` returns for these very tensors; the latest results are kept, for all layers of a pass."""
        for name, known, seen, found in self._found:
            if name == what and known is positions and seen is visible:
                return found
        found = find()
        self._found = [*self._found[-5:], (what, positions, visible, found)]
        return found


_by_module: weakref.WeakKeyDictionary[nn.Module, SequenceParallelContext] = weakref.WeakKeyDictionary()
_by_config: dict[int, tuple[Any, SequenceParallelContext]] = {}


def remember(model: nn.Module, sharing: SequenceParallelContext) -> None:
    """Makes every module of a model, and every configuration in it, findable."""
    for module in model.modules():
        _by_module[module] = sharing
    for configured in configured_modules(model):
        _by_config[id(configured.config)] = configured.config, sharing


def sharing_of(model: nn.Module) -> SequenceParallelContext | None:
    """Returns how a model's sequences are shared; None if it was not registered."""
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


def registered(module: nn.Module) -> SequenceParallelContext:
    """Returns how the sequences of a registered model are shared, of which this is a module.

    Raises:
        DeepSpeedConfigError: It was not registered.
    """
    return _there(_by_module.get(module))


def registered_by(config: Any) -> SequenceParallelContext:
    """Returns the :class:`SequenceParallelContext` of the model that owns ``config``.

    Raises:
        DeepSpeedConfigError: No model with this configuration was registered.
    """
    known, found = _by_config.get(id(config), (None, None))
    return _there(found if known is config else None)


def _there(found: SequenceParallelContext | None) -> SequenceParallelContext:
    if found is None:
        raise DeepSpeedConfigError(
            f'sequence parallel: a model has attn_implementation "{NAME}" and was not registered (a copy of one that '
            "was?); set its attention implementation, or register it too"
        )
    return found
