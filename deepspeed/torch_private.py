"""Private functions of torch that more than one module needs.

``docs/design/other-libraries.md`` lists all private names of torch that the package uses, with reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def storage_references(storage: torch.UntypedStorage) -> int:
    """Returns the number of references to ``storage``, the caller's own included."""
    return torch._C._storage_Use_Count(storage._cdata)


def storage_key(tensor: torch.Tensor) -> int:
    """Returns the key of the storage under ``tensor`` (any shape), the same for all its views.

    Unlike ``tensor.untyped_storage()._cdata``, which has the same value, it is not intercepted by subclasses.
    """
    return torch._C._storage_address(tensor)  # type: ignore[attr-defined]


def is_inside_backward() -> bool:
    """Returns whether the calling thread is inside a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def call_after_backward(callback: Callable[[], None]) -> None:
    """Calls ``callback`` once at the end of the present backward. Raises RuntimeError: none runs (torch's message)."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def differentiates_a_function() -> bool:
    """Returns whether a differentiating transform of ``torch.func`` is active (``grad``, ``jacrev``, ``jvp``, ...)."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != torch._C._functorch.TransformType.Vmap for level in levels)


def compiler_backend(backend: Any, mode: Any, options: Any, dynamic: Any) -> Callable[..., Any]:
    """Returns the function of a graph and its inputs by which ``torch.compile`` with these arguments compiles it."""
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


def graph_breaks() -> dict[str, int]:
    """Returns how often compiled graphs have ended in this process, by the reason."""
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def compiled_graphs() -> int:
    """Returns how many graphs have been compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def memory_budget(share: float | None) -> AbstractContextManager[Any]:
    """Returns a context in which compiled graphs keep this share of their activations; None: torch's setting."""
    from torch._functorch import config

    return nullcontext() if share is None else config.patch(activation_memory_budget=share)
