"""Range checks that the optimizers share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def check_hyperparameters(
    optimizer: object,
    *,
    lr: float | Tensor,
    betas: Sequence[float] = (),
    eps: float = 0.0,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> None:
    """Refuses numbers that no step could use; a tensor ``lr`` must be a scalar (one element).

    Raises:
        ValueError: Names the optimizer, the argument and the value.
    """
    name = type(optimizer).__name__
    if amsgrad:
        raise ValueError(f"{name} has no AMSGrad variant; remove amsgrad=True or use torch.optim's class")
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"{name}: a tensor lr must hold one element, but has shape {tuple(lr.shape)}")
    for argument, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
        if not value >= 0:
            raise ValueError(f"{name}: {argument} must be at least 0, but is {value}")
    for position, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas[{position}] must lie in [0, 1), but is {beta}")
