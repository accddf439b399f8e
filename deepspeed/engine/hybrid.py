"""The engine that generates between its training steps, for reinforcement learning."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from deepspeed.engine.adapters import merged
from deepspeed.engine.engine import DeepSpeedEngine
from deepspeed.engine.generation import with_cache
from deepspeed.engine.parts import EngineParts
from deepspeed.errors import CallOrderError
from deepspeed.logging import log_dist
from deepspeed.zero.access.gathered import GatheredParameters


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """A training engine with :meth:`generate`. Made by ``deepspeed.initialize`` where ``hybrid_engine.enabled``.

    At stage 3 with ``pin_parameters`` every rank holds the whole model, in the dtype it computes in, while it
    generates, and ranks may stop at different lengths. Without it layers are gathered one by one for every token, and
    ranks that are done go on until all are. ``module.generate`` is :meth:`generate` too.
    """

    def __init__(self, parts: EngineParts) -> None:
        super().__init__(parts)
        section = parts.parsed.root.hybrid_engine
        assert section is not None, "its enabled chose this class"
        self._is_sharded = any(bucket.is_sharded for bucket in parts.runtime.buckets)
        self._pins = section.pin_parameters and self._is_sharded
        self._generate = self.module.generate
        self._fused = ExitStack()
        self.module.generate = self.generate  # type: ignore[assignment]
        for name, why in _POINTLESS.items():
            if name in section.model_fields_set:
                log_dist(f"hybrid_engine.{name} has no effect: {why}")

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``generate`` with the weights as they are now. Every rank must call it.

        Args:
            *args: Positional arguments of the model's ``generate``.
            **kwargs: Keyword arguments of the model's ``generate``.

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
            else:
                kwargs.setdefault("synced_gpus", self.world_size > 1)
            return self._generate(*args, **with_cache(kwargs))  # type: ignore[operator]

    def fuse_lora_weight(self) -> None:
        """Adds adapters to their base weights until :meth:`unfuse_lora_weight`.

        Raises:
            CallOrderError: Parameters are sharded; :meth:`generate` merges by itself where they are gathered.
        """
        if self._is_sharded:
            raise CallOrderError(
                "engine.fuse_lora_weight: parameters are sharded between uses; engine.generate merges adapters itself"
            )
        self._fused.enter_context(merged(self.module))

    def unfuse_lora_weight(self) -> None:
        """Undoes :meth:`fuse_lora_weight`, bit for bit."""
        self._fused.close()

    def destroy(self) -> None:
        """Releases what the engine holds and gives the model its own ``generate`` back."""
        self.module.__dict__.pop("generate", None)
        super().destroy()


_POINTLESS = {
    "max_out_tokens": "the model's own cache grows as far as generate asks",
    "release_inference_cache": "the model's own cache ends with generate",
    "tp_gather_partition_size": "parameters are gathered by buckets",
    "enable_cuda_graph": "the model's own generate runs; compile it with cache_implementation='static'",
}
