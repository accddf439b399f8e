"""Marks functions that ``torch.compile`` leaves alone, without loading the compiler.

``torch.compiler.disable``, and each method of ``torch.optim.Optimizer`` that torch keeps out of graphs by itself,
import ``torch._dynamo`` on the way: 800 modules and 0.7 s, more than all else that ``initialize`` does. What they
decide in the end is two marks: one on the function, where the compiler meets a call of it, and one on its code, where
the interpreter is about to run it. Both can be set when the function is defined, and cost nothing per call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])


def uncompiled(function: _F, *, reason: str | None = None, recursive: bool = True) -> _F:
    """Keeps a function out of compiled graphs: ``torch.compiler.disable`` as a decorator.

    Args:
        function: Written in Python; it is marked in place.
        reason: For messages of the compiler about a graph that ends at a call of it.
        recursive: What it calls stays out of graphs too.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def without_compiling() -> AbstractContextManager[None]:
    """Returns a context in which compiled functions and modules run as they were written.

    Where the compiler is not loaded nothing is compiled, and nothing is loaded here.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def torchs(method: _F) -> _F:
    """Returns a bound method of torch's optimizers without the wrapper around it that would load the compiler.

    Where the compiler is loaded it is the method itself, since a call of it may be met in a graph.

    Args:
        method: Such as ``super().add_param_group``; one without a wrapper is returned as it is.
    """
    wrapped = getattr(method, "__wrapped__", None)
    if wrapped is None or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(wrapped, method.__self__)  # type: ignore[attr-defined, return-value]
