"""Loaders that give each rank its share of a dataset."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sized
from logging import WARNING
from typing import TYPE_CHECKING, Any

from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config.sections.data_efficiency import DataSampling
from deepspeed.config.sections.root import Root
from deepspeed.engine.batches import Batches
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

if TYPE_CHECKING:
    from deepspeed.data.loader import DeepSpeedDataLoader
    from deepspeed.engine.parts import EngineParts

# Importing torch's loaders takes time; programs with a loader of their own need none, so the import is deferred.

_ACCELERATE = "accelerate.data_loader"  # its stateful loaders resume with wrong samples unless they are patched


class EngineLoading:
    """Makes the loaders of one engine."""

    def __init__(self, parts: EngineParts, batches: Batches, collate_fn: Callable[[], Any]) -> None:
        self._parts = parts
        self._batches = batches
        self._collate_fn = collate_fn
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders of training data
        self._resumed_at = 0
        if _ACCELERATE in sys.modules:
            from deepspeed.data.accelerate_loaders import patch_accelerate

            patch_accelerate()

    def resume(self, step: int, restored: Any) -> None:
        """Records that a checkpoint was loaded, and warns of training data that start from the beginning."""
        self._resumed_at = 0 if restored is not None else step
        if restored is None and self._made:
            self._warn(step, "a loader that deepspeed_io made is")

    def _warn(self, step: int, subject: str) -> None:
        log_dist(
            f"load_checkpoint at step {step}: {subject} not engine.training_dataloader. A checkpoint has only the "
            "position of that loader, so the data start from the beginning. Give initialize(training_data=...), or "
            "assign engine.training_dataloader = engine.deepspeed_io(dataset) before the first step and "
            "load_checkpoint",
            level=WARNING,
        )

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
        (``route`` is ``train`` or ``pipeline``). A checkpoint has the position of ``engine.training_dataloader`` alone:
        assign the loader there before the first step and before ``load_checkpoint``.
        """
        made = make_loader(
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
        if route in ("train", "pipeline"):
            self._made.add(made)
            if self._resumed_at:
                self._warn(self._resumed_at, "a loader of deepspeed_io made after it is")
        return made


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
        route: ``train`` and ``pipeline`` take the configured sampler; ``train`` shuffles without one.
        pin_memory: Keep batches in pinned memory, where ``on_device``.
        workers: Processes that load; None: the configured number.

    Raises:
        DeepSpeedConfigError: The configured sampler needs numbered samples, or ``dataset`` is no data set.
    """
    from deepspeed.data.loader import DeepSpeedDataLoader, is_iterable_style_dataset
    from deepspeed.data.seeding import LOADER_SEED

    if not is_iterable_style_dataset(dataset) and not hasattr(dataset, "__getitem__"):
        raise DeepSpeedConfigError(
            "training_data (or deepspeed_io(dataset)): expected a data set with __getitem__ and __len__, or "
            f"an IterableDataset; found {type(dataset).__name__}. For a loader, give its dataset, or leave "
            "training_data out and set engine.training_dataloader to the loader"
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
        seed=LOADER_SEED if root.deterministic else None,
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
    from deepspeed.data.curriculum.sampler import DeepSpeedDataSampler
    from deepspeed.data.loader import is_map_style_dataset

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
