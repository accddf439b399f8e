"""The fused flat update: one optimizer step on a 1-D run, gradient cast and 16-bit publication included.

The ZeRO runtime holds fp32 masters and reduced gradients as long flat runs. An optimizer that offers
:class:`FlatUpdate` takes both as they are; :func:`flat_updater` finds the implementation for an optimizer object,
ours or torch's own.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deepspeed.ops.rounding import ElementRounding
from deepspeed.ops.rules import AdagradRule, AdamRule, SGDRule, UpdateRule, run_in_chunks


@runtime_checkable
class FlatUpdate(Protocol):
    """An optimizer step on one flat run."""

    def init_flat_state(self, param_group: dict[str, Any], master: Tensor, state: dict[str, Any]) -> None:
        """Adds to ``state`` what it lacks: fp32 tensors of the shape of ``master`` (1-D), and the step counter."""
        ...

    def flat_update(
        self,
        param_group: dict[str, Any],
        master: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        *,
        grad_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        advance_step: bool = True,
        rounding: ElementRounding | None = None,
    ) -> None:
        """Runs one step on a run. The bits do not depend on how the run is cut, as long as cuts are multiples of 64.

        Args:
            param_group: Hyperparameters, read now.
            master: 1-D, contiguous, fp32 (16 bit works and is widened chunk by chunk). Updated in place.
            grad: 1-D, same length, any floating dtype. Not changed.
            state: The run's optimizer state, as in ``optimizer.state[run]``; filled in at the first call. A caller
                that updates a run slice by slice hands in slices of the per-element tensors and the run's ``step``.
            grad_scale: One fp32 multiplier for the gradient (unscaling times clipping); None is exactly 1.
            out: 1-D, receives the new master in its own dtype.
            advance_step: Count this call as a step. False for every slice of a run but the first.
            rounding: Rounds a master and states of 16 bit; None: to nearest.
        """
        ...


class FlatByRule:
    """:class:`FlatUpdate` by an update rule; a base of what has one."""

    @property
    def rule(self) -> UpdateRule:
        """The arithmetic of one step."""
        raise NotImplementedError

    def init_flat_state(self, param_group: dict[str, Any], master: Tensor, state: dict[str, Any]) -> None:
        """Adds to ``state`` what it lacks: fp32 tensors of the shape of ``master`` (1-D), and the step counter."""
        init_state(self.rule, param_group, master, state, torch.promote_types(master.dtype, torch.float32))

    @torch.no_grad()
    def flat_update(
        self,
        param_group: dict[str, Any],
        master: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        *,
        grad_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        advance_step: bool = True,
        rounding: ElementRounding | None = None,
    ) -> None:
        """Runs one step on a run (1-D) in chunks that fit into the cache: see :meth:`FlatUpdate.flat_update`."""
        self.init_flat_state(param_group, master, state)
        step = current_step(self.rule, state, advance=advance_step)
        run_in_chunks(
            self.rule.kernel(param_group, step, master.device),
            master,
            grad,
            [state[name] for name in self.rule.initial_state(param_group)],
            grad_scale=grad_scale,
            out=out,
            rounding=rounding,
        )


class RuleUpdate(FlatByRule):
    """The flat update of an optimizer that has none itself.

    Args:
        rule: The arithmetic of its step.
    """

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule

    @property
    def rule(self) -> UpdateRule:
        """The arithmetic of one step."""
        return self._rule


class NarrowStates:
    """A :class:`FlatUpdate` whose per-element states have the dtype of the master, where that has 16 bit.

    Args:
        inner: The update.
    """

    def __init__(self, inner: FlatUpdate) -> None:
        self._inner = inner

    def init_flat_state(self, param_group: dict[str, Any], master: Tensor, state: dict[str, Any]) -> None:
        """Adds to ``state`` what it lacks: tensors of shape and dtype of ``master`` (1-D), and the step counter."""
        present = {key for key, value in state.items() if value is not None}
        self._inner.init_flat_state(param_group, master, state)
        for key, value in state.items():
            if key not in present and isinstance(value, Tensor) and value.dim() and master.dtype.itemsize == 2:
                state[key] = value.to(master.dtype)

    def flat_update(
        self, param_group: dict[str, Any], master: Tensor, grad: Tensor, state: dict[str, Any], **options: Any
    ) -> None:
        """Runs one step on a run, as :meth:`FlatUpdate.flat_update` of the inner update does."""
        self.init_flat_state(param_group, master, state)
        self._inner.flat_update(param_group, master, grad, state, **options)


def init_state(
    rule: UpdateRule, group: dict[str, Any], param: Tensor, state: dict[str, Any], dtype: torch.dtype
) -> None:
    """Adds the state that ``rule`` needs and ``state`` lacks; per-element tensors are shaped like ``param``."""
    if rule.counts_steps and "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
    for name, value in rule.initial_state(group).items():
        if state.get(name) is None:
            state[name] = torch.full_like(param, value, dtype=dtype, requires_grad=False)


def current_step(rule: UpdateRule, state: dict[str, Any], *, advance: bool) -> float | Tensor:
    """Returns the number of the step being taken, after counting it if ``advance``.

    A counter on an accelerator stays a tensor; reading it would wait for the device.
    """
    if not rule.counts_steps:
        return 0.0
    step = state["step"]
    if not isinstance(step, Tensor):
        state["step"] = step = step + (1 if advance else 0)
        return float(step)
    if advance:
        step.add_(1)
    return step if step.device.type != "cpu" else float(step)


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
