"""Skips random layers in training forwards, the same ones on all ranks (arXiv:2010.13369).

The keep ratio theta is a function of the step (:class:`ProgressiveLayerDrop`). Block *i* of *L*, counted from 0, is
kept with probability ``1 - i / L * (1 - theta)``. A skipped block is the identity. The residual that a kept block adds
to its input is divided by that probability, so the expected output is that of the block. In evaluation no block is
skipped or scaled.
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
    """Draws which of a sequence of consecutive blocks a forward skips.

    Attributes:
        dropped: Numbers of the blocks that are skipped until the next draw.
        kept_share: The probability of each block to be kept.
    """

    def __init__(self, num_blocks: int, seed: int = 0) -> None:
        self.num_blocks = num_blocks
        self._seed = seed
        self._skips_as: type | int | None = None  # output of a kept block: a tensor, or a tuple of this many values
        self.keep_all()

    def keep_all(self) -> None:
        """Keeps every block, unscaled."""
        self.dropped: frozenset[int] = frozenset()
        self.kept_share = [1.0] * self.num_blocks

    def draw(self, theta: float, *moment: int) -> frozenset[int]:
        """Draws and returns the skipped blocks by a keep ratio of 0 to 1. Equal seeds and arguments give equal draws.

        ``moment`` identifies the forward (the step, the micro-batch) and is equal on all ranks.
        """
        self.kept_share = [1 - i / self.num_blocks * (1 - theta) for i in range(self.num_blocks)]
        uniform = numpy.random.default_rng([self._seed, *moment]).random(self.num_blocks)
        self.dropped = frozenset(i for i, share in enumerate(self.kept_share) if uniform[i] >= share)
        return self.dropped

    def record_output(self, output: Any) -> None:
        """Records the form of a kept block's output; ValueError unless hidden states, alone or with None."""
        if isinstance(output, torch.Tensor):
            self._skips_as = torch.Tensor
        elif isinstance(output, tuple) and output and all(part is None for part in output[1:]):
            self._skips_as = len(output)
        else:
            raise ValueError(
                "progressive_layer_drop: expected a block to return its hidden states, alone or in a tuple with None "
                f"for the rest, found {_shown(output)}; a dropped block returns only its input. Drop layers in the "
                "model's own forward instead, which gets pld_theta from the engine"
            )

    def skipped(self, hidden: torch.Tensor) -> Any:
        """Returns ``hidden``, of any shape, as a skipped block does, with None for further outputs of a kept block."""
        # Block 0 is always kept, so the form is known, unless a model runs a later block first; then it is a tensor.
        return (hidden, *[None] * (self._skips_as - 1)) if isinstance(self._skips_as, int) else hidden


class DroppableBlock(nn.Module):
    """Base class inserted before the class of each block; skips the block and its hooks if the draw says so."""

    _layer_drop: LayerDrop
    _block_number: int

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the block's output, scaled if needed, or that of a skipped block."""
        drop, number = self._layer_drop, self._block_number
        share = drop.kept_share[number]
        if share == 1.0 or not self.training:
            output = super().__call__(*args, **kwargs)
            if self.training:
                drop.record_output(output)
            return output
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, torch.Tensor):
            raise ValueError(
                f"progressive_layer_drop: {type(self).__name__} was called without hidden states as its first argument "
                f"or by the keyword hidden_states (found {type(hidden).__name__}), so it cannot be skipped; pass them"
            )
        if number in drop.dropped:
            return drop.skipped(hidden)
        output = super().__call__(*args, **kwargs)
        drop.record_output(output)
        if isinstance(output, torch.Tensor):
            return hidden + (output - hidden) / share
        return (hidden + (output[0] - hidden) / share, *output[1:])


