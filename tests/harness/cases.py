"""Rows of a table: a model that an engine trains beside plain torch on everybody's batches, compared step by step.

CASES = [Case("tied", Tied, loss), Case("frozen", Frozen, loss, stages=STAGE_3)]

@on_ranks(2)
def test_models_train_as_in_plain_torch():
    check(*CASES)

A test whose steps are its own trains an engine beside a :class:`Plain` model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.engine import DeepSpeedEngine
from tests.engine.support import SHARDED, adamw, engine_of
from tests.harness.compare import assert_states_equal, on_first_rank
from tests.zero.reading import full_masters, full_params

# Nothing kept between forward and backward and nothing ahead; and the other extreme, as most people run it.
LIMITS: dict[str, dict[str, Any]] = {"all sharded": SHARDED, "default": {"stage3_param_persistence_threshold": 0}}
EVERY_STAGE: tuple[tuple[int, dict[str, Any]], ...] = (
    *((stage, {}) for stage in range(3)),
    *((3, limits) for limits in LIMITS.values()),
)
STAGE_3 = EVERY_STAGE[3:]

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""``loss(model, step, rank)``: the loss of one rank's batch."""


def seeded(make: Callable[[], nn.Module], seed: int = 3) -> Any:
    """Returns the model with the values of ``seed``."""
    torch.manual_seed(seed)
    return make()


class Plain:
    """A model in plain torch, with the values of ``seeded(make)``, which trains on the batches of all ranks."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        ranks: int | None = None,
        seed: int = 3,
    ) -> None:
        self.model = seeded(make, seed)
        self.optimizer = optimizer(self.model)
        self.ranks = ranks or (dist.get_world_size() if dist.is_initialized() else 1)

    def step(self, loss: Callable[[nn.Module, int], torch.Tensor], *, clip: float = 0.0) -> list[torch.Tensor]:
        """Updates by the mean of ``loss(model, rank)`` over the ranks, and returns these losses."""
        self.optimizer.zero_grad()
        losses = []
        for rank in range(self.ranks):
            losses.append(loss(self.model, rank))
            (losses[-1] / self.ranks).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the parameters by name."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def assert_masters(self, engine: DeepSpeedEngine, where: str = "", **tolerance: float) -> None:
        """As :func:`assert_masters`, with the weights of this model."""
        assert_masters(engine, dict(self.model.named_parameters(remove_duplicate=False)), where, **tolerance)


def assert_masters(
    engine: DeepSpeedEngine, weights: Mapping[str, torch.Tensor], where: str = "", **tolerance: float
) -> None:
    """Asserts that the fp32 weights of the engine, frozen ones too, are ``weights``, by name. A collective."""
    limits = {"rtol": 1e-5, "atol": 1e-6, **tolerance}
    half = (torch.float16, torch.bfloat16)
    params = {n: value.float() if value.dtype in half else value for n, value in full_params(engine).items()}
    for name, value in {**params, **full_masters(engine)}.items():
        expected = weights[name.replace("_orig_mod.", "")].detach()
        torch.testing.assert_close(value, expected, msg=lambda text, n=name: f"{where}, {n}: {text}", **limits)


@dataclass(frozen=True)
class Case:
    """One row.

    Attributes:
        name: What the row is about.
        model: Builds the model; the seed is set before.
        loss: See :data:`Loss`.
        steps: Updates.
        stages: ZeRO stages with further keys of their section.
        change: Applied to both models before each step.
        prepare: Applied to the engine's model before ``initialize``.
        ready: Called with the engine before the first step.
        own_backward: ``loss.backward()`` instead of ``engine.backward(loss)``.
        tolerance: Of ``torch.testing.assert_close``.
        config: Further sections of the configuration.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    steps: int = 3
    stages: Sequence[tuple[int, dict[str, Any]]] = EVERY_STAGE
    change: Callable[[nn.Module, int], None] | None = None
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model
    ready: Callable[[DeepSpeedEngine], None] = lambda engine: None
    own_backward: bool = False
    tolerance: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


