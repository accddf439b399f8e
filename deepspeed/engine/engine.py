"""The engine of a model that the program steps itself: forward, backward and step."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.engine.base import EngineBase
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once
from deepspeed.zero.runtime import MicroBatch


class DeepSpeedEngine(EngineBase, metaclass=ABCMeta):
    """Wraps a model for training. Made by ``deepspeed.initialize``.

    ``isinstance`` holds for engines of pipelines too, which are registered here and share :class:`EngineBase`.

    Attributes unknown to the engine are those of the wrapped model.

    Attributes:
        module: The model.
        optimizer: The ZeRO optimizer; without one at stage 3 the machinery of sharded parameters, below it None.
        basic_optimizer: The torch optimizer underneath, or None.
        lr_scheduler: The schedule that ``step`` advances; may be set to None.
        training_dataloader: Loader over ``training_data``, or None.
        config: The configuration dict as it was given.
        global_steps: Updates so far, skipped ones included.
        global_samples: Samples of those updates, over all ranks.
        micro_steps: Micro-batches so far.
        skipped_steps: Updates that were skipped because a gradient was not finite.
        device: Where the model computes.
        compression_scheduler: Switches the techniques of ``compression_training`` on; None for a model without.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model; floating inputs are cast only where ``auto_cast`` (of ``fp16`` or ``bf16``) asks for it.

        Raises:
            DeepSpeedConfigError: The model was given floating tensors of another dtype than it computes in.
        """
        return self._train_step.forward(self.module, inputs, kwargs, is_training=self.module.training)

    def backward(
        self,
        loss: Any,
        retain_graph: bool = False,
        scale_wrt_gas: bool = True,
        *,
        count: Any = None,
        gradients: Any = None,
        micro_batch: MicroBatch | None = None,
        **kwargs: Any,
    ) -> Any:
        """Backpropagates ``loss`` and reduces gradients as the ZeRO stage says. Every rank must call it.

        Args:
            loss: Scalar; it is divided by ``gradient_accumulation_steps`` and multiplied by the loss scale. With
                ``gradients`` a tensor or a sequence of tensors that some forward returned.
            retain_graph: As in torch.
            scale_wrt_gas: False: do not divide.
            count: Tokens (or samples) that ``loss`` is a *sum* over, on this rank; a number or a tensor of one element.
                The update then divides the sum of all losses by the sum of all counts, over ranks and micro-batches.
                Gradients that are read before the step are not divided yet. None: ``loss`` is a mean.
            gradients: Of each tensor of ``loss``, or None for one that got none: those of a loss that another part of
                the model computed, scaled and divided already. Nothing of it is scaled or reported here.
            micro_batch: The micro-batch of this backward, given by a schedule that runs several forwards before their
                backwards; its last one is followed by one :meth:`step`. None: found by counting steps.
            **kwargs: Further arguments of ``Tensor.backward``.

        Returns:
            The loss divided by the accumulation steps, without the loss scale; with ``gradients``, ``loss``; with
            ``count``, the mean over this rank's tokens.

        Raises:
            CallOrderError: Some losses of an update have a count, and others have none.
        """
        if gradients is not None:
            if count is not None:
                raise DeepSpeedConfigError(
                    "engine.backward: gradients and count are both given; count belongs to a loss, gradients come from "
                    "a loss that another part of the model computed. Give one of them"
                )
            self._train_step.backward(loss, gradients, micro_batch, retain_graph=retain_graph, **kwargs)
            return loss
        return self._train_step.backward_of_loss(
            loss, micro_batch, divides=scale_wrt_gas, count=count, retain_graph=retain_graph, **kwargs
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside reduce nothing at any stage; each rank keeps whole gradients until the next one outside."""
        whole = sum(bucket.layout.numel for bucket in self._runtime.buckets if bucket.layout.trainable)
        size = whole * self._precision.accumulate_dtype.itemsize
        log_dist_once(f"no_sync keeps whole gradients on every rank until the boundary: {size / 2**20:,.0f} MiB")
        with self._batches.unreduced():
            yield

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Backwards inside add up on each rank; at the end of the block their sum is reduced once, at every stage.

        For losses that need several backwards before one :meth:`step`: cached contrastive losses, GANs, distillation.
        Each rank keeps whole gradients inside the block. Every rank must use it alike, with as many backwards. After an
        exception nothing is reduced.

        Raises:
            CallOrderError: Inside ``no_sync`` or another such block, or the engine trains nothing.
        """
        with self._train_step.one_reduction():
            yield

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Updates the parameters and advances the schedule at the boundary; otherwise only counts.

        Args:
            lr_kwargs: Arguments for the schedule's ``step``.
        """
        if self._train_step.update(lr_kwargs) is not None:
            self._end_step()
