"""Loaders that give each rank its share of a dataset."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from logging import WARNING
from typing import TYPE_CHECKING, Any

from deepspeed.engine.batches import Batches
from deepspeed.logging import log_dist

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
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # loaders of training data
        self._resumed_at = 0

    def resume(self, step: int, restored: Any) -> None:
        """Notes that a checkpoint was loaded, and warns of training data that begin anew.

        Args:
            step: Of the checkpoint.
            restored: The loader that a checkpoint knows, or None.
        """
        self._resumed_at = 0 if restored is not None else step
        if restored is None and self._made:
            self._warn(step, "a loader that deepspeed_io made is")

    def _warn(self, step: int, subject: str) -> None:
        log_dist(
            f"load_checkpoint at step {step}: {subject} not engine.training_dataloader, whose position alone a "
            "checkpoint has, so its data begin anew. Give initialize(training_data=...), or assign "
            "engine.training_dataloader = engine.deepspeed_io(dataset) before the first step and load_checkpoint",
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
        from deepspeed.data.configured import make_loader  # torch's loaders cost time that a program's own do not need

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
