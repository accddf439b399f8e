"""What all tests with Accelerate, Transformers, PEFT and TRL share: the libraries on CPU ranks.

Without a GPU accelerate counts one process in DeepSpeed mode, regardless of WORLD_SIZE, and the Trainer refuses bf16.
These two answers are replaced here, and nothing else of the libraries: ``PartialState._prepare_backend`` (gloo on the
CPU) and the Trainer's look for a GPU that knows bf16.
"""

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

needs_transformers = pytest.mark.skipif(
    sys.version_info < (3, 11),
    reason="the present transformers needs Python 3.11: no tests of the Hugging Face libraries",
)

Body = TypeVar("Body", bound=Callable[..., Any])


@contextmanager
def cpu_ranks() -> Iterator[None]:
    """Inside, this process is one of WORLD_SIZE CPU ranks to the libraries, which remember nothing of earlier runs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType
    from transformers import utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prepare_backend, has_bf16 = PartialState._prepare_backend, utils.is_torch_bf16_gpu_available
    PartialState._prepare_backend = lambda self, *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    _replace_has_bf16(lambda: True)
    forget_runs()
    try:
        yield
    finally:
        forget_runs()
        PartialState._prepare_backend = prepare_backend
        _replace_has_bf16(has_bf16)


def _replace_has_bf16(has_bf16: Callable[[], bool]) -> None:
    """Replaces it where the Trainer's arguments take it from, and in them if they are loaded, which takes seconds."""
    for name in ("transformers.utils", "transformers.training_args"):
        if name in sys.modules:
            sys.modules[name].is_torch_bf16_gpu_available = has_bf16  # type: ignore[attr-defined]


def forget_runs() -> None:
    """What the libraries keep per process, as in a new process; the process group stays."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def on_cpu_ranks(body: Body) -> Body:
    """Decorates a function for ``run_ranks``, or a test below ``on_ranks``: it runs inside :func:`cpu_ranks`."""

    @functools.wraps(body)
    def inside(*args: Any, **kwargs: Any) -> Any:
        with cpu_ranks():
            return body(*args, **kwargs)

    del inside.__wrapped__  # type: ignore[attr-defined]  # what ranks unwrap ends here
    inside.__signature__ = inspect.signature(body)  # type: ignore[attr-defined]
    return inside  # type: ignore[return-value]


def mean_over_ranks(value: torch.Tensor | float) -> float:
    """The mean of a number over all ranks."""
    tensor = torch.as_tensor(value, dtype=torch.float64).detach().reshape(()).clone()
    dist.all_reduce(tensor)
    return tensor.item() / dist.get_world_size()


def same_on_all_ranks(values: dict[str, torch.Tensor]) -> bool:
    """Whether every rank has the same tensors."""
    for name in sorted(values):
        theirs = values[name].detach().clone()
        dist.broadcast(theirs, 0)
        if not torch.equal(theirs, values[name]):
            return False
    return True
