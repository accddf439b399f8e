"""Layers that pass states from token to token, on parts of sequences: convolutions, state-space layers, recurrences.

A layer that continues from the states of a cache computes this rank's tokens. Convolutions get the last tokens of the
previous rank, all ranks at once. The recurrent state goes from rank to rank: a rank begins its scan when the previous
one has ended its own, while projections, and the layers that follow on the previous rank, run at the same time. Memory
and computation per rank fall with the number of ranks.

Every other layer gets whole sequences: each rank computes all tokens of this layer and keeps its own, so that its
computation and activations do not fall. So do layers of the first kind where documents are packed, since each document
is computed by itself, and where a rank has fewer tokens than a convolution needs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job import backward_comm
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.differentiable import gather_from
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.give_base import give_base
from deepspeed.models.recurrent import (
    LayerStates,
    attends,
    cache_argument,
    continues_states,
    is_block,
    is_token_mixer,
)
from deepspeed.parallel.sequence.context import SequenceParallelContext, registered
from deepspeed.uncompiled import uncompiled

_INPUTS = "deepspeed_inputs_of_pass"
_PROBED = 4
"""Tokens with which a layer is tried."""
_TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
"""By dtype, the greatest difference of results in two parts, over the largest value."""


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the layers of a model that pass states along tokens and can be computed on shared sequences."""
    return [module for module in model.modules() if is_token_mixer(module) and not attends(module)]


def share_states(model: nn.Module) -> None:
    """Makes the layers of a registered model that pass states along tokens do so over the ranks, in place."""
    mixers = mixers_of(model)
    inside = {id(module) for module in mixers}
    for module in list(model.modules()):
        if is_block(module) and any(id(part) in inside for part in module.modules()):
            give_base(module, _BlockOfPass)
    for module in mixers:
        module.__dict__.update(
            continues_states=continues_states(module), cache_argument=cache_argument(module), shapes=None
        )
        give_base(module, _RecurrentLayer)


