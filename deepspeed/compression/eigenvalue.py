"""The dominant eigenvalue of the loss's Hessian in each block of layers, by power iteration.

A Hessian-vector product is the gradient of the gradient along that vector (Pearlmutter 1994), so the Hessian is never
formed. Rounding harms blocks with large eigenvalues more (Q-BERT, arXiv 1909.05840).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist

Mean = Callable[[torch.Tensor], torch.Tensor]
"""Returns the mean over ranks of a 1-D fp32 tensor, bitwise equal on all of them."""


@dataclass(frozen=True)
class PowerIteration:
    """The parameters of a power iteration."""

    max_iter: int = 100  # maximum number of Hessian-vector products
    tol: float = 1e-2  # relative change of the eigenvalue below which the iteration stops
    stability: float = 0.0  # added to the norm by which a vector is divided

    def dominant(
        self,
        gradients: Sequence[torch.Tensor | None],
        parameters: Sequence[torch.Tensor],
        *,
        scale: float = 1.0,
        seed: int = 0,
        mean: Mean | None = None,
    ) -> tuple[float, int]:
        """Returns the Hessian's eigenvalue of largest magnitude, with its sign, and the number of products.

        ``gradients`` are those of ``scale`` times the loss with their graph, of any shape, None for a parameter without
        one. Equal seeds give equal start vectors. The eigenvalue is 0 if the loss is linear in the parameters or a
        product is not finite.

        Args:
            mean: Averages products over ranks, which must then all call this; None: uses this process's loss alone.
        """
        device = parameters[0].device
        generator = torch.Generator().manual_seed(seed)
        vector = torch.randn(sum(p.numel() for p in parameters), generator=generator).to(device)
        vector /= vector.norm()
        value = 0.0
        for count in range(1, self.max_iter + 1):
            product = _product(gradients, parameters, vector).div_(scale)
            if mean is not None:
                product = mean(product)
            before, value = value, float(product.dot(vector))
            norm = float(product.norm())
            if norm == 0 or not math.isfinite(norm):
                return 0.0, count
            if count > 1 and abs(value - before) < self.tol * abs(value):
                return value, count
            vector = product / (norm + self.stability)
        return value, self.max_iter


def differentiate(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], **how: Any) -> tuple[Any, ...]:
    """Returns ``torch.autograd.grad`` in the shapes of ``inputs``; DeepSpeedConfigError without a second derivative."""
    try:
        return torch.autograd.grad(outputs, inputs, allow_unused=True, retain_graph=True, **how)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeepSpeedConfigError(
            f"eigenvalue.enabled: the loss cannot be differentiated twice ({str(error).splitlines()[0]}); train "
            'without fused attention (attn_implementation="eager" of a Transformers model, or '
            "torch.nn.attention.sdpa_kernel(SDPBackend.MATH) around the forward), without torch.compile and with "
            "use_reentrant=False in checkpointing, or set eigenvalue.enabled to false"
        ) from error


def _product(
    gradients: Sequence[torch.Tensor | None], parameters: Sequence[torch.Tensor], vector: torch.Tensor
) -> torch.Tensor:
    """Returns the Hessian times ``vector``, 1-D in fp32; zeros for parameters on which no gradient depends."""
    parts = vector.split([p.numel() for p in parameters])
    pairs = [
        (g, part.view_as(g).to(g.dtype))
        for g, part in zip(gradients, parts, strict=True)
        if g is not None and g.requires_grad
    ]
    if not pairs:
        return torch.zeros_like(vector)
    found = differentiate([g for g, _ in pairs], parameters, grad_outputs=[part for _, part in pairs])
    rows = [torch.zeros_like(p) if f is None else f for f, p in zip(found, parameters, strict=True)]
    return torch.cat([row.detach().reshape(-1).float() for row in rows])


def as_shares(values: Sequence[float]) -> list[float]:
    """Returns magnitudes divided by the largest; 1 for a zero, because that means unknown."""
    largest = max(map(abs, values), default=0.0)
    return [abs(value) / largest if value else 1.0 for value in values]


def blocks_of(model: nn.Module, layer_name: str, layer_num: int) -> dict[str, nn.Module]:
    """Returns the first ``layer_num`` (0: all) blocks by name; DeepSpeedConfigError where there are fewer."""
    try:
        parent = model.get_submodule(layer_name)
    except AttributeError:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        raise DeepSpeedConfigError(
            f"eigenvalue.layer_name: {type(model).__name__} has no module {layer_name!r}; name the one that holds the "
            f"blocks, as model.named_modules() does (lists of modules in it: {', '.join(lists) or 'none'})"
        ) from None
    found = {f"{layer_name}.{name}" if layer_name else name: block for name, block in parent.named_children()}
    if len(found) < max(layer_num, 1):
        raise DeepSpeedConfigError(
            f"eigenvalue.layer_num: expected {layer_num or 'all'} blocks in {layer_name!r}, found "
            f"{len(found)}; set it to at most as many, or to 0 for all of them"
        )
    return dict(list(found.items())[: layer_num or None])


class Eigenvalue:
    """Computes eigenvalues of the blocks of a model, for programs that run the backward themselves.

    With ``eigenvalue.enabled`` in the configuration the engine computes them.

    Args:
        tol: Relative change of the eigenvalue below which the iteration stops.
        stability: Added to the norm by which a vector is divided.
        gas_boundary_resolution: Updates between two computations; only stored, for the program to read.
    """

    def __init__(
        self,
        verbose: bool = False,
        max_iter: int = 100,
        tol: float = 1e-2,
        stability: float = 0,
        gas_boundary_resolution: int = 1,
        layer_name: str = "",
        layer_num: int = 0,
    ) -> None:
        self.verbose = verbose
        self.max_iter, self.tol, self.stability = max_iter, tol, stability
        self.gas_boundary_resolution = gas_boundary_resolution
        self.layer_name, self.layer_num = layer_name, layer_num

    def compute_eigenvalue(
        self, module: nn.Module, device: Any = None, scale: float = 1.0
    ) -> dict[int, tuple[float, int]]:
        """Returns the relative eigenvalue and number of its block, by ``id`` of each parameter with ``.grad``.

        Call it after ``loss.backward(create_graph=True)``.

        Relative is the magnitude divided by the largest.

        Args:
            device: Ignored: each block computes on the device of its parameters.

        Raises:
            DeepSpeedConfigError: ``layer_name`` or ``layer_num`` does not fit the model, or the loss has no second
                derivative.
            ValueError: No parameter of a block has a gradient with a graph.
        """
        power = PowerIteration(self.max_iter, self.tol, self.stability)
        values, owned = [], []
        for number, (name, block) in enumerate(blocks_of(module, self.layer_name, self.layer_num).items()):
            parameters = [p for p in block.parameters() if p.grad is not None and p.grad.requires_grad]
            if not parameters:
                raise ValueError(
                    f"compute_eigenvalue: no parameter of {name} has a gradient with a graph; run "
                    "loss.backward(create_graph=True) before it, and keep the gradients"
                )
            value, count = power.dominant([p.grad for p in parameters], parameters, scale=scale, seed=number)
            if self.verbose:
                log_dist(f"eigenvalue of {name}: {value:.6g} after {count} products")
            values.append(value)
            owned.append(list(block.parameters()))
        shares = as_shares(values)
        return {id(p): (shares[number], number) for number, group in enumerate(owned) for p in group}
