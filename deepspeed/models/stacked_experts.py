"""Reads modules with stacked experts, the one form that mixtures of experts of the Transformers library have.

Such a module has the weights of all experts in one tensor for each product. Its inputs are tokens, the experts that a
router chose for them, and the weights of these.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

_TAKE_ALL = frozenset({"Llama4TextExperts"})
"""Classes that pass every token through every expert, without the choice of a router."""

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the biases that routers add to the scores by which they choose experts."""


@dataclass(frozen=True)
class ExpertParts:
    """Holds the weights of one module's experts."""

    # weight of the first product, three-dimensional; gate and up together where the experts have a gate
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor  # weight of the second product
    down_bias: torch.Tensor | None
    is_transposed: bool  # weights are ``[E, in, out]``, not ``[E, out, in]``
    between: Callable[[torch.Tensor], torch.Tensor]  # the function between the two products
    after: Callable[[torch.Tensor], torch.Tensor] | None  # the function after the second product, or None


@contextmanager
def experts_by_shapes(model: nn.Module) -> Iterator[None]:
    """Makes the experts of a Transformers model compute with shapes that do not depend on the routing, in the context.

    The library's default, ``grouped_mm``, refuses tensors without values unless they are bf16.
    """
    get, set_to = (getattr(model, f"{verb}_experts_implementation", None) for verb in ("get", "set"))
    if get is None or set_to is None or not any(map(stacked_weights, model.modules())):
        yield
        return
    before = get()
    try:
        set_to("batched_mm")
        yield
    finally:
        set_to(before)


def stacked_weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a module that have the names of stacked weights, whatever their shapes."""
    found = {name: module._parameters.get(name) for name in ("gate_up_proj", "up_proj", "down_proj")}
    return {name: weight for name, weight in found.items() if weight is not None}


def takes_routes(module: nn.Module) -> bool:
    """Returns whether a router decides what a module's experts get; shared experts get every token (Inkling)."""
    inputs = inspect.signature(module.forward).parameters.values()
    return takes_all(module) or len(inputs) >= 3 or any(one.kind is one.VAR_POSITIONAL for one in inputs)


def lacks(module: nn.Module, rows: Mapping[str, int]) -> str | None:
    """Returns in words what a module with stacked experts lacks to be supported; ``rows``: lengths of its weights."""
    if "down_proj" not in rows or not {"gate_up_proj", "up_proj"} & rows.keys():
        return "the stacked weights gate_up_proj (or up_proj) and down_proj"
    if _share_beyond(module, rows) is None:
        return (
            "transformers.integrations.use_experts_implementation on its class, which declares how its weights are "
            "laid out and what happens between the two products"
        )
    return None


def returns_tokens(module: nn.Module, rows: Mapping[str, int]) -> bool:
    """Returns whether a route beyond the experts gives its token back (zero experts of LongCat-Flash), or nothing."""
    return _share_beyond(module, rows) == 1.0


def experts_per_token(block: nn.Module) -> int | None:
    """Returns how many experts the router in ``block`` chooses for a token; None where it does not have the number."""
    found = (getattr(module, "top_k", None) for module in (*block.children(), block))
    return next((k for k in found if isinstance(k, int)), None)


def skips_tokens(block: nn.Module) -> bool:
    """Returns whether the router in ``block`` has a choice more than experts, which passes the token by (Zaya)."""
    return any(hasattr(module, "num_router_classes") for module in block.children())


def takes_all(module: nn.Module) -> bool:
    """Returns whether every expert of a module gets every token, without the choice of a router (Llama 4)."""
    return type(module).__name__ in _TAKE_ALL


