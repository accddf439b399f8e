"""Chooses what blocks recompute in backward, from the memory that the first update leaves.

The first update recomputes whole blocks, which needs the least memory, but for one block: its first forward runs as
without recomputation, and what it keeps is counted. After the update all states exist and the peak is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.devices import in_words
from deepspeed.engine_feature import EngineHooks
from deepspeed.logging import log_dist
from deepspeed.nested import tensors_of

SPARE = 0.1
"""Share of a device's memory that a choice leaves: for fragments, and for batches larger than the first."""


@dataclass(frozen=True)
class SavedMemory:
    """Bytes that a call of a block keeps for backward, beside parameters, by what backward recomputes."""

    none: int
    selective: int
    full: int


class SavedCounter(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside the context create and that are alive at its end.

    Args:
        kept: Operations whose results selective recomputation keeps.
    """

    def __init__(self, kept: frozenset[Any]) -> None:
        super().__init__()
        self._kept = kept
        self._made: list[weakref.ref[torch.UntypedStorage]] = []
        self._kept_bytes = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self._made += [weakref.ref(tensor.untyped_storage()) for tensor in tensors_of(found)]
        if func in self._kept:  # recomputation keeps them whether or not autograd would
            self._kept_bytes += sum(tensor.nbytes for tensor in tensors_of(found))
        return found

    def count(self, block: nn.Module, outputs: Any) -> SavedMemory:
        """Returns the bytes that a call of a block keeps for backward; ``outputs`` are its result."""
        states = [*block.parameters(), *block.buffers()]
        others = {id(tensor.untyped_storage()) for tensor in states}
        left = {id(tensor.untyped_storage()) for tensor in tensors_of(outputs)}
        alive: dict[int, int] = {}
        for reference in self._made:
            storage = reference()
            if storage is not None and id(storage) not in others:
                alive[id(storage)] = storage.nbytes()
        full = sum(alive[number] for number in alive if number in left)
        return SavedMemory(none=sum(alive.values()), selective=full + self._kept_bytes, full=full)


class RecomputationChoice(EngineHooks):
    """Chooses what blocks recompute once the first update has run. Every rank has one, and all choose the same.

    Args:
        blocks: The repeated blocks, which are recomputed now.
        recompute: Switches the recomputation of one of them on or off.
        kept: Operations whose results selective recomputation keeps.
        apply: Applies ``none``, ``selective`` or ``full`` to all blocks.
        greatest: Returns the greatest of each of some numbers over the ranks; all call it.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        recompute: Callable[[nn.Module, bool], None],
        kept: frozenset[Any],
        apply: Callable[[str], None],
        greatest: Callable[[list[int]], list[int]],
    ) -> None:
        self._count, self._apply, self._greatest = len(blocks), apply, greatest
        self._saved: SavedMemory | None = None
        self._counter = SavedCounter(kept)
        self._recompute = recompute
        block = blocks[len(blocks) // 2]  # the first ones may differ: dense blocks before those with experts
        self._hooks = [
            block.register_forward_pre_hook(self._begin),
            block.register_forward_hook(self._end, always_call=True),
        ]
        recompute(block, False)
        get_accelerator().reset_peak_memory_stats()
        self._is_counting = False

    def _begin(self, block: nn.Module, inputs: Any) -> None:
        if block.training and torch.is_grad_enabled() and self._saved is None:
            self._is_counting = True
            self._counter.__enter__()

    def _end(self, block: nn.Module, inputs: Any, outputs: Any) -> None:
        if not self._is_counting:
            return
        self._is_counting = False
        self._counter.__exit__(None, None, None)
        if outputs is not None:  # the forward has not failed
            self._saved = self._counter.count(block, outputs)
            self._recompute(block, True)

    @override
    def after_step(self, global_steps: int) -> None:
        if not self._hooks or self._saved is None:
            return
        self.close()
        device, saved = get_accelerator(), self._saved
        peak, less, *numbers = self._greatest(
            [device.max_memory_allocated(), -device.total_memory(), saved.none, saved.selective, saved.full]
        )
        spare, saved = int(-less * (1 - SPARE)) - peak, SavedMemory(*numbers)
        more = {name: self._count * (getattr(saved, name) - saved.full) for name in ("none", "selective", "full")}
        chosen = next(name for name, nbytes in more.items() if nbytes <= spare or name == "full")
        self._apply(chosen)
        log_dist(
            f"activation_checkpointing.blocks: {chosen} of auto. {self._count} blocks keep {in_words(more['none'])} "
            f"more without recomputation than with it, {in_words(more['selective'])} more with selective, and "
            f"{in_words(max(spare, 0))} remain: {1 - SPARE:.0%} of {in_words(-less)} less a peak of {in_words(peak)}"
        )

    @override
    def close(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()
