"""Makes the loader and the learning rate schedule of ``data_sampling.dynamic_batching``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import BatchSampler, Dataset

from deepspeed import comm
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.config.sections.data_efficiency import DynamicBatching
from deepspeed.data.analysis.analyzer import DistributedDataAnalyzer
from deepspeed.data.batching.packing import batch_by_seqlens, scale_lr
from deepspeed.data.indexed.dataset import MMapIndexedDataset
from deepspeed.data.loader import DeepSpeedDataLoader
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.schedulers.base import get_torch_optimizer, update_lr

_METRIC = "seqlen"


class _ListedBatches(BatchSampler):
    def __init__(self, micro_batches: Sequence[list[Any]]) -> None:
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._micro_batches)

    def __len__(self) -> int:
        return len(self._micro_batches)


class _PaddedDataset(Dataset[Any]):
    """Pads samples; an index is a pair of sample and length."""

    def __init__(self, dataset: Any, pad: Callable[[Any, int], Any]) -> None:
        self._dataset, self._pad = dataset, pad

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: tuple[int, int]) -> Any:
        number, length = index
        return self._pad(self._dataset[number], length)


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Callable[[list[Any]], Any] | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DeepSpeedDataLoader, VariableBatchSizeLR, dict[str, Any]]:
    """Returns a loader of micro-batches of at most ``max_tokens`` tokens, a schedule of rates, and its arguments.

    Every rank must call it. Micro-batches of one update differ in size; their gradients have equal weight, and the rate
    is scaled by the samples of the update relative to ``engine.train_batch_size()``.

    Args:
        engine: An engine with ``data_efficiency.data_sampling.dynamic_batching`` enabled.
        dataset_seqlens: Tokens of each sample; None: read from the files below ``metrics_path``, which are created if
            missing.
        dataset_filter_ids: Use only these samples; ``dataset_seqlens`` are then theirs, in this order.
        sample_padding_fn: Called with a sample and the largest length in its update; returns the padded sample.
        batch_seqlens_fn: Returns the lengths of the samples in a batch, for the analysis; None: ``len`` of each sample.

    Raises:
        DeepSpeedConfigError: The section is not enabled, or the lengths are missing or those of another dataset.
        ValueError: No batch can be made of these lengths.
    """
    section, seed = _settings(engine)
    if dataset_seqlens is None:
        lengths = _read_lengths(dataset, section, batch_seqlens_fn)
        dataset_seqlens = lengths if dataset_filter_ids is None else [lengths[number] for number in dataset_filter_ids]
    ranks, rank = engine.dp_world_size, engine.get_data_parallel_rank()
    assert section.max_tokens is not None
    micro_batches, sizes, longest = batch_by_seqlens(
        dataset_seqlens,
        section.max_tokens,
        dataset_filter_ids,
        min_batch_size=section.min_batch_size,
        max_batch_size=section.max_batch_size,
        sequence_picking_order=section.sequence_picking_order,
        effective_batch_size=ranks * engine.gradient_accumulation_steps(),
        required_microbatches_of_same_size=hasattr(engine, "train_batch"),
        verbose=section.verbose,
        seed=seed,
    )
    own = micro_batches[rank::ranks]
    if sample_padding_fn is not None:
        dataset = _PaddedDataset(dataset, sample_padding_fn)
        sampler = _ListedBatches([[(number, longest[batch]) for number in samples] for batch, samples in own])
    else:
        sampler = _ListedBatches([samples for _, samples in own])
    arguments: dict[str, Any] = {
        "dataset": dataset,
        "batch_size": max(len(samples) for _, samples in own),
        "data_sampler": sampler,
        "collate_fn": dataloader_collate_fn or engine.collate_fn,
    }
    loader = DeepSpeedDataLoader(**arguments)
    rates = engine.lr_scheduler if engine.lr_scheduler is not None else engine.basic_optimizer
    scheduler = VariableBatchSizeLR(rates, engine.train_batch_size(), sizes, loader, section.lr_scaling_method)
    return loader, scheduler, arguments


def _settings(engine: Any) -> tuple[DynamicBatching, int]:
    section = engine.data_efficiency_config()
    if section is None or not section.packs_tokens:
        raise DeepSpeedConfigError(
            "data_efficiency.data_sampling.dynamic_batching: expected the section to be enabled; set enabled in "
            "data_efficiency and in dynamic_batching"
        )
    return section.data_sampling.dynamic_batching, section.seed


def _read_lengths(dataset: Any, section: DynamicBatching, batch_seqlens_fn: Callable[[Any], Any] | None) -> list[int]:
    if section.metrics_path is None:
        raise DeepSpeedConfigError(
            "data_efficiency.data_sampling.dynamic_batching.metrics_path: expected a folder, as dataset_seqlens is not "
            "given; set it: lengths are measured once, and written there"
        )
    prefix = Path(section.metrics_path) / _METRIC / f"{_METRIC}_sample_to_metric"
    if not any(_of_rank_0(lambda: [MMapIndexedDataset.exists(prefix)])):
        DistributedDataAnalyzer(
            dataset,
            metric_names=[_METRIC],
            metric_functions=[batch_seqlens_fn or (lambda samples: numpy.array(list(map(len, samples))))],
            metric_types=["single_value_per_sample"],
            save_path=section.metrics_path,
            collate_fn=None if batch_seqlens_fn is not None else list,
        ).run_map_reduce()
    lengths = _of_rank_0(lambda: [int(length) for length in MMapIndexedDataset(prefix).values])
    if len(lengths) != len(dataset):
        raise DeepSpeedConfigError(
            f"{prefix}: expected the lengths of {len(dataset)} samples, found {len(lengths)}; remove the file, or set "
            "metrics_path to another folder"
        )
    return lengths


def _of_rank_0(read: Callable[[], Sequence[int]]) -> list[int]:
    """Returns on every rank what ``read`` returns on rank 0; DeepSpeedConfigError where ``read`` failed there."""
    if not comm.is_initialized():
        return list(read())
    numbers, failure = torch.empty(0, dtype=torch.int64), None
    if comm.get_rank() == 0:
        try:
            numbers = torch.tensor(read(), dtype=torch.int64)
        except Exception as error:  # the other ranks wait for the outcome
            failure = error
    label = "the lengths of the samples"
    ranks = axis_of(None).objects(patience=comm.default_timeout(), why=label)
    words = None if failure is None else f"{type(failure).__name__}: {failure}"
    count, words = gather_objects(ranks, (numbers.numel(), words), label=label)[0]
    if failure is not None:
        raise failure
    if words is not None:
        raise DeepSpeedConfigError(
            "data_efficiency.data_sampling.dynamic_batching.metrics_path: rank 0 cannot read the lengths: "
            f"{words}; correct the cause, or set another folder"
        )
    numbers = numbers if comm.get_rank() == 0 else numbers.new_empty(count)
    ranks.broadcast(numbers, 0, label=label)
    return numbers.tolist()


class VariableBatchSizeLR:
    """Scales the rates of another schedule, or of an optimizer, by the size of the next batch; sizes repeat.

    Args:
        base_batch_size: Number of samples at which the rates are not scaled.
        dataloader: Has no effect.
        lr_scaling_method: ``linear``, ``sqrt`` or ``none``.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any = None,
        lr_scaling_method: str | None = "linear",
    ) -> None:
        is_schedule = hasattr(lr_scheduler, "step") and hasattr(lr_scheduler, "get_last_lr")
        self.base_lr_scheduler = lr_scheduler if is_schedule else None
        self.optimizer = get_torch_optimizer(lr_scheduler)
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method = lr_scaling_method
        self._number = 0  # index of the next batch
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._write()

    def _write(self) -> None:
        size = self.batch_sizes[self._number % len(self.batch_sizes)]
        factor = scale_lr(self.base_batch_size, size, method=self.lr_scaling_method)
        self._last = update_lr(self.optimizer.param_groups, [rate * factor for rate in self._unscaled])

    def get_last_lr(self) -> list[float]:
        """Returns the present rates of the param groups."""
        return self._last

    get_lr = get_last_lr

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advances to the next batch; arguments are passed to the wrapped schedule."""
        update_lr(self.optimizer.param_groups, self._unscaled)  # some schedules continue from the present rates
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.step(*args, **kwargs)
        self._unscaled = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._number += 1
        self._write()

    def state_dict(self) -> dict[str, Any]:
        """Returns the index of the next batch, the rates before scaling, and the state of the wrapped schedule."""
        inner = None if self.base_lr_scheduler is None else self.base_lr_scheduler.state_dict()
        return {"batch": self._number, "unscaled": list(self._unscaled), "base": inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of :meth:`state_dict`."""
        if self.base_lr_scheduler is not None:
            self.base_lr_scheduler.load_state_dict(state_dict["base"])
        self._number, self._unscaled = state_dict["batch"], list(state_dict["unscaled"])
        self._write()