class _BlockOfPass(nn.Module):
    """Mixin in front of a block's class: keeps the inputs of the pass for a recomputation of the block in backward."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sharing = registered(self)
        if sharing.inputs is not None and sharing.is_on:
            kwargs.setdefault(_INPUTS, sharing.inputs)
        return super().__call__(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sharing, inputs = registered(self), kwargs.pop(_INPUTS, None)
        before = sharing.inputs
        sharing.inputs = before if inputs is None else inputs
        try:
            return super().forward(*args, **kwargs)
        finally:
            sharing.inputs = before


class _RecurrentLayer(nn.Module):
    """Mixin for a layer that passes states along tokens, such as a convolution or a recurrence."""

    continues_states: bool
    cache_argument: str  # name of the argument of ``forward`` that takes the cache; empty: there is none
    shapes: _LocalStates | None  # found in the first call

    @uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sharing = registered(self)
        if not sharing.is_on:
            return super().forward(*args, **kwargs)
        if sharing.inputs is None:
            raise DeepSpeedConfigError(
                f"sequence parallel: {type(self).__name__} was called outside of a forward of its model, so its "
                "position ids and padding mask are not known. Call the model (pipelines do not), and checkpoint its "
                "layers by gradient_checkpointing_enable"
            )
        bound = inspect.signature(super().forward).bind(*args, **kwargs).arguments
        more: dict[str, Any] = bound.pop("kwargs", {})
        given = {**bound, **more}
        first = next(iter(given))
        positions, padding = sharing.inputs.positions, sharing.inputs.padding
        lengths = _documents(sharing, positions, padding, given[first].size(0))
        if self.cache_argument:
            given[self.cache_argument] = None
        if self.continues_states and lengths is None:
            _set_masks(given, padding)
            shapes = self._shapes(given, first, sharing)
            if shapes is not None and given[first].size(1) >= shapes.kernel:
                states = _StatesOfRanks(sharing, given[first], shapes)
                given[self.cache_argument] = states
                return states.tie(super().forward(**given))
        _set_masks(given, sharing.whole(padding))
        return _on_whole_sequences(super().forward, given, first, lengths, sharing)

    def _shapes(self, given: dict[str, Any], first: str, sharing: SequenceParallelContext) -> _LocalStates | None:
        """Returns the states of a few tokens, found in the first call; None where the layer needs whole sequences.

        The layer computes these tokens at once and in two parts, the second of which continues from the states of the
        first. If the results differ on any rank, the layer does not continue from them, although its code looks so. If
        they are zeros (a projection that begins with zeros), the next call tries again.
        """
        if self.shapes is None and self.continues_states:
            tokens, half = given[first].size(1), _PROBED // 2
            if tokens < _PROBED:
                return None

            def probe(part: slice, states: _LocalStates) -> torch.Tensor:
                few = {name: _cut(value, tokens, part) for name, value in given.items()}
                _set_masks(few, None)
                few[self.cache_argument] = states
                made: torch.Tensor = _as_tuple(super(_RecurrentLayer, self).forward(**few))[0]
                return made

            with torch.no_grad():
                started = _LocalStates()
                whole = probe(slice(0, _PROBED), _LocalStates())[:, half:]
                probe(slice(0, half), started)
                error = (probe(slice(half, _PROBED), _LocalStates(started)) - whole).abs().max()
                limit = _TOLERANCES.get(whole.dtype, 5e-2) * whole.abs().max()
            vote = torch.tensor([int(limit > 0), int(error <= limit)])
            transport = sharing.transport(whole.device)
            votes = transport.gather_small(vote, channel="call", label="whether a layer continues from its states")
            if not votes[:, 0].all():
                return None
            self.__dict__.update(continues_states=bool(votes[:, 1].all()), shapes=started.without_values())
        return self.shapes if self.continues_states else None


def _set_masks(given: dict[str, Any], padding: torch.Tensor | None) -> None:
    """Gives a layer the padding mask of the pass; its own is None on ranks whose part has no padding."""
    for name in given:
        if name.endswith("mask"):
            given[name] = padding


def _documents(
    sharing: SequenceParallelContext, positions: torch.Tensor | None, padding: torch.Tensor | None, batch: int
) -> list[tuple[int, ...]] | None:
    """Returns, by sequence, the lengths of the documents of whole sequences; None if each is one document."""
    positions = None if positions is None or positions.dim() != 2 else sharing.whole(positions)
    padding = sharing.whole(padding)
    if padding is not None:
        parts = sharing.parts(positions, padding)
        return None if parts == 1 else [(padding.size(1) // parts,) * parts] * batch
    found = sharing.documents(positions, None, batch)
    return None if found is None else [row.lengths for row in found]


# -- whole sequences ---------------------------------------------------------------------------------------------------


def _on_whole_sequences(
    forward: Any, given: dict[str, Any], first: str, lengths: Any, sharing: SequenceParallelContext
) -> Any:
    """Computes all tokens of a layer, document by document, and returns the outputs of this rank's tokens."""
    tokens, ranks = given[first].size(1), sharing.transport(given[first].device).size
    given = {name: _gathered(value, tokens, sharing) for name, value in given.items()}
    whole = tokens * ranks
    if lengths is None:
        made = _as_tuple(forward(**given))
    else:
        rows = []
        for number, row in enumerate(lengths):
            ends, parts = 0, []
            for length in row:
                cut = slice(ends, ends + length)
                few = {name: _cut(value, whole, cut, number) for name, value in given.items()}
                parts.append(_as_tuple(forward(**few)))
                ends += length
            rows.append(_joined(parts, 1))
        made = _joined(rows, 0)
    start = sharing.transport(given[first].device).rank * tokens
    own = tuple(_cut(value, whole, slice(start, start + tokens)) for value in made)
    return own[0] if len(own) == 1 else own


def _as_tuple(made: Any) -> tuple[Any, ...]:
    return made if isinstance(made, tuple) else (made,)