def _share_beyond(module: nn.Module, rows: Mapping[str, int]) -> float | None:
    """Returns what a route beyond the experts gives: 0 or 1 times its token; None where it is not known.

    A class that does not declare how it computes is run with small weights. None, too, where the results are not those
    of a gate and an up projection one after the other, in weights ``[E, out, in]``.
    """
    is_declared = all(hasattr(module, name) for name in ("is_transposed", "_apply_gate"))
    if takes_all(module) or (is_declared and len(set(rows.values())) == 1):
        return 0.0
    if "gate_up_proj" not in rows:
        return None
    width, inner, total, experts = 3, 2, rows["gate_up_proj"], rows["down_proj"]
    draws = torch.Generator().manual_seed(0)
    up, down, x = (
        torch.randn(shape, generator=draws, device="cpu", dtype=torch.float32)
        for shape in ((total, 2 * inner, width), (experts, width, inner), (total, width))
    )
    small: Any = copy.copy(module)
    small._parameters = {**module._parameters, "gate_up_proj": up, "down_proj": down}
    index = torch.arange(total, device="cpu")[:, None].repeat(1, 2)
    weights = torch.tensor([[0.25, 0.75]], device="cpu").repeat(total, 1)
    try:
        with torch.no_grad():
            found = inspect.unwrap(type(module).forward)(small, x, index, weights)
            between = torch.einsum("eoi,ei->eo", up[:experts], x[:experts])
            expected = torch.einsum("eoi,ei->eo", down, _between(small, has_gate=True)(between))
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # the module computes something else
        return None
    shares = (0.0, 1.0) if total > experts else (0.0,)
    wanted = ((share, torch.cat([expected, share * x[experts:]])) for share in shares)
    return next((share for share, value in wanted if torch.allclose(found, value, atol=1e-5)), None)


def routes_in(index: Any, weights: Any, more: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns experts and weights, ``[S, k]``, from the first two arguments after the tokens, or keywords."""
    return (
        more["router_indices"] if index is None else index,
        more["routing_weights"] if weights is None else weights,
    )


def experts_given(module: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]) -> torch.Tensor | None:
    """Returns the experts ``[S, k]`` in the arguments of stacked experts; None where they get every token."""
    if takes_all(module):
        return None
    hidden = inputs[0] if inputs else next(iter(named.values()))
    index = inputs[1] if len(inputs) > 1 else named.get("top_k_index", named.get("router_indices"))
    return index.reshape(hidden.numel() // hidden.shape[-1], -1)


def parts_of(module: Any) -> ExpertParts:
    """Returns the weights and functions of a module's experts; :func:`lacks` must return None for it."""
    has_gate = module._parameters.get("gate_up_proj") is not None
    first = "gate_up_proj" if has_gate else "up_proj"
    return ExpertParts(
        up=getattr(module, first),
        up_bias=getattr(module, f"{first}_bias", None),
        down=module.down_proj,
        down_bias=getattr(module, "down_proj_bias", None),
        is_transposed=bool(getattr(module, "is_transposed", takes_all(module))),
        between=_between(module, has_gate),
        after=module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None,
    )


def gate_and_up(module: Any, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns gate and up, ``[..., rows]`` each, of ``[..., 2 * rows]``: one after the other or interleaved."""
    if getattr(module, "is_concatenated", True):
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up
    return gate_up[..., ::2], gate_up[..., 1::2]


def swiglu_constants(module: Any) -> tuple[float, float]:
    """Returns alpha and limit of a module's activation, or of its configuration; 1.702 and 7 where neither has them."""
    sources = (module, getattr(module, "config", None))
    found = []
    for names, default in ((("alpha", "swiglu_alpha"), 1.702), (("limit", "swiglu_limit"), 7.0)):
        values = (getattr(source, name, None) for source in sources for name in names)
        found.append(next((float(value) for value in values if isinstance(value, (int, float))), default))
    return found[0], found[1]


def _between(module: Any, has_gate: bool) -> Any:
    if not has_gate:
        return module.act_fn
    own = getattr(module, "_apply_gate", None)
    if callable(own):
        return own

    def apply_gate(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_and_up(module, gate_up)
        return module.act_fn(gate) * up

    return apply_gate
