"""Loaders that give each rank its share of a dataset."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from typing import TYPE_CHECKING, Any

from deepspeed.config.sections.data_efficiency import DataSampling
from deepspeed.config.sections.root import Root
from deepspeed.engine.batches import Batches
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.engine.parts import EngineParts


def sampling_of(root: Root) -> DataSampling | None:
    """``data_efficiency.data_sampling``, if it is on."""
    section = root.data_efficiency
    return section.data_sampling if section is not None and section.enabled and section.data_sampling.enabled else None


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
        """A loader that gives each rank its share of ``dataset``.

        With ``data_efficiency.data_sampling`` the configured sampler takes the place of any other, for training data
        (``route`` is ``train`` or ``pipeline``).
        """
        from deepspeed.data import DeepSpeedDataLoader

        ranks = self._parts.standing
        root = self._parts.parsed.root
        sampling = sampling_of(root) if route in ("train", "pipeline") else None
        if sampling is not None and not sampling.dynamic_batching.enabled:
            data_sampler = self._configured_sampler(dataset, batch_size)
            pin_memory = sampling.pin_memory
            num_local_io_workers = num_local_io_workers or sampling.num_workers
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

    def _configured_sampler(self, dataset: Any, batch_size: int | None) -> Any:
        from deepspeed.data.curriculum import DeepSpeedDataSampler
        from deepspeed.data.loader import is_map_style_dataset

        ranks, root = self._parts.standing, self._parts.parsed.root
        assert root.data_efficiency is not None
        if not is_map_style_dataset(dataset):
            raise DeepSpeedConfigError(
                f"data_efficiency.data_sampling chooses samples by number, and {type(dataset).__name__} has none; give "
                "a dataset with __getitem__ and __len__, or switch data_sampling off"
            )
        return DeepSpeedDataSampler(
            root.data_efficiency,
            one_epoch_total_samples=len(dataset),
            micro_batch_size=batch_size or self._batches.train_micro_batch_size_per_gpu(),
            data_parallel_rank=ranks.data_rank,
            data_parallel_size=ranks.data_size,
            gradient_accumulation_steps=self._batches.gradient_accumulation_steps(),
            drop_last=root.dataloader_drop_last,
        )
