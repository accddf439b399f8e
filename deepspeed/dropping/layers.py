"""Layers that training forwards leave out at random, the same ones on all ranks (arXiv:2010.13369).

The share theta of layers that stay is a function of the step (:class:`ProgressiveLayerDrop`). Block *i* of *L* stays
with probability ``1 - i / L * (1 - theta)``; a block that is left out is the identity, and what one that stays adds to
its input is divided by that probability, so that each block is right in the mean. In evaluation every block stays as it
is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

from deepspeed.errors import CallOrderError
from deepspeed.give_base import give_base
from deepspeed.zero.address import address_of


class LayerDrop:
    """Draws the blocks of one row that a forward leaves out.

    Args:
        num_blocks: Length of the row.
        seed: The seed of the draws.

    Attributes:
        num_blocks: As given.
        dropped: Numbers of the blocks that are left out until the next draw.
        kept_share: For each block the probability with which it stays.
    """

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self._seed = seed
        self._skips_as: type | int | None = None  # result of a block that was kept: a tensor, or this many values
        self.keep_all()

    def keep_all(self) -> None:
        """Keeps every block, unscaled."""
        self.dropped: frozenset[int] = frozenset()
        self.kept_share = [1.0] * self.num_blocks

    def draw(self, theta: float, *moment: int) -> frozenset[int]:
        """Draws again; the same for the same arguments, whatever was drawn before, on every rank.

        Args:
            theta: The keep ratio in force, between 0 and 1.
            *moment: Numbers that identify this forward, not negative (the step, the micro-batch).

        Returns:
            The numbers of the blocks that are left out.
        """
        self.kept_share = [1 - i / self.num_blocks * (1 - theta) for i in range(self.num_blocks)]
        dice = numpy.random.default_rng([self._seed, *moment]).random(self.num_blocks)
        self.dropped = frozenset(i for i, share in enumerate(self.kept_share) if dice[i] >= share)
        return self.dropped

    def note_answer(self, answer: Any) -> None:
        """Records from a kept block the form of the result of a skipped one.

        Raises:
            ValueError: There is no such result.
        """
        if isinstance(answer, torch.Tensor):
            self._skips_as = torch.Tensor
        elif isinstance(answer, tuple) and answer and all(part is None for part in answer[1:]):
            self._skips_as = len(answer)
        else:
            raise ValueError(
                "progressive_layer_drop: expected a block to return its hidden states, alone or in a tuple with None "
                f"for the rest, found {_shown(answer)}; a dropped block returns only its input. Drop layers in the "
                "model's own forward instead, which gets pld_theta from the engine"
            )

    def skipped(self, hidden: torch.Tensor) -> Any:
        """Returns what a block that is left out returns: ``hidden`` in its shape, and None for its other outputs."""
        # Block 0 is always kept, so there is a result; a model that begins with a later one gets a tensor.
        return (hidden, *[None] * (self._skips_as - 1)) if isinstance(self._skips_as, int) else hidden


class DroppableBlock(nn.Module):
    """Base class in front of each block's own; decides before the block and its hooks run."""

    _layer_drop: LayerDrop
    _number_in_row: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's result, or its replacement."""
        drop, number = self._layer_drop, self._number_in_row
        share = drop.kept_share[number]
        if share == 1.0 or not self.training:
            answer = super().__call__(*args, **kwargs)
            if self.training:
                drop.note_answer(answer)
            return answer
        hidden = _hidden_states(type(self).__name__, args, kwargs)
        if number in drop.dropped:
            return drop.skipped(hidden)
        answer = super().__call__(*args, **kwargs)
        drop.note_answer(answer)
        if isinstance(answer, torch.Tensor):
            return hidden + (answer - hidden) / share
        return (hidden + (answer[0] - hidden) / share, *answer[1:])


