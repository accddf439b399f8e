"""Named random states, so that model-parallel ranks can draw different dropout masks and the same everything else.

The scheme is Megatron-LM's (`Shoeybi et al. <https://arxiv.org/abs/1909.08053>`_): the default generator has the same
seed on all ranks of a model-parallel group, a second state has one of its own, and code that works on a rank's part of
a tensor runs under :meth:`CudaRNGStatesTracker.fork`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import settings as settings_module
from deepspeed.comm.job.groups import get_tensor_model_parallel_rank
from deepspeed.errors import CallOrderError

MODEL_PARALLEL_STATE = "model-parallel-rng"
_MODEL_PARALLEL_OFFSET = 2718  # what programs of this family add, so that a given seed gives the masks they know


class CudaRNGStatesTracker:
    """Random states of the current device, by name."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forgets all states."""
        self.states_ = {}
        self.seeds_ = set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """The states by name; the dict is a copy."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replaces the states, 1-D bytes each, by what :meth:`get_states` returned."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Makes a state from a seed of its own.

        Raises:
            ValueError: The name or the seed is taken.
        """
        if name in self.states_:
            raise ValueError(f"random state {name!r} exists already; call reset() first or choose another name")
        if seed in self.seeds_:
            raise ValueError(f"random state {name!r}: seed {seed} is used by another state; choose another seed")
        device = get_accelerator()
        before = device.get_rng_state()
        device.manual_seed(seed)
        self.states_[name] = device.get_rng_state()
        self.seeds_.add(seed)
        device.set_rng_state(before)

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_STATE) -> Iterator[None]:
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


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """The tracker of this process."""
    return _tracker


def _model_parallel_rank() -> int:
    mpu: Any = settings_module.settings.mpu
    if mpu is None:
        return get_tensor_model_parallel_rank()
    for name in ("get_tensor_model_parallel_rank", "get_model_parallel_rank"):
        if hasattr(mpu, name):
            return int(getattr(mpu, name)())
    return 0


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seeds the default state with ``seed`` and the model-parallel state with one that differs between its ranks.

    Args:
        seed: The same on all ranks of a model-parallel group; data-parallel ranks may differ.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL_STATE, seed + _MODEL_PARALLEL_OFFSET + _model_parallel_rank())


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seeds the model-parallel state again and leaves the default state as it is."""
    device = get_accelerator()
    with _tracker.fork():
        device.manual_seed(seed + _MODEL_PARALLEL_OFFSET + _model_parallel_rank())
