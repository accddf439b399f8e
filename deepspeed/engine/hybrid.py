"""The engine that generates between its training steps, for reinforcement learning: prompts in, responses out.

While it generates, low-rank adapters are merged into their base weights; afterwards the base is restored bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.generation import takes_synced_gpus, with_cache
from deepspeed.engine.parts import EngineParts
from deepspeed.errors import CallOrderError
from deepspeed.zero.access.gathered import GatheredParameters


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """A training engine with :meth:`generate`. Made by ``deepspeed.initialize`` where ``hybrid_engine.enabled``.

    At stage 3 with ``pin_parameters`` every rank holds the whole model, in the dtype it computes in, while it
    generates, and ranks may stop at different lengths. Without it layers are gathered one by one for every token, and
    ranks that are done continue until all are. ``module.generate`` is :meth:`generate` too.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        section = parts.parsed.root.hybrid_engine
        assert section is not None, "its enabled chose this class"
        self._is_sharded = any(bucket.is_sharded for bucket in parts.runtime.buckets)
        self._pins = section.pin_parameters and self._is_sharded
        self._generate = self.module.generate
        self._own_generate = self.module.__dict__.get("generate")
        self._fused = ExitStack()
        self.module.generate = self.generate  # type: ignore[assignment]

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model's own ``generate`` with the present weights. Every rank must call it.

        Raises:
            CallOrderError: A backward is running.
        """
        self._runtime.leave_backward("engine.generate")
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._pins:
                stack.enter_context(GatheredParameters(list(self.module.parameters())))
            if self._pins or not self._is_sharded:
                stack.enter_context(merged(self.module))
            elif takes_synced_gpus(self._generate):
                kwargs.setdefault("synced_gpus", self.world_size > 1)
            return self._generate(*args, **with_cache(kwargs))  # type: ignore[operator]

    def fuse_lora_weight(self) -> None:
        """Adds adapters to their base weights until :meth:`unfuse_lora_weight`.

        Raises:
            CallOrderError: Parameters are sharded; :meth:`generate` merges by itself where they are gathered.
        """
        if self._is_sharded:
            raise CallOrderError(
                "engine.fuse_lora_weight: parameters are sharded between uses; leave the call out, as engine.generate "
                "merges adapters itself"
            )
        self._fused.enter_context(merged(self.module))

    def unfuse_lora_weight(self) -> None:
        """Undoes :meth:`fuse_lora_weight`, bit for bit."""
        self._fused.close()

    def destroy(self) -> None:
        """Releases what the engine holds and gives the model its own ``generate`` back."""
        if self.module.__dict__.get("generate") == self.generate:
            del self.module.generate
            if self._own_generate is not None:
                self.module.generate = self._own_generate
        super().destroy()


@contextmanager
def merged(model: nn.Module) -> Iterator[int]:
    """Merges the adapters of ``model`` into the base weights inside the context. Weights must be gathered.

    Known are PEFT's LoRA layers, and layers with ``lora_right_weight``, ``lora_left_weight``, ``lora_scaling`` and a
    flag ``fuse_lora``, as programs for RLHF have them. A copy of each base weight is kept meanwhile, since subtracting
    the adapter would round.

    Yields:
        The number of layers that were merged.
    """
    # Writes through .data: the engine would take others for changes of the program, and warn that they are lost.
    kept: list[tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]] = []
    try:
        with torch.no_grad():
            for module in model.modules():
                base = _base_of(module)
                if base:
                    kept.append((module, [(one, one.data, one.detach().clone()) for one in base]))
                    _merge(module)
        yield len(kept)
    finally:
        with torch.no_grad():
            for module, values in reversed(kept):  # layers may share a weight
                _part(module)
                for parameter, data, before in values:
                    data.copy_(before)
                    if parameter.data_ptr() != data.data_ptr():  # PEFT's DoRA gives it another tensor
                        parameter.data = data


def _base_of(module: Any) -> list[torch.Tensor]:
    """Returns the weight that a layer's adapter is added to, and its bias: PEFT's ``lora_bias`` changes that too.

    Empty without an adapter, or if it is merged already.
    """
    if hasattr(module, "lora_right_weight") and hasattr(module, "fuse_lora"):
        return [] if module.fuse_lora else [module.weight]
    if hasattr(module, "lora_A") and callable(getattr(module, "unmerge", None)):
        return [] if module.merged or module.disable_adapters else list(module.get_base_layer().parameters())
    return []


def _merge(module: Any) -> None:
    if hasattr(module, "fuse_lora"):
        change = module.lora_left_weight.t() @ module.lora_right_weight.t()
        module.weight.data.add_(change, alpha=module.lora_scaling)
        module.fuse_lora = True
    else:
        module.merge()


def _part(module: Any) -> None:
    if hasattr(module, "fuse_lora"):
        module.fuse_lora = False
    else:
        module.unmerge()
