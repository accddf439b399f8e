"""Which optimizers may be given flat fragments instead of whole parameters.

ZeRO cuts parameters anywhere. That is right only for an optimizer that treats every element by itself. This cannot be
detected from outside, so there is a list: known to be elementwise, known to need whole tensors, ours that request the
segment table, and everything else, which is unknown. Of the elementwise ones some update a flat run at once
(``ops.flat``), which :func:`flat_updater` finds.
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
    SEGMENTS = "segments"  #: needs tensors, but works on fragments after ``attach_segments``
    WHOLE = "whole"  #: needs whole tensors, or all of them together
    UNKNOWN = "unknown"  #: not a listed class


@dataclass(frozen=True)
class ElementwiseResult:
    """The result for one optimizer.

    Attributes:
        kind: The answer.
        reason: Why, as the rest of a sentence that starts with the optimizer's name; empty where it is elementwise.
    """

    kind: OptimizerKind
    reason: str = ""

    def __bool__(self) -> bool:
        """Returns True if fragments are right with nothing more than themselves."""
        return self.kind is OptimizerKind.ELEMENTWISE


_ELEMENTWISE_NAMES = (
    *("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop", "SGD"),
)

_WHOLE_NAMES = {
    "Adafactor": "factors the second moment into rows and columns of each matrix",
    "Muon": "orthogonalises each matrix as a whole (this package's own Muon works on fragments)",
    "LBFGS": "needs the whole parameter vector for its dot products and line search",
    "SparseAdam": "works on sparse gradients, which a flat buffer cannot hold",
}


def _torch_classes(names: tuple[str, ...]) -> tuple[type[torch.optim.Optimizer], ...]:
    """Returns those of the names that this torch has."""
    return tuple(getattr(torch.optim, name) for name in names if hasattr(torch.optim, name))


def is_elementwise(optimizer: torch.optim.Optimizer | type[torch.optim.Optimizer]) -> ElementwiseResult:
    """Returns whether ``optimizer`` may be given fragments.

    A subclass counts as its parent as long as ``step`` and its inner halves are the parent's own functions; otherwise
    it is unknown, whatever its parent was.

    Args:
        optimizer: An optimizer or its class.

    Returns:
        A verdict that is true if fragments are right.
    """
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    if callable(getattr(cls, "attach_segments", None)):
        return ElementwiseResult(
            OptimizerKind.SEGMENTS, "needs the table of tensors; call attach_segments before the first step"
        )
    known = (*_torch_classes(_ELEMENTWISE_NAMES), ElementwiseOptimizer)
    whole = _torch_classes(tuple(_WHOLE_NAMES))
    parent = next((base for base in cls.__mro__ if base in whole or _is_known(base, known)), None)
    if parent is None:
        return ElementwiseResult(OptimizerKind.UNKNOWN, "is not a class known to treat every element by itself")
    if parent in whole:
        return ElementwiseResult(OptimizerKind.WHOLE, _WHOLE_NAMES[parent.__name__])
    if not same_update(cls, parent):
        return ElementwiseResult(
            OptimizerKind.UNKNOWN, f"overrides the step of {parent.__name__}, so what it does is unknown"
        )
    return ElementwiseResult(OptimizerKind.ELEMENTWISE)


def _is_known(base: type, known: tuple[type, ...]) -> bool:
    """Returns whether a class is known: torch's by identity; of ours, every class that this package defines."""
    if base in known:
        return True
    return base.__module__.startswith("deepspeed.ops.") and issubclass(base, ElementwiseOptimizer)


_TORCH_RULES: dict[type[torch.optim.Optimizer], UpdateRule] = {
    torch.optim.Adam: AdamRule(),
    torch.optim.AdamW: AdamRule(decoupled=True),
    torch.optim.Adagrad: AdagradRule(),
    torch.optim.SGD: SGDRule(),
}


def flat_updater(optimizer: torch.optim.Optimizer) -> FlatUpdate | None:
    """Returns the flat update of ``optimizer``, or None if it has none and its ``step`` must be called.

    Optimizers of this package carry it themselves. Torch's Adam, AdamW, Adagrad and SGD get one that gives what
    their fused kernels give, unless a group requests what those cannot do on a run (``amsgrad``, ``differentiable``,
    ``dampening``). A subclass that overrides ``step`` has none: its ``step`` is what the user wrote.
    """
    if why_not_flat(optimizer) is not None:
        return None
    if isinstance(optimizer, FlatUpdate):
        return optimizer
    return RuleUpdate(next(_TORCH_RULES[base] for base in type(optimizer).__mro__ if base in _TORCH_RULES))


def why_not_flat(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns what keeps ``optimizer`` from a flat update, in words; None where it has one."""
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
        for option in ("amsgrad", "differentiable", "dampening"):
            if group.get(option):
                return f"param group {number} has {option}={group[option]}"
    return None


def supports_flat_update(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether :func:`flat_updater` has an implementation for ``optimizer``."""
    return flat_updater(optimizer) is not None


#: Methods that decide what a step does; ``_init_group`` and ``_update_group`` are torch's and our inner halves of it.
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
