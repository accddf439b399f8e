"""``deepspeed.checkpointing``: checkpointed calls, partitioned activations and random states.

All ranks that hold parts of the same layers compute the same activations. So with ``partition_activations`` every rank
keeps only its part of each input that a block saves (:class:`Partition`): the flattened tensor is cut into equal parts,
and gathered again when backward reaches the block.

Random states have names, so that model-parallel ranks can draw different dropout masks but otherwise equal numbers.
The scheme is Megatron-LM's (`Shoeybi et al. <https://arxiv.org/abs/1909.08053>`_): the default generator has the same
seed on all ranks of a model-parallel group, a second state has a different seed on each, and code that works on a
rank's part of a tensor runs under :meth:`CudaRNGStatesTracker.fork`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.axes import TENSOR
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.groups import get_tensor_model_parallel_rank
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.job.mpu import call_mpu, call_tensor_mpu
from deepspeed.errors import CallOrderError
from deepspeed.logging import log_dist, warn_once
from deepspeed.nested import tensors_of
from deepspeed.offload.activations import HostActivations

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

    Torch's reentrant variant is used if it computes all gradients, that is if every tensor with a gradient is
    itself a positional argument; otherwise the non-reentrant one. Random numbers are the same in both calls.

    Args:
        function: A pure function of its arguments and of parameters: it runs twice.

    Returns:
        What ``function`` returns.
    """
    reentrant = torch.is_grad_enabled() and _fits_reentrant(args, kwargs)
    return _checkpoint(function, args, kwargs, reentrant)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Works as :func:`checkpoint`, always in the non-reentrant variant: tensors may be in nested arguments."""
    return _checkpoint(function, args, kwargs, reentrant=False)


def checkpoint_heads(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Works as :func:`non_reentrant_checkpoint` for a function of this rank's heads.

    Its inputs differ between tensor ranks, so ``partition_activations`` does not divide them.
    """
    return _checkpoint(function, args, kwargs, reentrant=False, options=replace(settings, partition_activations=False))


def _checkpoint(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    reentrant: bool,
    options: Settings | None = None,
) -> Any:
    options = settings if options is None else options
    called = _CheckpointedBlock(functools.partial(function, **kwargs) if kwargs else function, options)
    with _keeping(options):
        return torch_checkpoint(called, *args, use_reentrant=reentrant)


def _keeping(options: Settings) -> Any:
    """Returns a context that keeps the saved inputs of a block: in parts, in host memory, or unchanged."""
    group = partition_group(options)
    if group is not None:
        hooks = Partition(axis_of(group, TENSOR), on_host=options.checkpoint_in_cpu)
        return torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack)
    if not options.checkpoint_in_cpu:
        return nullcontext()
    if settings.on_host is None:
        settings.on_host = HostActivations(torch.device(get_accelerator().current_device_name()))
    return settings.on_host.block()


