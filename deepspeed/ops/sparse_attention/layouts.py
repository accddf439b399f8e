"""The layouts and plans of one pattern, for every length that comes along."""

from __future__ import annotations

import random

import torch

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.job.job import Job
from deepspeed.ops.sparse_attention.plan import LayoutPlan, compile_layout
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig

#: Lengths whose layouts are kept; a model that generates sees a new one every few tokens.
_KEPT = 16


class Layouts:
    """Compiled layouts by length and device, kept by each user of the pattern: never shared between two patterns.

    Args:
        config: The pattern.
        seed: Of random blocks, so that all ranks and all runs draw the same without telling each other. None: they are
            drawn from Python's ``random`` as it is, and all ranks take rank 0's.
    """

    def __init__(self, config: SparsityConfig, seed: int | None = None) -> None:
        self.config = config
        self._seed = seed
        self._layouts: dict[int, torch.Tensor] = {}
        self._plans: dict[tuple[int, torch.device], LayoutPlan] = {}

    def layout(self, length: int) -> torch.Tensor:
        """The pattern's layout for ``length`` tokens, the same on all ranks; without a seed all must ask for it."""
        if length not in self._layouts:
            if len(self._layouts) == _KEPT:
                oldest = next(iter(self._layouts))
                del self._layouts[oldest]
                self._plans = {key: plan for key, plan in self._plans.items() if key[0] != oldest}
            self._layouts[length] = self._make(length)
        return self._layouts[length]

    def plan(self, length: int, device: torch.device) -> LayoutPlan:
        """Returns the compiled layout for ``length`` tokens with its indices on ``device``."""
        layout = self.layout(length)
        key = (length, device)
        if key not in self._plans:
            self._plans[key] = compile_layout(layout, self.config.block).to(device)
        return self._plans[key]

    def _make(self, length: int) -> torch.Tensor:
        if self._seed is None:
            return same_on_all_ranks(self.config.make_layout(length))
        state = random.getstate()
        random.seed(self._seed)
        try:
            return self.config.make_layout(length)
        finally:
            random.setstate(state)


def same_on_all_ranks(layout: torch.Tensor) -> torch.Tensor:
    """Returns rank 0's layout ``[heads, blocks, blocks]``, which may have random blocks in it.

    Every rank must call it.
    """
    if not comm.is_initialized() or comm.get_world_size() == 1:
        return layout
    takes_host = "gloo" in str(comm.get_backend())
    carried = layout.to("cpu" if takes_host else get_accelerator().current_device_name())
    Job.current().axis_of().transport("layers", device=carried.device).broadcast(carried, 0, label="a sparse layout")
    return carried.to(layout.device)