def _joined(parts: list[tuple[Any, ...]], dim: int) -> tuple[Any, ...]:
    """Concatenates the outputs that have a value per token (as many axes as the first one); the others become None."""
    axes = parts[0][0].dim()
    by_output = zip(*parts, strict=True)
    return tuple(
        torch.cat(each, dim) if isinstance(each[0], torch.Tensor) and each[0].dim() == axes else None
        for each in by_output
    )


def _gathered(value: Any, tokens: int, sharing: SequenceParallelContext) -> Any:
    """Returns an argument for whole sequences: tensors ``[batch, tokens of this rank, ...]`` are gathered."""
    if isinstance(value, tuple):
        return tuple(_gathered(part, tokens, sharing) for part in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.size(1) != tokens:
        return value
    channel = axis_of(sharing.group, SEQUENCE).channel(value.device)
    return gather_from(value, channel, 1, is_partial=value.is_floating_point(), label="tokens of a recurrent layer")


def _cut(value: Any, tokens: int, part: slice, row: int | None = None) -> Any:
    """Returns the tokens ``part`` of an argument or output of ``tokens`` tokens, perhaps of one sequence only."""
    if isinstance(value, tuple):
        return tuple(_cut(one, tokens, part, row) for one in value)
    if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.size(1) != tokens:
        return value
    rows = slice(None) if row is None or value.size(0) == 1 else slice(row, row + 1)
    return value[rows, part]


# -- states that go from rank to rank ----------------------------------------------------------------------------------


class _LocalStates(LayerStates):
    """The states of one layer where this rank computes its tokens from their begin, or continues from ``previous``."""

    def __init__(self, previous: _LocalStates | None = None) -> None:
        self.last: list[torch.Tensor] = []  # by convolution, its last tokens, ``[batch, channels, kernel]``
        self.state: torch.Tensor | None = None  # the recurrent state after the tokens; None: the layer has none
        self._previous = previous

    @property
    def kernel(self) -> int:
        """Returns the most tokens that a convolution needs, or 2, since layers treat a single token in another way."""
        return max(2, *(tokens.size(-1) for tokens in self.last))

    def without_values(self) -> _LocalStates:
        """Returns these states as tensors on the meta device."""
        found = _LocalStates()
        found.last = [tokens.to("meta") for tokens in self.last]
        found.state = None if self.state is None else self.state.to("meta")
        return found

    @override
    def extend(self, tokens: torch.Tensor, kernel: int) -> torch.Tensor:
        if self._previous is None:
            extended = nn.functional.pad(tokens, (kernel, 0))
        else:
            extended = torch.cat((self._previous.last[len(self.last)], tokens), -1)
        self.last.append(extended[..., -kernel:])
        return extended

    @override
    def before(self) -> torch.Tensor | None:
        return None if self._previous is None else self._previous.state

    @override
    def after(self, state: torch.Tensor) -> None:
        self.state = state


class _StatesOfRanks(LayerStates):
    """The states of one layer in one call: those before this rank's tokens come from the previous rank."""

    def __init__(self, sharing: SequenceParallelContext, tokens: torch.Tensor, shapes: _LocalStates) -> None:
        self._transport, self._shapes, self._batch = sharing.transport(tokens.device), shapes, tokens.size(0)
        self._convolutions = 0
        # Every function below has it as an input, so that all ranks run the same backwards.
        self._anchor = torch.zeros((), device=tokens.device, requires_grad=torch.is_grad_enabled())
        self._before: torch.Tensor | None = None
        self._sent: torch.Tensor | None = None
        if self._anchor.requires_grad:
            backward_comm.note_anywhere()

    @override
    def extend(self, tokens: torch.Tensor, kernel: int) -> torch.Tensor:
        last = tokens[..., -kernel:].contiguous()
        previous = _PreviousTokens.apply(last, self._anchor, self._transport)  # type: ignore[no-untyped-call]
        self._convolutions += 1
        if self._convolutions == len(self._shapes.last):
            self._receive(previous)
        return torch.cat((previous, tokens), -1)

    @override
    def before(self) -> torch.Tensor | None:
        """Returns memory that is filled when the last convolution begins, so that the projections need not wait."""
        like = self._shapes.state
        if self._transport.rank > 0 and like is not None:
            self._before = torch.empty((self._batch, *like.shape[1:]), dtype=like.dtype, device=self._anchor.device)
            if not self._shapes.last:
                self._receive(self._anchor)
        return self._before

    def _receive(self, after: torch.Tensor) -> None:
        """Fills the state. In backward its gradient leaves before the function that has made ``after`` runs."""
        if self._before is not None:
            _ArrivingState.apply(self._before, self._anchor, after, self._transport)  # type: ignore[no-untyped-call]

    @override
    def after(self, state: torch.Tensor) -> None:
        self._sent = _LeavingState.apply(state, self._anchor, self._transport)  # type: ignore[no-untyped-call]

    def tie(self, made: Any) -> Any:
        """Returns the layer's output, whose backward also runs those of the states."""
        states = [state for state in (self._before, self._sent) if state is not None]
        if not states:
            return made
        first, *more = _as_tuple(made)
        tied = _TieFunction.apply(first, *states)  # type: ignore[no-untyped-call]
        return (tied, *more) if isinstance(made, tuple) else tied


def _pass_state(transport: Transport, numbers: Iterable[int], state: torch.Tensor, *, back: bool = False) -> None:
    """Takes part in some of the rounds in which states go along the ranks: in round r from the r-th rank to the next.

    Over all calls every rank goes through all rounds, whose number is one less than the ranks. ``back``: from the last
    rank to the first.
    """
    last = transport.size - 1
    for number in numbers:
        source, target = (last - number, last - number - 1) if back else (number, number + 1)
        mine = state if transport.rank in (source, target) else None
        transport.move([TensorTransfer(source, target, mine)], label="the state of a recurrent layer")


class _ArrivingState(torch.autograd.Function):
    """Fills memory with the state that comes from the previous rank, in place; sends the gradient there."""

    @staticmethod
    def forward(
        ctx: Any, memory: torch.Tensor, anchor: torch.Tensor, after: torch.Tensor, transport: Transport
    ) -> torch.Tensor:
        ctx.transport = transport
        ctx.mark_dirty(memory)
        _pass_state(transport, range(transport.rank), memory)
        return memory

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        last = ctx.transport.size - 1
        _pass_state(ctx.transport, range(last - ctx.transport.rank, last), gradient.contiguous(), back=True)
        return None, None, None, None


class _LeavingState(torch.autograd.Function):
    """Sends the state to the next rank; returns a scalar whose backward gets the gradient from there."""

    @staticmethod
    def forward(ctx: Any, state: torch.Tensor, anchor: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport, ctx.like = transport, state.to("meta")
        _pass_state(transport, range(transport.rank, transport.size - 1), state.contiguous())
        return anchor.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        arrived = torch.zeros_like(ctx.like, device=gradient.device, memory_format=torch.contiguous_format)
        _pass_state(ctx.transport, range(ctx.transport.size - 1 - ctx.transport.rank), arrived, back=True)
        return arrived, None, None


class _PreviousTokens(torch.autograd.Function):
    """Returns the tokens that the previous rank passes, of the same shape; zeros on the first rank."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, anchor: torch.Tensor, transport: Transport) -> torch.Tensor:
        ctx.transport = transport
        return _neighbors(tokens, transport, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _neighbors(gradient.contiguous(), ctx.transport, -1), None, None


def _neighbors(leaving: torch.Tensor, transport: Transport, step: int) -> torch.Tensor:
    arriving, rank = torch.zeros_like(leaving), transport.rank
    pairs = [(source, source + step) for source in range(transport.size) if 0 <= source + step < transport.size]
    transfers = [
        TensorTransfer(source, target, leaving if rank == source else arriving if rank == target else None)
        for source, target in pairs
    ]
    transport.move(transfers, label="tokens before a convolution (sequence parallel)")
    return arriving


class _TieFunction(torch.autograd.Function):
    """Returns ``made``; its backward also runs those of ``states``, which get no gradient here."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        ctx.count = len(states)
        return made.view_as(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient, *[None] * ctx.count)