def _fits_reentrant(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether the reentrant variant, which sees only positional tensor arguments, misses no gradient."""
    nested = [arg for arg in args if not isinstance(arg, torch.Tensor)]
    direct = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
    return direct and not _holds_gradient(nested) and not _holds_gradient(kwargs)


def _holds_gradient(value: Any) -> bool:
    return any(tensor.requires_grad for tensor in tensors_of(value))


class _CheckpointedBlock:
    """A block whose recomputation uses the named random states of the first call.

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
    """Labels the block for the profiler; waits for the device around it and logs its time, if configured."""
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
    """Returns whether :func:`configure` was called."""
    return settings.configured


def partition_activations_in_checkpoint(flag: bool) -> None:
    """Switches ``partition_activations``, for later forwards of blocks."""
    settings.partition_activations = flag


def set_num_layers(n: int) -> None:
    """Sets how many blocks are checkpointed."""
    settings.num_layers = n


def reset() -> None:
    """Does nothing: there are no buffers to free between iterations, as a block's saved tensors belong to its graph."""


@dataclass(frozen=True)
class ActivationShard:
    """One rank's part of a saved tensor."""

    values: torch.Tensor  # 1-D; the parts of all ranks have equal lengths, the last ones may end in padding
    shape: torch.Size  # shape of the full tensor
    device: torch.device  # device on which backward needs the full tensor


class Partition:
    """A pair of saved-tensor hooks.

    Every rank of the axis must run the same blocks on equal inputs, and their backwards in the same order.

    Args:
        on_host: Keep the parts in host memory.
    """

    def __init__(self, axis: Axis, *, on_host: bool) -> None:
        self._axis, self._rank, self._size = axis, axis.place, axis.size
        self._on_host = on_host

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | ActivationShard:
        """Returns this rank's part (1-D) of a floating activation of any shape; other tensors unchanged.

        Parameters are not divided, as they are in memory anyway.
        """
        is_activation = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
        if not is_activation or tensor.layout is not torch.strided or tensor.numel() < self._size:
            return tensor
        length = -(-tensor.numel() // self._size)
        start = self._rank * length
        flat = tensor.detach().reshape(-1)[start : start + length]
        target = torch.device("cpu") if self._on_host else tensor.device
        values = torch.zeros(
            length, dtype=tensor.dtype, device=target, pin_memory=tensor.device.type == "cuda" and target.type == "cpu"
        )
        values[: flat.numel()].copy_(flat)
        return ActivationShard(values, tensor.shape, tensor.device)

    def unpack(self, packed: torch.Tensor | ActivationShard) -> torch.Tensor:
        """Gathers an activation from the ranks that hold its parts, in its original shape. Every rank must call it."""
        if not isinstance(packed, ActivationShard):
            return packed
        mine = packed.values.to(packed.device)
        channel = self._axis.channel(mine.device)
        flat = torch.cat(channel.gather(mine, [mine.numel()] * self._size, "a checkpointed activation"))
        return flat[: packed.shape.numel()].view(packed.shape)


# Programs with model parallelism of their own import these names with an underscore.
_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718  # as in Megatron-LM, so that a given seed gives the same masks


class CudaRNGStatesTracker:
    """Random states of the current device, by name."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Removes all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Returns the states by name; the dict is a copy."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces the states, 1-D bytes each, by what :meth:`get_states` returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Adds a state with its own seed.

        Raises:
            ValueError: The name or the seed is taken.
        """
        if name in self.states_:
            raise ValueError(f"random state {name!r}: expected a new name; call reset() first, or choose another name")
        if seed in self.seeds_:
            raise ValueError(f"random state {name!r}: seed {seed} is used by another state; choose another seed")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draws random numbers from the state ``name`` inside the context; the default state does not advance.

        Raises:
            CallOrderError: There is no such state.
        """
        if name not in self.states_:
            raise CallOrderError(
                f"random state {name!r} does not exist; call model_parallel_cuda_manual_seed(seed), or add({name!r}, "
                "seed) on get_cuda_rng_tracker()"
            )
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = device.get_rng_state()
            device.set_rng_state(before)


_CUDA_RNG_STATE_TRACKER = CudaRNGStatesTracker()


def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1) -> None:
    """Restores the generator's state, 1-D bytes, of a device; -1: of the current one."""
    get_accelerator().set_rng_state(new_state, None if device == -1 else device)


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker of this process."""
    return _CUDA_RNG_STATE_TRACKER


def _model_parallel_rank() -> int:
    mpu: Any = settings.mpu
    if mpu is None:
        return get_tensor_model_parallel_rank()
    return int(call_mpu(mpu, "get_tensor_model_parallel_rank", "get_model_parallel_rank", default=0))


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default state with ``seed`` and the model-parallel state with one that differs between its ranks.

    Args:
        seed: The same on all ranks of a model-parallel group; data-parallel ranks may differ.
    """
    _CUDA_RNG_STATE_TRACKER.reset()
    get_accelerator().manual_seed(seed)
    own_seed = seed + _MODEL_PARALLEL_OFFSET + _model_parallel_rank()
    _CUDA_RNG_STATE_TRACKER.add(_MODEL_PARALLEL_RNG_TRACKER_NAME, own_seed)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the model-parallel state again and leaves the default state as it is."""
    device = get_accelerator()
    with _CUDA_RNG_STATE_TRACKER.fork():
        device.manual_seed(seed + _MODEL_PARALLEL_OFFSET + _model_parallel_rank())


@dataclass
class Settings:
    """Holds the settings of :func:`configure`."""

    # split saved activations over the mpu's tensor ranks; without effect if there is one
    partition_activations: bool = False
    checkpoint_in_cpu: bool = False  # keep the inputs that a block saves in host memory
    synchronize: bool = False  # wait for the device before and after each block
    profile: bool = False  # log the time of each block's forward and recomputation
    num_layers: int | None = None  # number of checkpointed blocks, as the program passes it; for information
    mpu: Any = None  # the program's model-parallel unit
    configured: bool = False  # whether :func:`configure` was called
    on_host: HostActivations | None = None  # what blocks keep in host memory; made by the first one


settings = Settings()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets the options of :func:`~deepspeed.checkpointing.checkpoint`; explicit arguments win over the configuration.

    Args:
        deepspeed_config: A configuration whose ``activation_checkpointing`` section counts: a dict, a path, or a parsed
            one.
        partition_activations: Split saved activations over the mpu's tensor ranks, which must all run the same
            blocks on equal inputs.
        contiguous_checkpointing: Accepted without effect: saved tensors are not copied into a separate buffer.
        checkpoint_in_cpu: Keep saved activations in host memory.
        synchronize: Wait for the device before and after each block.
        profile: Log the time of each block.
    """
    global settings
    section = _section(deepspeed_config)

    def chosen(explicit: Any, key: str, default: Any) -> Any:
        return explicit if explicit is not None else getattr(section, key, default)

    if chosen(contiguous_checkpointing, "contiguous_memory_optimization", False):
        warn_once(
            "contiguous_memory_optimization",
            "activation checkpointing: contiguous_memory_optimization changes nothing, because saved activations are "
            "kept where they are instead of being copied into a buffer",
        )
    settings = Settings(
        partition_activations=bool(chosen(partition_activations, "partition_activations", False)),
        checkpoint_in_cpu=bool(chosen(checkpoint_in_cpu, "cpu_checkpointing", False)),
        synchronize=bool(chosen(synchronize, "synchronize_checkpoint_boundary", False)),
        profile=bool(chosen(profile, "profile", False)),
        num_layers=chosen(num_checkpoints, "number_checkpoints", None),
        mpu=mpu_,
        configured=True,
    )


def partition_group(options: Settings) -> Any:
    """Returns the process group over which saved activations are divided; None if they are not."""
    if not options.partition_activations or call_tensor_mpu(options.mpu, "world_size") in (None, 1):
        return None
    return call_tensor_mpu(options.mpu, "group")


def _section(config: Any) -> Any:
    if config is None:
        return None
    from deepspeed.config.parsing import parse_section

    return parse_section(config, "activation_checkpointing")
