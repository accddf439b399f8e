"""Activations of gated experts, by the names that ``expert_parallel.expert_activation`` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.stacked_experts import gate_and_up, swiglu_constants

Gated = Callable[[Tensor, Tensor, float, float], Tensor]
"""Function of gate, up, alpha and limit."""


@dataclass(frozen=True)
class ExpertActivation:
    """Describes an activation of gated experts."""

    fn: Gated  # computes the second product's input from gate, up, alpha and limit
    fused_fn: Gated | None = None  # computes the same on CUDA devices; None: ``fn`` does
    uses_alpha: bool = False  # ``fn`` depends on alpha. For programs that read it.
    uses_limit: bool = False  # ``fn`` depends on limit. For programs that read it.
    gate_fn: Callable[[Tensor], Tensor] | None = None  # The function of the gate alone. For programs that read it.
    # Computes the same on CUDA devices from gate and up in one tensor, alpha and limit; None: ``fused_fn`` does. Not
    # used where gate and up are interleaved.
    packed_fused_fn: Callable[[Tensor, float, float], Tensor] | None = None


def _swiglu_oai(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)


EXPERT_ACTIVATIONS = {
    "swiglu": ExpertActivation(lambda gate, up, _alpha, _limit: F.silu(gate) * up, gate_fn=F.silu),
    "geglu_tanh": ExpertActivation(lambda gate, up, _alpha, _limit: F.gelu(gate, approximate="tanh") * up),
    "swiglu_clamped": ExpertActivation(
        lambda gate, up, _alpha, limit: F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), uses_limit=True
    ),
    "swiglu_oai": ExpertActivation(_swiglu_oai, uses_alpha=True, uses_limit=True),
}
"""All known activations, by name."""


def register_expert_activation(
    name: str,
    fn: Gated,
    *,
    fused_fn: Gated | None = None,
    uses_alpha: bool = False,
    uses_limit: bool = False,
    gate_fn: Callable[[Tensor], Tensor] | None = None,
    packed_fused_fn: Callable[[Tensor, float, float], Tensor] | None = None,
) -> None:
    """Adds a name that ``expert_parallel.expert_activation`` takes. Every rank must call it, before ``initialize``.

    :class:`ExpertActivation` explains the other arguments.

    Raises:
        ValueError: The name is taken.
    """
    if name in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"register_expert_activation({name!r}): expected a new name, found that of a registered activation; "
            "choose another one"
        )
    EXPERT_ACTIVATIONS[name] = ExpertActivation(fn, fused_fn, uses_alpha, uses_limit, gate_fn, packed_fused_fn)


def get_expert_activation(name: str) -> ExpertActivation:
    """Returns the activation of a name.

    Raises:
        ValueError: The name is not registered.
    """
    if name not in EXPERT_ACTIVATIONS:
        raise ValueError(
            f"expert activation {name!r}: expected one of {', '.join(EXPERT_ACTIVATIONS)}; register it with "
            "deepspeed.moe.ep_experts.register_expert_activation"
        )
    return EXPERT_ACTIVATIONS[name]


def check_activation(name: str | None, path: str, module: nn.Module) -> None:
    """Raises if the experts ``module`` at ``path`` cannot have the activation ``name``; None: their own.

    Raises:
        DeepSpeedConfigError: The name is not registered, or the experts have no gate.
    """
    if name is None:
        return
    try:
        get_expert_activation(name)
    except ValueError as error:
        raise DeepSpeedConfigError(f"expert_parallel.expert_activation: {error}") from None
    if module._parameters.get("gate_up_proj") is None:
        raise DeepSpeedConfigError(
            f"expert_parallel.expert_activation {name!r}: expected experts with a gate, found {path!r} "
            f"({type(module).__name__}) without; leave the key out"
        )


def activation_of(name: str, module: Any) -> Callable[[Tensor], Tensor]:
    """Returns the activation of a registered name as a function of the first product's result ``[n, 2 I]``.

    The experts, or their configuration, may state alpha and limit.
    """
    found = get_expert_activation(name)
    alpha, limit = swiglu_constants(module)

    def apply(gate_up: Tensor) -> Tensor:
        if gate_up.is_cuda and found.packed_fused_fn is not None and getattr(module, "is_concatenated", True):
            return found.packed_fused_fn(gate_up, alpha, limit)
        fn = found.fused_fn if gate_up.is_cuda and found.fused_fn is not None else found.fn
        return fn(*gate_and_up(module, gate_up), alpha, limit)

    return apply