def progressive_layer_drop(
    model: nn.Module, blocks: str | nn.Module | Sequence[nn.Module], *, seed: int = 0
) -> LayerDrop:
    """Lets training forwards of ``model`` leave blocks out, by the section ``progressive_layer_drop``.

    To be called before ``deepspeed.initialize``. The engine draws for every training forward, by the step, so that all
    ranks leave out the same blocks and a resumed run the ones it would have left out. At ZeRO stage 3 nothing is
    gathered for them. Names of parameters, types of blocks and checkpoints stay as they are.

    Args:
        model: The model.
        blocks: The row of blocks, each of which takes hidden states of any shape as the first argument and returns new
            ones of that shape, alone or as the first of a tuple of nothing else: the name of a ``ModuleList`` or
            ``Sequential`` of the model, that module, or a list of modules.
        seed: The seed of the draws.

    Returns:
        The draws, for programs without an engine: ``draw(theta, step)`` before each forward.

    Raises:
        ValueError: There are no such blocks, or they are in a row already.
        CallOrderError: An engine trains the model already.
    """
    if any(_is_trained(parameter) for parameter in model.parameters()):
        raise CallOrderError(
            f"progressive_layer_drop(<{type(model).__name__}>): expected a model that no engine has taken yet, found "
            "one after deepspeed.initialize, whose engine would never draw for these blocks. Call it before initialize"
        )
    row = _row(model, blocks)
    taken = [number for number, block in enumerate(row) if isinstance(block, DroppableBlock)]
    if taken:
        raise ValueError(f"progressive_layer_drop: block {taken[0]} of these was given before; name each once")
    drop = LayerDrop(len(row), seed)
    for number, block in enumerate(row):
        droppable = give_base(block, DroppableBlock)
        droppable._layer_drop, droppable._number_in_row = drop, number
    return drop


def _is_trained(parameter: torch.Tensor) -> bool:
    address = address_of(parameter)
    return address is not None and address.bucket.is_trained and address.bucket.owner.reducer is not None


def rows_of(model: nn.Module) -> list[tuple[LayerDrop, list[nn.Module]]]:
    """Returns the rows of blocks of a model that may be left out, with their blocks."""
    found: dict[int, tuple[LayerDrop, dict[int, nn.Module]]] = {}
    for module in model.modules():
        if isinstance(module, DroppableBlock):
            drop = module._layer_drop
            found.setdefault(id(drop), (drop, {}))[1][module._number_in_row] = module
    return [(drop, [blocks[number] for number in sorted(blocks)]) for drop, blocks in found.values()]


def _row(model: nn.Module, blocks: str | nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(blocks, str):
        named = dict(model.named_modules())
        if blocks not in named:
            lists = [name for name, module in named.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
            found = [repr(name) if name else f"the {type(model).__name__} itself (blocks=model)" for name in lists]
            raise ValueError(
                f"progressive_layer_drop(blocks={blocks!r}): expected the name of a ModuleList or Sequential of the "
                f"model, found no module of that name. Choose from: {', '.join(found) or 'none'}"
            )
        return _row(model, named[blocks])
    row: list[nn.Module] = [*blocks.children()] if isinstance(blocks, nn.Module) else [*blocks]
    known = {id(module) for module in model.modules()}
    if not row or not all(id(block) in known for block in row) or len({id(block) for block in row}) < len(row):
        raise ValueError(
            "progressive_layer_drop(blocks=...): expected the name of a ModuleList, the ModuleList, or modules of the "
            f"model, each once; found {len(row)} module(s)"
        )
    return row


def _hidden_states(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        raise ValueError(
            f"progressive_layer_drop: {kind} was called without hidden states as its first argument or by the keyword "
            f"hidden_states (found {type(hidden).__name__}), so it cannot be left out"
        )
    return hidden


def _shown(answer: Any) -> str:
    if isinstance(answer, (tuple, list)):
        return f"a {type(answer).__name__} of {', '.join(type(part).__name__ for part in answer)}"
    return f"a {type(answer).__name__}"


class ProgressiveLayerDrop:
    """The keep ratio theta at each step: it falls from 1 towards ``theta``.

    Args:
        theta: The ratio in the end, between 0 and 1.
        gamma: How fast it falls; 100 / (total steps) is the authors' rule of thumb.

    Attributes:
        theta: As given.
        gamma: As given.
        current_theta: The ratio of the latest update; 1 before the first.
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """Returns the keyword arguments that a training forward gets."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Returns the keep ratio of the latest update."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Goes to a step: ``(1 - theta) * exp(-gamma * step) + theta``."""
        self.current_theta = float((1.0 - self.theta) * numpy.exp(-self.gamma * global_step) + self.theta)
