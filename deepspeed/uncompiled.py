"""Keeps functions out of compiled graphs without loading the compiler.

``torch.compiler.disable``, and the methods of ``torch.optim.Optimizer`` that torch keeps out of graphs, import
``torch._dynamo``: 800 modules and 0.7 s, more than everything else that ``initialize`` does. In the end they set two
marks: one on the function, for calls that the compiler traces, and one on its code, for frames that the interpreter is
about to run. Both can be set when the function is defined, and cost nothing per call.
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
    """Keeps a function (and with ``recursive`` those it calls) out of compiled graphs: marks it, in place."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    frames: Any = torch._C._dynamo.eval_frame
    action = frames._FrameAction
    strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    frames.set_code_exec_strategy(function.__code__, strategy)
    return function


def without_compiling() -> AbstractContextManager[None]:
    """Returns a context in which compiled functions and modules run in eager mode.

    Does not load the compiler: if it is not loaded, nothing is compiled.
    """
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return]


def torchs(method: _F) -> _F:
    """Returns a bound method of torch's optimizers without its wrapper (if any), which would load the compiler.

    If the compiler is loaded, returns the method itself, as the compiler may trace a call of it.
    """
    wrapped = getattr(method, "__wrapped__", None)
    if wrapped is None or "torch._dynamo" in sys.modules:
        return method
    return functools.partial(wrapped, method.__self__)  # type: ignore[attr-defined, return-value]
