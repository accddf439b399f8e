"""Losses that layers of a pipeline add to that of the last stage: collected in a forward, sent to the last stage.

A loss is sent with the activations, as one number per name, and its gradient comes back with theirs. So it is scaled,
divided by the accumulation steps and averaged over the copies of the model exactly as the loss of the last stage is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from deepspeed.errors import PipelineError
from deepspeed.parallel.pipe.values import put_together, taken_apart
from deepspeed.torch_private import is_inside_backward


class OutputWithLosses(NamedTuple):
    """Holds a layer's output, and the sums of the losses added so far: by name, 0-dim, fp32."""

    outputs: Any
    losses: dict[str, torch.Tensor]


class _AddedLosses:
    """The losses that are added while layers run."""

    def __init__(self, losses: Mapping[str, torch.Tensor]) -> None:
        self.losses = dict(losses)
        self.keeps_gradients = torch.is_grad_enabled()


class _OpenLosses(threading.local):
    """The collection of the layers that run on this thread."""

    current: _AddedLosses | None = None


_open = _OpenLosses()


def add_loss(name: str, loss: torch.Tensor) -> None:
    """Adds a loss to that of the micro-batch; called by a layer of a :class:`PipelineModule` in its forward.

    What is trained is the loss of ``loss_fn`` plus all added ones. Losses added under one name are summed; their mean
    over micro-batches and copies of the model is in ``engine.metrics``. Each is a mean over the micro-batch, like the
    loss of ``loss_fn``, times its weight. In a forward that runs again to recompute activations, nothing is added.

    Args:
        name: Its name in ``engine.metrics``; a layer must add the same names in every micro-batch.
        loss: One element, of any shape and floating dtype.

    Raises:
        PipelineError: ``loss`` is no such tensor, or no layer of a pipeline runs, or the layer computes it without a
            graph though the micro-batch is trained.
    """
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"{loss.dtype}, shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)[:80]
        raise PipelineError(
            f"add_loss({name!r}): expected a floating tensor of one element, found {found}. Reduce it with mean() or "
            "sum()"
        )
    collection = _open.current
    if collection is None:
        if is_inside_backward():
            return  # inside a backward, which recomputes a layer
        raise PipelineError(
            f"add_loss({name!r}): expected a call in the forward of a layer of a PipelineModule, found none running. "
            "Return the loss, or call it from such a layer"
        )
    if collection.keeps_gradients and not torch.is_grad_enabled():
        raise PipelineError(
            f"add_loss({name!r}): the loss has no graph: it is computed under no_grad() or in a block of reentrant "
            "checkpointing. Call add_loss after the block, with what it returns"
        )
    added = loss.float().reshape(())
    before = collection.losses.get(name)
    collection.losses[name] = added if before is None else before + added


def run_collecting(run: Callable[[Any], Any], value: Any) -> Any:
    """Runs layers, and returns what they return, with the losses so far where there are any.

    Args:
        run: Runs them on one value.
        value: What the first of them takes, or an :class:`OutputWithLosses` of the layers before.
    """
    given, losses = split_losses(value)
    before, _open.current = _open.current, _AddedLosses(losses)
    try:
        outputs = run(given)
        found = _open.current.losses
    finally:
        _open.current = before
    return OutputWithLosses(outputs, found) if found else outputs


def split_losses(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """Returns the outputs of layers and the losses that they added, each 0-dim and fp32; without any, an empty dict."""
    return (value.outputs, value.losses) if isinstance(value, OutputWithLosses) else (value, {})


def run_recomputed(recompute: Callable[..., Any], run: Callable[[Any], Any], value: Any) -> Any:
    """Runs layers whose activations are recomputed, and returns what they return, with the losses so far.

    Checkpoint functions pass arguments one by one, and the reentrant one computes gradients only for tensors of a flat
    tuple. So outputs with losses pass through it as a flat tuple.

    Args:
        recompute: Such a function, called with what runs again and its arguments.
        run: Runs the layers on one value.
        value: What the first of them takes, or an :class:`OutputWithLosses` of the layers before.
    """
    given, losses = split_losses(value)
    is_tuple = isinstance(given, tuple)
    names, arguments = list(losses), given if is_tuple else (given,)
    form: list[Any] = []

    def flat(*values: Any) -> Any:
        own, so_far = values[: len(arguments)], dict(zip(names, values[len(arguments) :], strict=True))
        inputs = own if is_tuple else own[0]
        made = run_collecting(run, OutputWithLosses(inputs, so_far) if so_far else inputs)
        if not isinstance(made, OutputWithLosses):
            return made
        description, tensors = taken_apart(made)
        form[:] = [description]
        return tuple(tensors)

    made = recompute(flat, *arguments, *losses.values())
    return put_together(form[0], made) if form else made
