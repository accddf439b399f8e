"""The fused flat update: one optimizer step on a 1-D run, gradient cast and 16-bit publication included.

The ZeRO runtime holds fp32 masters and reduced gradients as long flat runs. An optimizer that implements
:class:`FlatUpdate` updates these directly. The optimizers of this package implement it by an update rule. A rule
defines the state of an element and how one step changes it, with torch's own kernels; it does not depend on parameters,
runs or chunks. Hyperparameters are read from the param group at every step, so schedulers and users may change them.

:func:`run_in_chunks` updates a long flat tensor in chunks of the size of a cache. An update that casts the gradient,
unscales it, steps and writes a 16-bit copy reads every element several times. On whole tensors each pass reads from
memory; chunk by chunk, later passes read from cache. The result does not depend on the chunk size: every
operation is elementwise, and torch's fused CPU kernels give the same bits as long as cuts fall on multiples of 16
elements, where their vectorized body ends (ours fall on multiples of 64).
"""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import override

from deepspeed.accelerator import get_accelerator

if TYPE_CHECKING:
    from deepspeed.ops.rounding import ElementRounding


#: ``kernel(params, grads, states)``: updates lists of equally long tensors in place; ``states`` holds one list per
#: state name. The gradients are read only.
Kernel = Callable[[list[Tensor], list[Tensor], list[list[Tensor]]], None]


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
            master: 1-D, contiguous, fp32 (16 bit works and is widened chunk by chunk). Updated in place.
            grad: 1-D, same length, any floating dtype. Not changed.
            state: The run's optimizer state, as in ``optimizer.state[run]``; filled in at the first call. A caller
                that updates a run slice by slice hands in slices of the per-element tensors and the run's ``step``.
            grad_scale: One fp32 multiplier for the gradient (unscaling times clipping); None is exactly 1.
            out: 1-D, receives the new master in its own dtype.
            advance_step: Count this call as a step. False for every slice of a run but the first.
            rounding: Rounds master and states of 16 bits; None: rounds to nearest.
        """
        ...


class FlatByRule:
    """A :class:`FlatUpdate` by an update rule; the base class of optimizers that have one."""

    _rule: UpdateRule

    @property
    def rule(self) -> UpdateRule:
        """Returns the arithmetic of one step."""
        return self._rule

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
    """A flat update for an optimizer class that does not implement one."""

    def __init__(self, rule: UpdateRule) -> None:
        self._rule = rule


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


class UpdateRule(ABC):
    """An elementwise update rule. Subclasses set the attributes below where theirs differ."""

    counts_steps: ClassVar[bool] = True  # whether the rule needs the number of steps taken
    starts: ClassVar[dict[str, float]] = {}  # the per-element state: name to the value it starts with
    # whether the kernel handles many tensors in one call without temporary copies of all of them
    is_fused: ClassVar[bool] = False

    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        """Returns the per-element state that the hyperparameters of ``group`` need, as :attr:`starts`."""
        return dict(self.starts)

    def runs_lists_at_once(self, device: torch.device) -> bool:
        """Returns whether the kernel is fused on ``device``."""
        return self.is_fused

    @abstractmethod
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        """Returns the arithmetic of update number ``step`` (1 for the first) with the hyperparameters of ``group``.

        Args:
            step: A number; a scalar tensor only where it lives on an accelerator, so that the host does not wait for
                it.
        """


#: The step count for which every bias correction is exactly 1: beta ** inf is 0.
_UNCORRECTED = math.inf


class AdamRule(UpdateRule):
    """Adam (arXiv 1412.6980) and AdamW (arXiv 1711.05101); ``decoupled`` None reads the group's key."""

    starts: ClassVar = {"exp_avg": 0.0, "exp_avg_sq": 0.0}
    is_fused = True

    def __init__(self, decoupled: bool | None = None) -> None:
        self._decoupled = decoupled

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        decoupled = group.get("decoupled_weight_decay", False) if self._decoupled is None else self._decoupled
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        if not group.get("bias_correction", True):
            step = _UNCORRECTED
        step_tensor = _step_tensor(step, device)
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        lr = _learning_rate(group, device)
        weight_decay, eps = float(group["weight_decay"]), float(group["eps"])
        maximize = bool(group.get("maximize", False))

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            fused(
                params,
                grads,
                states[0],
                states[1],
                [],
                [step_tensor] * len(params),
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=weight_decay,
                eps=eps,
                amsgrad=False,
                maximize=maximize,
            )

        return update


class SGDRule(UpdateRule):
    """Stochastic gradient descent with momentum, as torch's (dampening 0, where a buffer may start from zero)."""

    counts_steps = False
    is_fused = True

    @override
    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"momentum_buffer": 0.0} if group.get("momentum", 0) else {}

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        lr = _learning_rate(group, device)

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            torch._fused_sgd_(
                params,
                grads,
                states[0] if states else [],
                weight_decay=float(group["weight_decay"]),
                momentum=float(group["momentum"]),
                lr=lr,
                dampening=0.0,
                nesterov=bool(group["nesterov"]),
                maximize=bool(group.get("maximize", False)),
                is_first_step=False,
            )

        return update


