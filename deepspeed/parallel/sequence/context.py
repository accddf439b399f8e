"""How ranks share each registered model's sequences, and results that one pass caches for all layers.

The documents packed into a sequence, and padding, decide which tokens see each other.

A document ends where positions do not increase by one. If there is a padding mask, it alone decides, as in the
models themselves: no token sees masked tokens, and masked tokens see nothing: their attention is 0, as in kernels for
fully masked rows.
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
    """Holds what the ranks exchange in attention."""

    heads_group: Any  # torch process group of the ranks that divide the heads; None: only a ring is used
    ring_group: Any = None  # torch process group of the ring that passes keys and values on; None: no ring
    recompute: bool = False  # save attention's result only once for backward; see ``SavedResult``


@dataclass(frozen=True)
class InputsOfPass:
    """What a forward of the model got for this rank's tokens."""

    positions: torch.Tensor | None  # position ids, ``[batch or 1, tokens]``; images have more axes before these
    padding: torch.Tensor | None  # padding mask, ``[batch, tokens]``, 1 or True for tokens


@dataclass
class SequenceParallelContext:
    """Holds how the ranks share one model's sequences."""

    model: weakref.ref[nn.Module]  # the model whose ``training`` flag is read if evaluation is not sharded
    group: Any  # torch process group of the ranks that share a sequence
    core: str  # the implementation that attends to whole sequences
    disable_in_eval: bool  # in evaluation each rank computes its whole sequences by itself
    # The exchange in attention. ``initialize`` replaces it in a model that the program registered.
    exchange: AttentionExchange
    recompute_core: bool = False  # recompute the attention between the exchanges in backward (selective recomputation)
    # the inputs of the current pass, or of the one whose layer is recomputed; None: no pass is running
    inputs: InputsOfPass | None = None
    # the module with towers that has gathered whole sequences in the current pass; None: none has
    whole_for: nn.Module | None = None
    _evaluates: bool = False
    _is_left_alone: bool = False
    _gathered: list[tuple[torch.Tensor, int | None, torch.Tensor]] = field(default_factory=list)
    _found: list[tuple[str, torch.Tensor | None, torch.Tensor | None, Any]] = field(default_factory=list)

    @property
    def is_on(self) -> bool:
        """Returns whether the current pass of the model has parts of sequences."""
        model = self.model()
        if self._is_left_alone:
            return False
        return not self.disable_in_eval or self._evaluates or model is None or model.training

    @contextmanager
    def evaluating(self, positions: torch.Tensor | None) -> Iterator[None]:
        """Shards sequences in evaluation too, inside the context.

        ``positions`` are their position ids, ``[batch, tokens]``.
        """
        self._evaluates, self.inputs = True, InputsOfPass(positions, None)
        try:
            yield
        finally:
            self._evaluates, self.inputs = False, None

    def transport(self, device: torch.device) -> Transport:
        """Returns the transport of the exchange."""
        return transport_of(self.group, device)

    def whole(self, part: torch.Tensor | None) -> torch.Tensor | None:
        """Returns ``[batch, tokens]`` of whole sequences from this rank's part; gathered once for all layers of a pass.

        Cached by the identity of ``part`` and its version, which an in-place change raises. So all layers, and
        recomputations in backward, get the same tensor, and a program may write the next batch into the same memory.
        """
        if part is None:
            return None
        version = None if part.is_inference() else part._version  # inference tensors have none
        for known, seen, whole in self._gathered:
            if known is part and seen == version:
                return whole
        transport = self.transport(part.device)
        self._check_sizes(part, transport)
        flat = part.new_empty(transport.size * part.numel())
        transport.my_slice(flat).copy_(part.reshape(-1))
        transport.all_gather(
            flat, key=transport.next_move(), label="position ids or padding mask (sequence parallel)"
        ).wait()
        whole = flat.view(transport.size, *part.shape).movedim(0, 1).reshape(part.size(0), -1)
        self._gathered = [*self._gathered[-7:], (part, version, whole)]
        return whole

    def _check_sizes(self, part: torch.Tensor, transport: Transport) -> None:
        """Raises on all ranks, before other transfers, if parts or numbers of sequences differ between ranks."""
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

        ``positions`` ``[batch or 1, tokens]`` and the padding mask ``[batch, tokens]`` are from :meth:`whole`.
        """

        def find() -> Documents | None:
            found = documents_of(positions, visible, self.parts(positions, visible))
            return found * batch if found is not None and len(found) == 1 else found

        return self._once(f"documents of {batch}", positions, visible, find)  # type: ignore[no-any-return]

    def numbers(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> torch.Tensor | None:
        """Returns the numbers of :meth:`documents` by token, ``[batch, tokens]``, see ``document_numbers``."""
        return self._once(  # type: ignore[no-any-return]
            "numbers",
            positions,
            visible,
            lambda: document_numbers(positions, visible, self.parts(positions, visible)),
        )

    def parts(self, positions: torch.Tensor | None, visible: torch.Tensor | None) -> int:
        """Returns into how many parts that do not see each other the tokens are divided; the same on all ranks.

        1 for sequences that the ranks share. The group's size in an evaluation with a padding mask in which each rank
        has whole sequences of its own: the mask does not show that, and positions are not used beside a mask. Arguments
        are as of :meth:`documents`, ``[batch or 1, tokens]``.
        """
        ranks, model = size_of(self.group), self.model()
        if positions is None or visible is None or model is None or model.training:
            return 1

        def find() -> int:
            # Each rank has whole sequences of its own if positions restart at 0 in every rank's part. Parts without
            # visible tokens, and parts before which nothing is visible, are ignored: both interpretations give them the
            # same attention. Waits for the device.
            mask = visible.bool().cpu().unflatten(1, (ranks, -1))
            by_rank = positions.cpu().expand(visible.size(0), -1).unflatten(1, (ranks, -1))
            first_visible = mask.int().argmax(-1, keepdim=True)
            begins = (by_rank[..., 0] == 0) | (by_rank.gather(-1, first_visible)[..., 0] == 0)
            return ranks if bool((begins | ~mask.any(-1))[:, 1:].all()) else 1

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
    """Registers the modules of a model, and their configurations, for :func:`registered` and :func:`registered_by`."""
    for module in model.modules():
        _by_module[module] = sharing
    for configured in configured_modules(model):
        _by_config[id(configured.config)] = configured.config, sharing


def sharing_of(model: nn.Module) -> SequenceParallelContext | None:
    """Returns how a model's sequences are shared; None if it was not registered."""
    return _by_module.get(model)


