"""Loaders that give each rank its share of a dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed.engine.batches import Batches

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts


class EngineLoading:
    """Makes the loaders of one engine.

    Args:
        parts: Of the engine.
        batches: Its batch sizes.
        collate_fn: Gives what is used where a call names no function that makes a batch of samples.
    """

    def __init__(self, parts: EngineParts, batches: Batches, collate_fn: Callable[[], Any]) -> None:
        self._parts = parts
        self._batches = batches
        self._collate_fn = collate_fn

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Returns a loader that gives each rank its share of ``dataset``.

        With ``data_efficiency.data_sampling`` the configured sampler takes the place of any other, for training data
        (``route`` is ``train`` or ``pipeline``).
        """
        from deepspeed.data.configured import make_loader  # torch's loaders cost time that a program's own do not need

        return make_loader(
            self._parts.parsed.root,
            self._parts.coordinates,
            dataset,
            batch_size or self._batches.train_micro_batch_size_per_gpu(),
            steps=self._batches.gradient_accumulation_steps(),
            route=route,
            pin_memory=pin_memory,
            data_sampler=data_sampler,
            collate_fn=collate_fn or self._collate_fn(),
            workers=num_local_io_workers,
            on_device=self._parts.device.type != "cpu",
        )