class AdagradRule(UpdateRule):
    """Adagrad: `Duchi et al. <https://jmlr.org/papers/v12/duchi11a.html>`_, as torch's."""

    @override
    def initial_state(self, group: dict[str, Any]) -> dict[str, float]:
        return {"sum": float(group.get("initial_accumulator_value", 0.0))}

    @override
    def runs_lists_at_once(self, device: torch.device) -> bool:
        return device.type == "cpu"  # where torch has a fused kernel

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        lr, lr_decay = _number(group["lr"]), float(group.get("lr_decay", 0.0))
        weight_decay, eps = float(group["weight_decay"]), float(group["eps"])
        maximize = bool(group.get("maximize", False))

        def update_fused(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            torch._fused_adagrad_(
                params,
                grads,
                states[0],
                [step_tensor] * len(params),
                lr=lr,
                lr_decay=lr_decay,
                weight_decay=weight_decay,
                eps=eps,
                maximize=maximize,
            )

        # Not every supported torch has the fused kernel on accelerators.
        def update_unfused(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            rate = lr if not lr_decay else lr / (1 + (float(step) - 1) * lr_decay)
            for param, grad, total in zip(params, grads, states[0], strict=True):
                descent = -grad if maximize else grad
                if weight_decay:
                    descent = descent.add(param, alpha=weight_decay)
                total.addcmul_(descent, descent)
                param.addcdiv_(descent, total.sqrt().add_(eps), value=-rate)

        if device.type != "cpu":
            return update_unfused
        step_tensor = _step_tensor(step, device)
        return update_fused


class LionRule(UpdateRule):
    """Lion, the evolved sign momentum: `Chen et al. <https://arxiv.org/abs/2302.06675>`_, algorithm 2."""

    counts_steps = False
    starts: ClassVar = {"exp_avg": 0.0}  # not fused: the direction would need a temporary copy of every tensor

    @override
    def kernel(self, group: dict[str, Any], step: float | Tensor, device: torch.device) -> Kernel:
        lr = _number(group["lr"])
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        shrink = 1.0 - lr * float(group["weight_decay"])
        rate = lr if group.get("maximize", False) else -lr

        def update(params: list[Tensor], grads: list[Tensor], states: list[list[Tensor]]) -> None:
            for param, grad, exp_avg in zip(params, grads, states[0], strict=True):
                direction = scratch("lion", grad.numel(), grad.dtype, grad.device)
                torch.lerp(exp_avg, grad, 1.0 - beta1, out=direction)
                if shrink != 1.0:
                    param.mul_(shrink)
                param.add_(direction.sign_(), alpha=rate)
                exp_avg.lerp_(grad, 1.0 - beta2)

        return update


def _number(value: float | Tensor) -> float:
    return float(value.item() if isinstance(value, Tensor) else value)


def _learning_rate(group: dict[str, Any], device: torch.device) -> float | Tensor:
    """Returns the rate for torch's fused kernels: a tensor only where it lives on the accelerator that updates."""
    lr: float | Tensor = group["lr"]
    is_on_device = isinstance(lr, Tensor) and lr.device == device and device.type != "cpu"
    return lr if is_on_device else _number(lr)


def _step_tensor(step: float | Tensor, device: torch.device) -> Tensor:
    """Returns the step count as torch's fused kernels need it: fp32, 0-dim, on the device of the parameters."""
    if isinstance(step, Tensor) and step.device == device:
        return step
    return torch.full((), float(step), dtype=torch.float32, device=device)


#: Alignment of every cut, in elements.
ALIGNMENT = 64

#: Elements per thread and chunk on the CPU. Every chunk costs 15 us of dispatch; one that is too long leaves the
#: cache before its cast. AdamW of 16M elements on one core, ms without and with a bf16 copy: 128Ki 8.8 and 11.1, 256Ki
#: 8.2 and 10.1, 512Ki 8.0 and 9.8, 1Mi 8.0 and 9.8; the fused kernel on the whole tensor 7.6, and 10.0 with a cast.
CPU_CHUNK_NUMEL = 512 * 1024

#: More threads than this do not make the chunk longer, so that the scratch memory stays below 8 MiB per dtype.
_MAX_THREAD_FACTOR = 4

#: Elements per chunk on other devices: long enough to hide launches, short enough to bound the fp32 scratch (64 MiB).
DEVICE_CHUNK_NUMEL = 1 << 24


def run_in_chunks(
    kernel: Kernel,
    master: Tensor,
    grad: Tensor,
    states: Sequence[Tensor],
    *,
    grad_scale: float | Tensor | None = None,
    out: Tensor | None = None,
    rounding: ElementRounding | None = None,
) -> None:
    """Updates ``master`` and ``states`` in place and writes ``out``.

    Args:
        kernel: The update. It sees fp32 tensors (fp64 if ``master`` is fp64).
        master: 1-D, contiguous, any floating dtype; what is not fp32 is widened chunk by chunk.
        grad: 1-D, same length, any floating dtype. Not changed.
        states: 1-D tensors of the same length.
        grad_scale: One multiplier for the gradient, rounded to fp32; a 0-dim tensor on the same device avoids a
            synchronization. None: no multiplication.
        out: Receives the new ``master``, cast to its dtype.
        rounding: Rounds master and states that are not fp32; None: rounds to nearest.

    Raises:
        ValueError: The tensors do not fit together.
    """
    _check(master, grad, states, out)
    numel = master.numel()
    if numel == 0:
        return
    chunk = default_chunk_numel(master.device)
    scale = None if isinstance(grad_scale, float | int) and grad_scale == 1 else grad_scale
    dtype = torch.float64 if master.dtype is torch.float64 else torch.float32
    widened_states = tuple(f"state{position}" for position in range(len(states)))
    outs: Sequence[Tensor | None] = out.split(chunk) if out is not None else [None] * (-(-numel // chunk))
    state_chunks = zip(*(state.split(chunk) for state in states), strict=True) if states else [()] * len(outs)

    chunks = zip(master.split(chunk), grad.split(chunk), state_chunks, outs, strict=True)
    for number, (master_chunk, grad_chunk, states_chunk, out_chunk) in enumerate(chunks):
        wide_master = _widened("master", master_chunk, dtype)
        wide_states = [_widened(role, s, dtype) for role, s in zip(widened_states, states_chunk, strict=True)]
        kernel([wide_master], [_scaled(grad_chunk, scale, dtype)], [[state] for state in wide_states])
        roles = ("master", *widened_states)
        for role, narrow, wide in zip(roles, (master_chunk, *states_chunk), (wide_master, *wide_states), strict=True):
            if wide is narrow:
                continue
            if rounding is None:
                narrow.copy_(wide)
            else:
                rounding.store(wide, narrow, role=role, start=number * chunk)
        if out_chunk is not None:
            out_chunk.copy_(wide_master if rounding is None else master_chunk)


def default_chunk_numel(device: torch.device) -> int:
    """Returns the chunk length for ``device``, in elements: a multiple of :data:`ALIGNMENT`."""
    if not get_accelerator().shares_host_memory(device):
        return DEVICE_CHUNK_NUMEL
    return CPU_CHUNK_NUMEL * min(torch.get_num_threads(), _MAX_THREAD_FACTOR)


def _widened(role: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype:
        return tensor
    return scratch(role, tensor.numel(), dtype, tensor.device).copy_(tensor)


def _scaled(tensor: Tensor, scale: float | Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns ``tensor`` in ``dtype`` times ``scale``; ``tensor`` itself where that changes nothing."""
    if tensor.dtype is dtype:
        if scale is None:
            return tensor
        return torch.mul(tensor, scale, out=scratch("grad", tensor.numel(), dtype, tensor.device))
    wide = scratch("grad", tensor.numel(), dtype, tensor.device).copy_(tensor)
    # Multiplied after widening: a product rounded to 16 bits would lose digits that the fp32 master can hold.
    return wide if scale is None else wide.mul_(scale)


def _check(master: Tensor, grad: Tensor, states: Sequence[Tensor], out: Tensor | None) -> None:
    others = {"grad": grad, **{f"state {i}": state for i, state in enumerate(states)}}
    if out is not None:
        others["out"] = out
    if master.dim() != 1 or not master.is_contiguous():
        raise ValueError(
            f"master: expected a 1-D contiguous tensor, found shape {tuple(master.shape)}; flatten it first"
        )
    for name, tensor in others.items():
        if tensor.shape != master.shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name}: expected a contiguous tensor with the shape of master, {tuple(master.shape)}, found shape "
                f"{tuple(tensor.shape)} and strides {tensor.stride()}; pass one of that shape"
            )
        if tensor.device != master.device or not tensor.is_floating_point():
            raise ValueError(
                f"{name}: expected floating point on {master.device}, where master is, found {tensor.dtype} on "
                f"{tensor.device}; convert it first"
            )


class _Scratch(threading.local):
    """Scratch buffers of one thread, because host updates may run on several threads at once."""

    def __init__(self) -> None:
        self.by_key: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}


_buffers = _Scratch()


def scratch(role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns an uninitialized 1-D tensor, reused between calls on the CPU.

    The allocator would return a MiB to the system after each use, and the next use would cause page faults again.
    Accelerators have caching allocators, so there a new tensor is made, which is also safe across streams.

    Args:
        role: Name of the buffer. Buffers that are in use at the same time need different roles.
    """
    if not get_accelerator().shares_host_memory(device):
        return torch.empty(numel, dtype=dtype, device=device)
    buffer = _buffers.by_key.get((role, dtype, device))
    if buffer is None or buffer.numel() < numel:
        with torch.inference_mode(False):  # an inference tensor could not be written to from ordinary code later
            buffer = torch.empty(numel, dtype=dtype, device=device)
        _buffers.by_key[role, dtype, device] = buffer
    return buffer[:numel]


def drop_scratch(device: torch.device) -> None:
    """Frees the buffers that :func:`scratch` keeps for ``device`` and this thread."""
    for key in [key for key in _buffers.by_key if key[2] == device]:
        del _buffers.by_key[key]
