"""One short training that every test of offload runs, with and without it, and what is compared."""

from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import deepspeed
from deepspeed.offload import tiers
from deepspeed.zero.update.masters import MasterBucket
from tests.harness.toy_models import awkward, losses_of, make_batch, param_groups

OPTIMIZER = {"type": "AdamW", "params": {"lr": 0.01, "eps": 1e-6}}


class Elsewhere:
    """Makes the engine believe that host memory is not the device's."""

    def __enter__(self) -> None:
        real = tiers.OffloadTiers.__init__

        def init(self: Any, *arguments: Any, **settings: Any) -> None:
            real(self, *arguments, **{**settings, "_host_is_device": False})

        self.patches = [
            mock.patch.object(tiers.OffloadTiers, "__init__", init),
            mock.patch.object(MasterBucket, "writes_out_in_place", property(lambda self: self.out is None)),
            mock.patch.object(MasterBucket, "_can_share", lambda self: False),
        ]
        for patch in self.patches:
            patch.start()

    def __exit__(self, *_: Any) -> None:
        for patch in self.patches:
            patch.stop()


@dataclass
class Trained:
    """What one rank has after training.

    Attributes:
        norms: Of every step.
        masters: fp32 weights of this rank, by bucket.
        compute: What forward uses, by bucket.
        states: Optimizer state by run.
        tiers: Live bytes by kind and tier.
        rows: The engine's memory report.
    """

    norms: list[float]
    masters: list[torch.Tensor]
    compute: list[torch.Tensor]
    states: list[dict[str, Any]]
    tiers: dict[tuple[str, str], int]
    rows: list[tuple[str, int, int, str]]


def config(stage: int, *, precision: str = "fp32", accumulation: int = 1, clip: float = 0.5, **zero: Any) -> Any:
    """A configuration in which everything that is not tiny is sharded."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "optimizer": OPTIMIZER,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }
    if precision != "fp32":
        made[precision] = {"enabled": True}
    if precision == "fp16":
        made["fp16"]["initial_scale_power"] = 8
    return made


def train_some(engine: Any, steps: range, overflow_at: int = -1) -> list[float]:
    """Trains a few steps; returns the gradient norms."""
    norms = []
    for step in steps:
        for micro in range(engine.gradient_accumulation_steps()):
            batch = make_batch(
                step,
                micro,
                dist.get_rank(),
                branch=step % 2 == 0,
                boost=float("inf") if step == overflow_at else 1.0,
            )
            losses = losses_of(engine(batch))
            engine.backward(losses.loss + losses.auxiliary)
            engine.step()
        norms.append(engine.get_global_grad_norm())
    return norms


def make_engine(settings: dict[str, Any]) -> Any:
    """An engine over the awkward model."""
    model = awkward()
    return deepspeed.initialize(model=model, model_parameters=param_groups(model), config=settings)[0]


def collect(engine: Any, norms: list[float]) -> Trained:
    """Copies what is compared."""
    runtime, optimizer = engine._runtime, engine.basic_optimizer
    rows = engine.memory_report()
    return Trained(
        norms=norms,
        masters=[master.flat.detach().clone() for master in runtime.masters],
        compute=[bucket.shard.detach().clone() for bucket in runtime.buckets],
        states=[
            {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
            for master in runtime.masters
            for run in master.runs
            if (state := optimizer.state.get(run.param))
        ],
        tiers={(kind.value, tier.value): n for (kind, tier), n in runtime.memory_tracker._live.items() if n},
        rows=rows,
    )


def train_each(every: list[dict[str, Any]], steps: int = 3) -> list[Trained]:
    """Body of a rank: one training after the other."""
    return [train(settings, steps) for settings in every]


def train(settings: dict[str, Any], steps: int = 3, overflow_at: int = -1) -> Trained:
    """Body of a rank."""
    engine = make_engine(settings)
    trained = collect(engine, train_some(engine, range(steps), overflow_at))
    engine.destroy()
    return trained