@contextmanager
def left_alone(model: nn.Module) -> Iterator[None]:
    """Makes a model compute whole sequences by itself inside the context, as if it were not registered."""
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
    """Returns the :class:`SequenceParallelContext` of the registered model that ``module`` belongs to.

    Raises:
        DeepSpeedConfigError: No registered model has this module.
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
    """The tokens of one sequence, document after document."""

    lengths: tuple[int, ...]  # tokens of each document
    # Indices of the tokens, document after document; None: they are already in this order and all belong to a document.
    # Tokens of no document see nothing.
    order: torch.Tensor | None = None


Documents = tuple[PackedRow, ...]
"""By sequence of the batch."""


def documents_of(positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1) -> Documents | None:
    """Returns the documents of whole sequences; None if each sequence is one document. Waits for the device.

    Position ids are ``[batch, tokens]``, and not used beside the padding mask ``[batch, tokens]``, True (or 1) for
    tokens. With that, ``parts`` equal parts of the tokens do not see each other.
    """
    if visible is not None:
        visible = visible.bool().cpu()
        if parts == 1 and bool(visible.all()):
            return None
        counts = visible.unflatten(1, (parts, -1)).sum(-1).tolist()
        lengths = (tuple(count for count in row if count) for row in counts)
        return tuple(PackedRow(each, row.nonzero().flatten()) for each, row in zip(lengths, visible, strict=True))
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


def document_numbers(
    positions: torch.Tensor | None, visible: torch.Tensor | None, parts: int = 1
) -> torch.Tensor | None:
    """Returns the document number of each token, ``[batch, tokens]`` on the host, -1 for those in no document.

    None if each sequence is one document. Arguments as for :func:`documents_of`.
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
