"""An engine beside plain torch on everybody's batches, for models that nobody wrote with sharding in mind."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import adamw, engine_of
from tests.zero.reading import full_masters, full_params

# Nothing kept between forward and backward and nothing ahead; and the other extreme, as most people run it.
LIMITS: dict[str, dict[str, Any]] = {
    "all sharded": {
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0,
    },
    "default": {"stage3_param_persistence_threshold": 0},
}
EVERY_STAGE: tuple[tuple[int, dict[str, Any]], ...] = (
    *((stage, {}) for stage in range(3)),
    *((3, limits) for limits in LIMITS.values()),
)
STAGE_3 = EVERY_STAGE[3:]

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""``loss(model, step, rank)``: the loss of one rank's batch."""


def close(found: dict[str, torch.Tensor], plain: nn.Module, where: str, **tolerance: float) -> None:
    """Every trained master equals the parameter of the plain model."""
    limits = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    for name, value in found.items():
        expected = plain.get_parameter(name).detach()
        torch.testing.assert_close(value, expected, msg=lambda text, n=name: f"{where}, {n}: {text}", **limits)


def masters(engine: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    """The fp32 weights, frozen ones included, those of a compiled model under the names of the plain one."""
    half = (torch.float16, torch.bfloat16)
    params = full_params(engine).items()
    weights = {name: value.float() if value.dtype in half else value for name, value in params}
    return {name.replace("_orig_mod.", ""): value for name, value in {**weights, **full_masters(engine)}.items()}


def compare(
    make: Callable[[], nn.Module],
    loss: Loss,
    *,
    steps: int = 3,
    stages: Sequence[tuple[int, dict[str, Any]]] = EVERY_STAGE,
    change: Callable[[nn.Module, int], None] | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    ready: Callable[[DeepSpeedEngine], None] | None = None,
    own_backward: bool = False,
    tolerance: dict[str, float] | None = None,
    **config: Any,
) -> None:
    """Trains the same model both ways and compares losses and weights after every step. All ranks must call it.

    Args:
        make: Builds the model; the seed is set before.
        loss: See :data:`Loss`.
        steps: Updates.
        stages: ZeRO stages with further keys of their section.
        change: Applied to both models before each step.
        prepare: Applied to the engine's model before ``initialize``.
        ready: Called with the engine before the first step.
        own_backward: ``loss.backward()`` instead of ``engine.backward(loss)``.
        tolerance: Of ``torch.testing.assert_close``.
        **config: Further sections of the configuration.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for stage, zero in stages:
        torch.manual_seed(3)
        plain = make()
        torch.manual_seed(3)
        model = make()
        model = model if prepare is None else prepare(model)
        engine = engine_of(model, stage, zero=zero, **config)
        if ready is not None:
            ready(engine)
        optimizer = adamw(plain)
        for step in range(steps):
            if change is not None:
                change(plain, step)
                change(engine.module, step)
            mine = loss(engine, step, rank)
            mine.backward() if own_backward else engine.backward(mine)
            engine.step()
            optimizer.zero_grad()
            for other in range(ranks):
                expected = loss(plain, step, other)
                (expected / ranks).backward()
                if other == rank:
                    where = f"stage {stage}, {zero}, step {step}"
                    limits = {"rtol": 1e-5, "atol": 1e-6, **(tolerance or {})}
                    torch.testing.assert_close(mine.detach(), expected.detach(), **limits)
            optimizer.step()
            close(masters(engine), plain, where, **(tolerance or {}))
        engine.destroy()


def weights_of_torch(make: Callable[[], nn.Module], loss: Loss, *, steps: int, ranks: int) -> dict[str, torch.Tensor]:
    """The weights after one process of plain torch has trained on the batches of all ranks.

    Args:
        make: Builds the model; the seed is set before.
        loss: See :data:`Loss`.
        steps: Updates.
        ranks: Whose mean gradient an update takes.
    """
    torch.manual_seed(3)
    model = make()
    optimizer = adamw(model)
    for step in range(steps):
        optimizer.zero_grad()
        for of_rank in range(ranks):
            (loss(model, step, of_rank) / ranks).backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