def progressive_layer_drop(
    model: nn.Module, blocks: str | nn.Module | Sequence[nn.Module], *, seed: int = 0
) -> LayerDrop:
    """Lets training forwards of ``model`` skip blocks, as the section ``progressive_layer_drop`` configures.

    Call it before ``deepspeed.initialize``. The engine draws for every training forward from its counters of steps and
    micro-steps, so all ranks skip the same blocks, and a resumed run skips those that an uninterrupted run skips. At
    ZeRO stage 3 the parameters of skipped blocks are not gathered. Names of parameters and checkpoints do not change,
    and each block stays an instance of its class.

    Returns the object that draws. Programs without an engine call its ``draw(theta, step)`` before each forward.

    Args:
        blocks: The blocks in order: the name of a ``ModuleList`` or ``Sequential`` of the model, that module, or a list
            of modules. A block takes hidden states of any shape as its first argument and returns hidden states of that
            shape, alone or as the first of a tuple whose other values are None.

    Raises:
        ValueError: There are no such blocks, or some were passed to this function before.
        CallOrderError: An engine trains the model already.
    """
    buckets = [address.bucket for p in model.parameters() if (address := address_of(p)) is not None]
    if any(bucket.is_trained and bucket.owner.reducer is not None for bucket in buckets):
        raise CallOrderError(
            f"progressive_layer_drop(<{type(model).__name__}>): expected a model that no engine has taken yet, found "
            "one after deepspeed.initialize, whose engine would never draw for these blocks. Call it before initialize"
        )
    members = _list_blocks(model, blocks)
    taken = [number for number, block in enumerate(members) if isinstance(block, DroppableBlock)]
    if taken:
        raise ValueError(
            f"progressive_layer_drop(blocks=...): block {taken[0]} was passed in an earlier call; pass each block once"
        )
    drop = LayerDrop(len(members), seed)
    for number, block in enumerate(members):
        droppable = give_base(block, DroppableBlock)
        droppable._layer_drop, droppable._block_number = drop, number
    return drop


def droppable_blocks(model: nn.Module) -> list[tuple[LayerDrop, list[nn.Module]]]:
    """Returns the sequences of blocks that may be skipped: the object that draws for each, and its blocks in order."""
    found: dict[int, tuple[LayerDrop, dict[int, nn.Module]]] = {}
    for module in model.modules():
        if isinstance(module, DroppableBlock):
            drop = module._layer_drop
            found.setdefault(id(drop), (drop, {}))[1][module._block_number] = module
    return [(drop, [blocks[number] for number in sorted(blocks)]) for drop, blocks in found.values()]


def _list_blocks(model: nn.Module, blocks: str | nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    if isinstance(blocks, str):
        named = dict(model.named_modules())
        if blocks not in named:
            lists = [name for name, module in named.items() if isinstance(module, (nn.ModuleList, nn.Sequential))]
            found = [repr(name) if name else f"the {type(model).__name__} itself (blocks=model)" for name in lists]
            raise ValueError(
                f"progressive_layer_drop(blocks={blocks!r}): expected the name of a ModuleList or Sequential of the "
                f"model, found no module of that name. Choose from: {', '.join(found) or 'none'}"
            )
        return _list_blocks(model, named[blocks])
    members: list[nn.Module] = [*blocks.children()] if isinstance(blocks, nn.Module) else [*blocks]
    known = {id(module) for module in model.modules()}
    if (
        not members
        or not all(id(block) in known for block in members)
        or len({id(block) for block in members}) < len(members)
    ):
        raise ValueError(
            "progressive_layer_drop(blocks=...): expected the name of a ModuleList, the ModuleList, or modules of the "
            f"model, each once; found {len(members)} module(s)"
        )
    return members


def _shown(output: Any) -> str:
    if isinstance(output, (tuple, list)):
        return f"a {type(output).__name__} of {', '.join(type(part).__name__ for part in output)}"
    return f"a {type(output).__name__}"


class ProgressiveLayerDrop:
    """The keep ratio theta at each step: it falls from 1 towards ``theta``.

    Args:
        gamma: Rate of the exponential decay; the authors suggest 100 / (total steps).
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta  # the final ratio
        self.gamma = gamma  # rate of the exponential decay
        self.current_theta = 1.0  # the ratio set by the latest :meth:`update_state`; 1 before the first call

    def get_state(self) -> dict[str, Any]:
        """Returns the keyword arguments for a training forward."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def get_theta(self) -> float:
        """Returns ``current_theta``."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Sets the keep ratio of a step: ``(1 - theta) * exp(-gamma * step) + theta``."""
        self.current_theta = float((1.0 - self.theta) * numpy.exp(-self.gamma * global_step) + self.theta)
