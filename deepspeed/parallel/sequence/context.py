"""How each registered model's sequences are shared, and what its passes have found out once for all layers.

Which tokens of a sequence see each other follows from the documents that were packed into it, and from padding.

A document ends where positions do not increase by one. Where there is a padding mask, that alone decides, as the models
themselves have it: no token sees hidden tokens. They see nothing either: their attention is 0, as the kernels have
it where a row of the mask hides everything.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.comm.job.job import size_of
from deepspeed.comm.transports.transport import Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.attention import configured_modules
from deepspeed.parallel.sequence.exchange import transport_of

NAME = "deepspeed_sequence"
"""The attention implementation of registered models, in both registries of transformers."""


@dataclass(frozen=True)
class AttentionExchange:
    """Holds what the ranks exchange in attention.

    Attributes:
        heads_group: Torch process group of the ranks among which heads are divided; None: keys and values go round
            instead.
        ring_group: Torch process group of the ranks around which keys and values go; None: they do not.
        recompute: Attention's result is kept once for backward; see ``SavedResult``.
    """

    heads_group: Any
    ring_group: Any = None
    recompute: bool = False


@dataclass
class SequenceParallelContext:
    """Holds how the ranks share one model's sequences.

    Attributes:
        model: The model whose ``training`` decides where evaluation is not sharded.
        group: Torch process group of the ranks that share a sequence.
        core: The implementation that attends to whole sequences.
        disable_in_eval: In evaluation the model is left to itself, with whole sequences on each rank.
        exchange: What they exchange in attention. ``initialize`` replaces it in a model that the program registered.
        recompute_core: What attends between the exchanges runs again in backward (selective recomputation).
        given_positions: Position ids of the pass that the model is in; None: it is in none.
        whole_for: The module with towers that is in a pass with whole sequences, gathered at its entry; None: none is.
    """

    model: weakref.ref[nn.Module]
    group: Any
    core: str
    disable_in_eval: bool
    exchange: AttentionExchange
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
        """Shards sequences in evaluation too, inside the context.

        ``positions`` are their position ids, ``[batch, tokens]``.
        """
        self._evaluates, self.given_positions = True, positions
        try:
            yield
        finally:
            self._evaluates, self.given_positions = False, None

    def transport(self, device: torch.device) -> Transport:
        """Returns what carries the exchange."""
        return transport_of(self.group, device)

    def whole(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """Returns ``[batch, tokens]`` of whole sequences from this rank's part; gathered once for all layers of a pass.

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
        rank its own whole sequences: the mask does not show that, and positions do not count beside it.

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
        """Returns the result of ``find`` for these very tensors; caches the latest results for all layers of a pass."""
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
    """Lets a model compute whole sequences by itself inside the context, as if it were not registered."""
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
    return _checked(_by_module.get(module))


def registered_by(config: Any) -> SequenceParallelContext:
    """Returns the :class:`SequenceParallelContext` of the model that owns ``config``.

    Raises:
        DeepSpeedConfigError: No model with this configuration was registered.
    """
    known, found = _by_config.get(id(config), (None, None))
    return _checked(found if known is config else None)


def _checked(found: SequenceParallelContext | None) -> SequenceParallelContext:
    if found is None:
        raise DeepSpeedConfigError(
            f'sequence parallel: a model has attn_implementation "{NAME}" and was not registered (a copy of one that '
            "was?); set its attention implementation, or register it too"
        )
    return found


@dataclass(frozen=True)
class PackedRow:
    """The tokens of one sequence, document after document.

    Attributes:
        lengths: Tokens of each document.
        order: Where the tokens of the documents lie, one document after the other; None: as they are numbered, and all
            tokens are in a document. Those that are in none see nothing.
    """

    lengths: tuple[int, ...]
    order: torch.Tensor | None = None


Documents = tuple[PackedRow, ...]
"""By sequence of the batch."""


def holds_one_sequence_per_rank(positions: torch.Tensor, visible: torch.Tensor, ranks: int) -> bool:
    """Returns whether the positions begin again at 0 in every rank's part: each rank was given its own whole sequences.

    Parts without visible tokens, and parts before which nothing is visible, do not contradict that: for them both
    readings give the same attention. Waits for the device.

    Args:
        positions: Position ids ``[batch or 1, tokens]`` of all parts, in the order of the ranks.
        visible: Padding mask ``[batch, tokens]``.
        ranks: Number of parts.
    """
    mask = visible.bool().cpu().unflatten(1, (ranks, -1))
    places = positions.cpu().expand(visible.size(0), -1).unflatten(1, (ranks, -1))
    first_visible = mask.int().argmax(-1, keepdim=True)
    begins = (places[..., 0] == 0) | (places.gather(-1, first_visible)[..., 0] == 0)
    return bool((begins | ~mask.any(-1))[:, 1:].all())


def documents_of(positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1) -> Documents | None:
    """Finds the documents of whole sequences; None where each is one document. Waits for the device.

    Args:
        positions: Position ids ``[batch, tokens]``.
        visible: Padding mask ``[batch, tokens]``, True (or 1) for tokens; where it is there, positions do not count.
        parts: With ``visible``: equal parts of the tokens that do not see each other.
    """
    if visible is not None:
        visible = visible.bool().cpu()
        if parts == 1 and bool(visible.all()):
            return None
        return tuple(_of_mask(row, parts) for row in visible)
    if positions is None:
        return None
    begins = torch.diff(positions, dim=-1) != 1
    if not bool(begins.any()):
        return None
    return tuple(PackedRow(_lengths(row)) for row in begins.cpu())


def _lengths(begins: torch.Tensor) -> tuple[int, ...]:
    """Lengths of documents from whether each token but the first begins one."""
    starts = [0, *(1 + begins.nonzero().flatten()).tolist(), begins.numel() + 1]
    return tuple(end - start for start, end in zip(starts, starts[1:], strict=False))


def _of_mask(visible: torch.Tensor, parts: int) -> PackedRow:
    counts = visible.unflatten(0, (parts, -1)).sum(-1).tolist()
    return PackedRow(tuple(count for count in counts if count), visible.nonzero().flatten())


def document_numbers(
    positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1
) -> torch.Tensor | None:
    """Returns the same as a number per token, ``[batch, tokens]`` on the host.

    None where each sequence is one document.

    Tokens that are in no document have -1.
    """
    if visible is not None:
        visible = visible.bool().cpu()
        if parts == 1 and bool(visible.all()):
            return None
        numbers = torch.arange(parts).repeat_interleave(visible.size(1) // parts)
        return numbers.where(visible, -1)
    if positions is None:
        return None
    begins = torch.diff(positions, dim=-1).cpu() != 1
    if not bool(begins.any()):
        return None
    return torch.nn.functional.pad(begins.long().cumsum(-1), (1, 0))
