"""``deepspeed.checkpointing``: the checkpointed call and everything that goes with it."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import settings as settings_module
from deepspeed.activation_checkpointing.partition import Partition
from deepspeed.activation_checkpointing.random_states import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
    model_parallel_reconfigure_tp_seed,
)
from deepspeed.activation_checkpointing.settings import Settings, configure, partition_group
from deepspeed.logging import log_dist

__all__ = [
    "CheckpointFunction",
    "CudaRNGStatesTracker",
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` without keeping its activations; backward calls it again.

    Torch's reentrant variant is used where it gives all gradients, which is where every tensor with a gradient is
    itself a positional argument; otherwise the non-reentrant one. Random numbers are the same in both calls.

    Args:
        function: A pure function of its arguments and of parameters: it runs twice.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What ``function`` returns.
    """
    reentrant = torch.is_grad_enabled() and _fits_reentrant(args, kwargs)
    return _checkpoint(function, args, kwargs, reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """:func:`checkpoint` by saved-tensor hooks: arguments may be nested, and unused outputs are allowed."""
    return _checkpoint(function, args, kwargs, reentrant=False)


def _checkpoint(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reentrant: bool) -> Any:
    options = settings_module.settings
    called = _CheckpointedBlock(functools.partial(function, **kwargs) if kwargs else function, options)
    with _keeping(options):
        return torch_checkpoint(called, *args, use_reentrant=reentrant)


def _keeping(options: Settings) -> Any:
    """Where what the block saves, its inputs, waits for the second call: in parts, in host memory, or as it is."""
    group = partition_group(options)
    if group is not None:
        hooks = Partition(group, on_host=options.checkpoint_in_cpu)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
    if not options.checkpoint_in_cpu:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=get_accelerator().device_name() != "cpu")


def _fits_reentrant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the reentrant variant, which sees only tensors that are positional arguments, misses no gradient."""
    nested = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    direct = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    return direct and not _holds_gradient(nested) and not _holds_gradient(kwargs)


def _holds_gradient(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, dict):
        return any(_holds_gradient(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_gradient(item) for item in value)
    return False


class _CheckpointedBlock:
    """The block, made so that its second call sees the named random states of the first.

    Torch restores the default random states itself.
    """

    def __init__(self, function: Callable[..., Any], options: Settings) -> None:
        self._function = function
        self._options = options
        self._states: dict[str, torch.Tensor] | None = None

    def __call__(self, *args: Any) -> Any:
        tracker = get_cuda_rng_tracker()
        if self._states is None:
            self._states = tracker.get_states()
            with _measured("activation checkpoint forward", self._options):
                return self._function(*args)
        now = tracker.get_states()
        tracker.set_states(self._states)
        try:
            with _measured("activation checkpoint recomputation", self._options):
                return self._function(*args)
        finally:
            tracker.set_states(now)


@contextmanager
def _measured(name: str, options: Settings) -> Iterator[None]:
    """Labels the block for the profiler; waits for the device around it and logs its time, if the options say so."""
    waits = options.synchronize or options.profile
    if waits:
        get_accelerator().synchronize()
    started = time.perf_counter()
    with torch.profiler.record_function(name):
        yield
    if waits:
        get_accelerator().synchronize()
    if options.profile:
        log_dist(f"{name}: {(time.perf_counter() - started) * 1e3:.2f} ms")


def is_configured() -> bool:
    """Whether :func:`configure` was called."""
    return settings_module.settings.configured


def partition_activations_in_checkpoint(flag: bool) -> None:
    """Switches ``partition_activations``, for blocks whose forward comes later."""
    settings_module.settings.partition_activations = flag


def set_num_layers(n: int) -> None:
    """Says how many blocks are checkpointed."""
    settings_module.settings.num_layers = n


def reset() -> None:
    """Does nothing: there are no buffers to drop between iterations, as what a block saves dies with its graph."""
