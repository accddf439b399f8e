"""Hooks that a program has put around an optimizer's ``step``, for updates that do not go through it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.optim import optimizer as torch_optimizer


@contextmanager
def step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Calls the hooks of ``register_step_pre_hook`` and ``register_step_post_hook``, as ``step()`` would.

    They find the parameters of the groups, which are flat runs, without ``.grad``: the update reads its gradients from
    buffers of its own.

    Args:
        optimizer: Whose step it is.
    """
    _call(torch_optimizer._global_optimizer_pre_hooks, optimizer)
    _call(optimizer._optimizer_step_pre_hooks, optimizer)
    yield
    _call(optimizer._optimizer_step_post_hooks, optimizer)
    _call(torch_optimizer._global_optimizer_post_hooks, optimizer)


def _call(hooks: dict, optimizer: torch.optim.Optimizer) -> None:  # type: ignore[type-arg]
    for hook in list(hooks.values()):
        hook(optimizer, (), {})
