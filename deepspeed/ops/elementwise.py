"""Tells which optimizers work on flat fragments instead of whole parameters.

ZeRO cuts parameters anywhere, which is correct only for an elementwise optimizer. This cannot be detected, so there are
lists: classes that are elementwise, classes that need whole tensors, and this package's classes that need the fragment
table. All others are unknown. Some elementwise optimizers can update a flat run at once (``ops.flat``), which
:func:`flat_updater` returns.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from enum import Enum

import torch

from deepspeed.ops.base import ElementwiseOptimizer
from deepspeed.ops.flat import AdagradRule, AdamRule, FlatUpdate, RuleUpdate, SGDRule, UpdateRule


class OptimizerKind(Enum):
    """Whether an optimizer depends on the shapes of its parameters."""

    ELEMENTWISE = "elementwise"  #: each element by itself: fragments are right
    FRAGMENTS = "fragments"  #: needs tensors, but works on fragments after ``attach_segments``
    WHOLE = "whole"  #: needs whole tensors, or all of them together
    UNKNOWN = "unknown"  #: not a listed class


@dataclass(frozen=True)
class ElementwiseResult:
    """The result of :func:`is_elementwise` for one optimizer."""

    kind: OptimizerKind
    # why, as the rest of a sentence that starts with the optimizer's name; empty where it is elementwise
    reason: str = ""

    def __bool__(self) -> bool:
        """Returns whether the optimizer works on fragments without further information."""
        return self.kind is OptimizerKind.ELEMENTWISE


_ELEMENTWISE = (
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax),
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.SGD, ElementwiseOptimizer),
)

_WHOLE: dict[type, str] = {
    torch.optim.Adafactor: "factors the second moment into rows and columns of each matrix",
    torch.optim.Muon: "orthogonalizes each matrix as a whole (this package's own Muon works on fragments)",
    torch.optim.LBFGS: "needs the whole parameter vector for its dot products and line search",
    torch.optim.SparseAdam: "works on sparse gradients, which a flat buffer cannot hold",
}


def is_elementwise(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> ElementwiseResult:
    """Returns the kind of ``optimizer``, true if it works on fragments, and the reason.

    A subclass is of its parent's kind if it inherits ``step`` and the methods in :data:`_UPDATE_METHODS`; otherwise its
    kind is unknown.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if callable(getattr(cls, "attach_segments", None)):
        return ElementwiseResult(
            OptimizerKind.FRAGMENTS, "needs the table of tensors; call attach_segments before the first step"
        )
    parent = next((base for base in cls.__mro__ if base in _WHOLE or _is_known(base)), None)
    if parent is None:
        return ElementwiseResult(OptimizerKind.UNKNOWN, "is not a class known to treat every element by itself")
    if parent in _WHOLE:
        return ElementwiseResult(OptimizerKind.WHOLE, _WHOLE[parent])
    if not same_update(cls, parent):
        return ElementwiseResult(
            OptimizerKind.UNKNOWN, f"overrides the step of {parent.__name__}, so what it does is unknown"
        )
    return ElementwiseResult(OptimizerKind.ELEMENTWISE)


def _is_known(base: type) -> bool:
    """Returns whether a class is known: torch's by identity; of ours, every class that this package defines."""
    if base in _ELEMENTWISE:
        return True
    return base.__module__.startswith("deepspeed.ops.") and issubclass(base, ElementwiseOptimizer)


_TORCH_RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.Adagrad: AdagradRule(),
    torch.optim.SGD: SGDRule(),
}


NOT_FLAT = ("amsgrad", "differentiable", "dampening")
"""Options of torch's param groups with which an optimizer has no flat update."""


def flat_updater(optimizer: torch.optim.Optimizer) -> FlatUpdate | None:
    """Returns the flat update of ``optimizer``, or None if it has none and its ``step`` must be called.

    Optimizers of this package implement it. Torch's Adam, AdamW, Adagrad and SGD get one with the results of their
    fused kernels, unless a group requests what those cannot do on a run (``amsgrad``, ``differentiable``,
    ``dampening``). A subclass that overrides ``step`` has none, so its own ``step`` is called.
    """
    if why_not_flat(optimizer) is not None:
        return None
    if isinstance(optimizer, FlatUpdate):
        return optimizer
    return RuleUpdate(next(_TORCH_RULES[base] for base in type(optimizer).__mro__ if base in _TORCH_RULES))


def why_not_flat(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns why ``optimizer`` has no flat update; None if it has one."""
    cls = type(optimizer)
    if isinstance(optimizer, FlatUpdate):
        ours = next((base for base in cls.__mro__ if base.__module__.startswith("deepspeed.")), None)
        return None if ours is None or same_update(cls, ours) else f"it overrides a part of {ours.__name__}'s step"
    known = next((base for base in cls.__mro__ if base in _TORCH_RULES), None)
    if known is None:
        return "it has a step of its own"
    if not same_update(cls, known):
        return f"it overrides a part of {known.__name__}'s step"
    for number, group in enumerate(optimizer.param_groups):
        for option in NOT_FLAT:
            if group.get(option):
                return f"param group {number} has {option}={group[option]}"
    return None


def supports_flat_update(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether :func:`flat_updater` has an implementation for ``optimizer``."""
    return flat_updater(optimizer) is not None


#: Methods that determine a step. ``step`` calls ``_init_group`` in torch's classes, and ``_update_group`` in ours.
_UPDATE_METHODS = ("step", "_init_group", "_update_group", "flat_update")


def same_update(cls: type, parent: type) -> bool:
    """Returns whether ``cls`` takes the same step as its base ``parent``.

    Functions are compared as written: torch wraps ``step`` once per class for its hooks and profiler.
    """
    return all(
        inspect.unwrap(getattr(cls, name, _nothing)) is inspect.unwrap(getattr(parent, name, _nothing))
        for name in _UPDATE_METHODS
    )


def _nothing() -> None:
    """Stands for a method that a class does not have."""
