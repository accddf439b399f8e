"""Runs the layers of one stage, recomputes blocks of them, and collects the losses that layers add.

An added loss is sent with the activations to the last stage, as one number per name, and its gradient comes back with
theirs. So it is scaled, divided by the accumulation steps and averaged over the copies of the model exactly as the loss
of the last stage is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from deepspeed.comm.job.mesh import Mesh
from deepspeed.errors import PipelineError
from deepspeed.give_base import PlainAttributes
from deepspeed.parallel.pipe.spec import seeded
from deepspeed.parallel.pipe.values import put_together, shapes_of, taken_apart
from deepspeed.torch_private import is_inside_backward


class StageLayers(PlainAttributes, nn.Module):
    """The layers of one stage, which run one after the other. ``PipelineModule`` cuts the model and builds them.

    It documents all arguments but ``names``, the class name of each layer of the model.
    """

    mesh: Mesh  # the ranks of the job
    num_stages: int
    chunks: list[int]  # numbers of the chunks that this rank has
    forward_funcs: list[Callable[..., Any]]  # this rank's layers, in order
    _stage_of: tuple[int, ...]
    _ranges: dict[int, range]  # local layers of each chunk
    _numbers: list[int]  # global numbers of the local layers

    def __init__(
        self,
        names: Sequence[str],
        loss_fn: Callable[..., Any] | None,
        *,
        seed_layers: bool,
        seed_fn: Callable[[int], Any] | None,
        base_seed: int,
        activation_checkpoint_interval: int,
        activation_checkpoint_func: Callable[..., Any],
        checkpointable_layers: Sequence[str] | None,
    ) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers = checkpointable_layers
        self.active_chunk: int | None = None  # the chunk that ``forward`` runs; None: all of this rank
        self.micro_offset = 0  # forwards so far
        self.failed_at = ""  # the layer whose forward raised, with its input; empty as long as none did
        # what layers added with ``add_loss`` when a program called the module itself: 0-dim, fp32, by name
        self.added_losses: dict[str, torch.Tensor] = {}
        self._names = list(names)

    def forward(self, forward_input: Any) -> Any:
        """Runs this rank's layers, or those of the active chunk.

        Returns what the last of them returns; of an active chunk with the losses that layers have added, if any.
        """
        chosen = self._ranges[self.active_chunk] if self.active_chunk is not None else range(len(self.forward_funcs))
        self.micro_offset += 1
        value, self.added_losses = forward_input, {}
        interval = self.activation_checkpoint_interval
        step = interval if interval > 0 else max(len(chosen), 1)
        for first in range(chosen.start, chosen.stop, step):
            block = range(first, min(first + step, chosen.stop))
            run = functools.partial(self._run, block, self.micro_offset)
            if interval > 0 and torch.is_grad_enabled() and self._is_checkpointable(block):
                value = run_recomputed(self.activation_checkpoint_func, run, value)
            else:
                value = run_collecting(run, value)
        if self.active_chunk is not None:
            return value
        outputs, self.added_losses = split_losses(value)
        return outputs

    def _run(self, block: range, micro_offset: int, value: Any) -> Any:
        for place in block:
            seed = self.base_seed * micro_offset + self._numbers[place]
            try:
                with seeded(seed, self.seed_fn) if self.seed_layers else nullcontext():
                    value = self.forward_funcs[place](value)
            except Exception:
                number = self._numbers[place]
                self.failed_at = f"layer {number}, {self._names[number]}, input {shapes_of(value)}"
                raise
        return value

    def _is_checkpointable(self, block: range) -> bool:
        funcs = [self.forward_funcs[place] for place in block]
        if self.checkpointable_layers is not None:
            return all(type(func).__name__ in self.checkpointable_layers for func in funcs)
        modules = [func.args[0] if isinstance(func, functools.partial) else func for func in funcs]
        return any(isinstance(m, nn.Module) and any(True for _ in m.parameters()) for m in modules)

    @property
    def stage_of_chunks(self) -> tuple[int, ...]:
        """The stage of each chunk of the model."""
        return self._stage_of

    def parameters_of(self, chunk: int) -> Iterator[nn.Parameter]:
        """Yields the parameters of a chunk that this rank has; a tied one may be in several."""
        for place in self._ranges[chunk]:
            func = self.forward_funcs[place]
            module = func.args[0] if isinstance(func, functools.partial) and func.args else func
            if isinstance(module, nn.Module):
                yield from module.parameters()

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets how many layers are recomputed together; 0: none are."""
        self.activation_checkpoint_interval = interval

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles layer by layer; arguments as in ``torch.compile``."""
        for place, func in enumerate(self.forward_funcs):
            if isinstance(func, nn.Module):
                func.compile(*args, **kwargs)
            elif isinstance(func, functools.partial):  # its argument, the tied module, is looked for there
                self.forward_funcs[place] = functools.partial(torch.compile(func.func, *args, **kwargs), *func.args)
            else:
                self.forward_funcs[place] = torch.compile(func, *args, **kwargs)

    def get_additional_losses(self) -> dict[str, torch.Tensor] | None:
        """Returns further losses of the last micro-batch, to be logged beside the loss.

        Equal keys on all stages, or None.
        """
        return None


# -- losses that layers add --------------------------------------------------------------------------------------------


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
    """Runs layers on a value, or an :class:`OutputWithLosses` of the layers before.

    Returns what they return, with the losses so far where there are any.
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
    tuple. So outputs with losses pass through ``recompute``, such a function, as a flat tuple. The other arguments are
    those of :func:`run_collecting`.
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
