"""Loaders over a data set as the configuration says: shuffled, or by a curriculum."""

from __future__ import annotations

import logging
from collections.abc import Sized
from typing import Any

from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.data_efficiency import DataSampling
from deepspeed.config.sections.root import Root
from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler
from deepspeed.data.loader import DeepSpeedDataLoader, is_iterable_style_dataset, is_map_style_dataset
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist


def make_loader(
    root: Root,
    ranks: RankCoordinates,
    dataset: Any,
    batch_size: int,
    *,
    steps: int,
    route: str,
    pin_memory: bool,
    data_sampler: Any,
    collate_fn: Any,
    workers: int | None,
    on_device: bool,
) -> DeepSpeedDataLoader:
    """Makes a loader that gives each rank its share of ``dataset``.

    Args:
        root: The configuration.
        ranks: Where this rank stands.
        dataset: Any data set of torch.
        batch_size: Samples of a micro-batch on a rank.
        steps: Micro-batches of an update.
        route: ``train`` and ``pipeline`` take the configured sampler; ``train`` shuffles without one.
        pin_memory: Keep batches in pinned memory, where ``on_device``.
        data_sampler: Sampler of the caller, or None.
        collate_fn: Makes a batch of samples; None: torch's.
        workers: Processes that load; None: the configured number.
        on_device: The model computes on a device.

    Raises:
        DeepSpeedConfigError: The configured sampler needs numbered samples, or ``dataset`` is no data set.
    """
    if not is_iterable_style_dataset(dataset) and not hasattr(dataset, "__getitem__"):
        raise DeepSpeedConfigError(
            "training_data (or deepspeed_io(dataset)): expected a data set with __getitem__ and __len__, or an "
            f"IterableDataset; found {type(dataset).__name__}. Of a loader give its dataset, or leave training_data "
            "out and set engine.training_dataloader to the loader"
        )
    sampling = _sampling_of(root) if route in ("train", "pipeline") else None
    if sampling is not None and not sampling.dynamic_batching.enabled:
        data_sampler = _configured_sampler(root, ranks, dataset, batch_size, steps)
        pin_memory = sampling.pin_memory
        workers = workers or sampling.num_workers
    loader = DeepSpeedDataLoader(
        dataset=dataset,
        batch_size=batch_size,
        pin_memory=pin_memory and on_device,
        data_sampler=data_sampler,
        collate_fn=collate_fn,
        num_local_io_workers=workers,
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


def _sampling_of(root: Root) -> DataSampling | None:
    """Returns ``data_efficiency.data_sampling``, if it is on."""
    section = root.data_efficiency
    return section.data_sampling if section is not None and section.enabled and section.data_sampling.enabled else None


def _configured_sampler(root: Root, ranks: RankCoordinates, dataset: Any, batch_size: int, steps: int) -> Any:
    assert root.data_efficiency is not None
    if not is_map_style_dataset(dataset):
        raise DeepSpeedConfigError(
            f"data_efficiency.data_sampling chooses samples by number, and {type(dataset).__name__} has none; give "
            "a dataset with __getitem__ and __len__, or switch data_sampling off"
        )
    return DeepSpeedDataSampler(
        root.data_efficiency,
        one_epoch_total_samples=len(dataset),
        micro_batch_size=batch_size,
        data_parallel_rank=ranks.data_rank,
        data_parallel_size=ranks.data_size,
        gradient_accumulation_steps=steps,
        drop_last=root.dataloader_drop_last,
    )
