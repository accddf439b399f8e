"""Loaders that give each rank its share of a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from deepspeed.engine.batches import Batches
from deepspeed.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.engine.build import EngineParts


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
        """A loader that gives each rank its share of ``dataset``."""
        from deepspeed.data import DeepSpeedDataLoader

        ranks = self._parts.standing
        root = self._parts.parsed.root
        loader = DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size or self._batches.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory and self._parts.device.type != "cpu",
            data_sampler=data_sampler,
            collate_fn=collate_fn or self._collate_fn(),
            num_local_io_workers=num_local_io_workers,
            data_parallel_rank=ranks.data_rank,
            data_parallel_world_size=ranks.data_size,
            drop_last=root.dataloader_drop_last,
            shuffle=route == "train",
        )
        if isinstance(dataset, Sized) and len(loader) == 0:
            log_dist(
                f"the data loader gives no batch: the dataset has {len(dataset)} sample(s) for {ranks.data_size} "
                f"rank(s) with batches of {loader.batch_size}"
                + (", and dataloader_drop_last leaves out what does not fill one" if len(dataset) else ""),
                level=logging.WARNING,
            )
        return loader