@on_first_rank
def _plain_steps(case: Case, ranks: int) -> list[tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Trains the row in plain torch; returns the losses of all ranks and the weights after each step."""
    plain, steps = Plain(case.model, ranks=ranks), []
    for step in range(case.steps):
        if case.change is not None:
            case.change(plain.model, step)
        losses = plain.step(lambda model, of, step=step: case.loss(model, step, of))
        weights = {n: p.detach().clone() for n, p in plain.model.named_parameters(remove_duplicate=False)}
        steps.append(([loss.detach() for loss in losses], weights))
    return steps


def check(*cases: Case) -> None:
    """Trains each row both ways; compares losses and weights after every step. All ranks must call."""
    rank = dist.get_rank()
    for case in cases:
        expected = _plain_steps(case, dist.get_world_size())
        for stage, zero in case.stages:
            engine = engine_of(case.prepare(seeded(case.model)), stage, zero=zero, **case.config)
            case.ready(engine)
            for step, (losses, weights) in enumerate(expected):
                if case.change is not None:
                    case.change(engine.module, step)
                loss = case.loss(engine, step, rank)
                loss.backward() if case.own_backward else engine.backward(loss)
                engine.step()
                where = f"{case.name}, stage {stage}, {zero}, step {step}"
                limits = {"rtol": 1e-5, "atol": 1e-6, **case.tolerance}
                torch.testing.assert_close(
                    loss.detach(), losses[rank], msg=lambda text, at=where: f"{at}, loss: {text}", **limits
                )
                assert_masters(engine, weights, where, **case.tolerance)
            engine.destroy()


@dataclass(frozen=True)
class Cell:
    """Settings of one engine that trains, is saved, and goes on from the file.

    Attributes:
        stage: Of ZeRO.
        precision: "fp32", "bf16" or "fp16".
        accumulation: Micro-batches of an update.
        offload: Masters are in host memory, at stage 3 parameters too.
        recompute: The model's own checkpointing is on.
    """

    stage: int
    precision: str = "fp32"
    accumulation: int = 1
    offload: bool = False
    recompute: bool = False

    def engine(self, model: nn.Module, **config: Any) -> DeepSpeedEngine:
        """Returns an engine around the model with these settings, and with further sections of a configuration."""
        if self.recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        sections: dict[str, Any] = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        if self.precision == "fp16":
            sections["fp16"]["initial_scale_power"] = 6
        zero: dict[str, Any] = {"stage3_param_persistence_threshold": 0} if self.stage == 3 else {}
        if self.offload:
            kinds = ("offload_optimizer", "offload_param")[: 2 if self.stage == 3 else 1]
            zero |= {kind: {"device": "cpu"} for kind in kinds}
        return engine_of(model, self.stage, zero=zero, accumulation=self.accumulation, **{**sections, **config})


StepLoss = Callable[[nn.Module, int, int, int], torch.Tensor]
"""``loss(model, step, micro_batch, rank)``."""


def losses(engine: DeepSpeedEngine, loss: StepLoss, steps: Sequence[int]) -> list[float]:
    """Trains an engine for ``steps``, and returns the losses of this rank's micro-batches."""
    found = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            value = loss(engine, step, micro, dist.get_rank())
            engine.backward(value)
            engine.step()
            found.append(value.item())
    return found


def train_and_resume(
    start: Callable[[], DeepSpeedEngine],
    loss: StepLoss,
    folder: Any,
    *,
    steps: int,
    saved: int,
    look: Callable[[DeepSpeedEngine], Any] = lambda engine: None,
    loaded: Callable[[DeepSpeedEngine], Any] = lambda engine: None,
) -> list[float]:
    """Trains an engine, and another one from the checkpoint of the first, which must have the same losses.

    Args:
        start: Makes an engine.
        loss: Of a micro-batch.
        folder: Of the checkpoint.
        steps: Updates of the first engine.
        saved: Updates before it is saved.
        look: Called with each engine at its end; both must return the same.
        loaded: Called with the second engine when it has loaded.

    Returns:
        The losses of the first one.
    """
    engine = start()
    before = losses(engine, loss, range(saved))
    engine.save_checkpoint(folder)
    rest = losses(engine, loss, range(saved, steps))
    again = start()
    again.load_checkpoint(folder)
    loaded(again)
    assert losses(again, loss, range(saved, steps)) == rest, "resumed"
    assert_states_equal(look(again), look(engine))
    engine.destroy()
    again.destroy()
    return before + rest
