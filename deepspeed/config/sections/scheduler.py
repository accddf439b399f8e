"""``scheduler``, and for each schedule the parameters it takes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, Int, IntList, PerGroup


class Scheduler(Section):
    """The learning-rate schedule, advanced once per optimizer step that was not skipped."""

    type: str | None = key(
        None,
        "Name of the schedule, in this spelling: LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR, or a "
        "class of torch.optim.lr_scheduler.",
    )
    params: dict[str, Any] = key(None, "Arguments of the schedule, listed per schedule below.", factory=dict)


class SchedulerParams(Section):
    """Base of the parameter tables; a rate may be a list with one entry per parameter group.

    Where groups have rates of their own, different from the optimizer's, one number as the greatest rate holds for the
    others: a group rises to its own rate.
    """


class OwnParameters(SchedulerParams):
    """Holds the parameters that the schedules of this package share."""

    last_batch_iteration: Int = key(-1, "Step to resume from; -1: the start.", unit="steps", minimum=-1)


WarmupType = Annotated[Literal["log", "linear"], AnyCase]


def warmup_steps() -> Any:
    """Declares the length of the rise."""
    return key(1000, "Steps of the rise; at least 2, also for 0 and 1.", unit="steps", minimum=0)


class WarmupLRParams(OwnParameters):
    """WarmupLR: rises from warmup_min_lr to warmup_max_lr, then stays."""

    warmup_min_lr: PerGroup = key(0.0, "Rate at the start.", minimum=0)
    warmup_max_lr: PerGroup | None = key(None, "Rate after the rise.", minimum=0, null_means="the optimizer's lr")
    warmup_num_steps: Int = warmup_steps()
    warmup_type: WarmupType = key("log", "Shape of the rise.")


class WarmupDecayLRParams(OwnParameters):
    """WarmupDecayLR: the rise of WarmupLR, then a linear decay to warmup_min_lr at total_num_steps."""

    total_num_steps: Int = key(..., "Steps of the whole run.", unit="steps", minimum=0)
    warmup_min_lr: PerGroup = key(0.0, "Rate at the start and the end.", minimum=0)
    warmup_max_lr: PerGroup = key(0.001, "Rate after the rise.", minimum=0, must_fill=True)
    warmup_num_steps: Int = warmup_steps()
    warmup_type: WarmupType = key("log", "Shape of the rise.")


class WarmupCosineLRParams(OwnParameters):
    """WarmupCosineLR: a rise and then half a cosine, as ratios of the optimizer's lr. The first update has rate 0."""

    total_num_steps: Int = key(..., "Steps of the whole run.", unit="steps", minimum=0)
    warmup_min_ratio: Float = key(0.0, "Ratio of the rate to the optimizer's lr at the start.", minimum=0)
    warmup_num_steps: Int = warmup_steps()
    cos_min_ratio: Float = key(0.0001, "Ratio of the rate to the optimizer's lr at the end.", minimum=0)
    warmup_type: WarmupType = key("log", "Shape of the rise.")


class OneCycleParams(OwnParameters):
    """OneCycle: the rate rises, falls, then decays; the momentum moves in the opposite direction."""

    cycle_min_lr: PerGroup = key(..., "Rate at the start and end of the cycle.", minimum=0)
    cycle_max_lr: PerGroup = key(..., "Rate in the middle.", minimum=0)
    decay_lr_rate: Float = key(
        0.0, "Decay of the rate after the cycle: after n units it is cycle_min_lr / (1 + n decay_lr_rate).", minimum=0
    )
    cycle_first_step_size: Int = key(2000, "Steps up.", unit="steps", above=0)
    cycle_second_step_size: Int | None = key(
        None, "Steps down.", unit="steps", minimum=0, null_means="cycle_first_step_size"
    )
    cycle_first_stair_count: Int = key(0, "Number of steps of a staircase on the way up; 0: continuous.", minimum=0)
    cycle_second_stair_count: Int | None = key(
        None, "Number of steps of a staircase on the way down.", minimum=0, null_means="cycle_first_stair_count"
    )
    decay_step_size: Int = key(0, "Steps per unit of decay; 0: no decay.", unit="steps", minimum=0)
    cycle_momentum: Bool = key(True, "Cycle the momentum too, for optimizers with betas.")
    cycle_min_mom: PerGroup = key(0.8, "Momentum in the middle.", minimum=0)
    cycle_max_mom: PerGroup = key(0.9, "Momentum at the start and end.", minimum=0)
    decay_mom_rate: Float = key(
        0.0,
        "Growth of the momentum after the cycle: after n units it is cycle_max_mom (1 + n decay_mom_rate).",
        minimum=0,
    )


class LRRangeTestParams(OwnParameters):
    """LRRangeTest: a growing learning rate, to find the range in which training works."""

    lr_range_test_min_lr: PerGroup = key(1e-3, "Rate at the start.", minimum=0, must_fill=True)
    lr_range_test_step_size: Int = key(2000, "Steps of one unit of growth.", unit="steps", above=0)
    lr_range_test_step_rate: Float = key(1.0, "Growth per unit, as a share of the rate at the start.", minimum=0)
    lr_range_test_staircase: Bool = key(False, "Grow in steps instead of continuously.")


class TorchParameters(SchedulerParams):
    """Holds the parameters that the classes of torch.optim.lr_scheduler share."""

    last_epoch: Int = key(-1, "Step to resume from; -1: the start.", unit="steps", minimum=-1)


class ConstantLRParams(TorchParameters):
    """torch's ConstantLR."""

    factor: Float = key(1 / 3, "Factor on the rate.", minimum=0, maximum=1)
    total_iters: Int = key(5, "Steps with the factor.", unit="steps", minimum=0)


class CosineAnnealingLRParams(TorchParameters):
    """torch's CosineAnnealingLR."""

    T_max: Int = key(..., "Steps of half a wave.", unit="steps", above=0)
    eta_min: Float = key(0.0, "Smallest rate.", minimum=0)


class CosineAnnealingWarmRestartsParams(TorchParameters):
    """torch's CosineAnnealingWarmRestarts."""

    T_0: Int = key(..., "Steps until the first restart.", unit="steps", above=0)
    T_mult: Int = key(1, "Factor on the period after each restart.", above=0)
    eta_min: Float = key(0.0, "Smallest rate.", minimum=0)


class CyclicLRParams(TorchParameters):
    """torch's CyclicLR."""

    base_lr: PerGroup = key(..., "Smallest rate.", minimum=0)
    max_lr: PerGroup = key(..., "Largest rate.", minimum=0)
    step_size_up: Int = key(2000, "Steps up.", unit="steps", above=0)
    step_size_down: Int | None = key(None, "Steps down.", unit="steps", above=0, null_means="step_size_up")
    mode: Literal["triangular", "triangular2", "exp_range"] = key("triangular", "Shape of the cycle.")
    gamma: Float = key(1.0, "Factor of exp_range.", minimum=0)
    scale_fn: Any = key(None, "Function for the scale; only from a program.")
    scale_mode: Literal["cycle", "iterations"] = key("cycle", "What scale_fn counts.")
    cycle_momentum: Bool = key(True, "Cycle the momentum too.")
    base_momentum: PerGroup = key(0.8, "Smallest momentum.", minimum=0)
    max_momentum: PerGroup = key(0.9, "Largest momentum.", minimum=0)


class ExponentialLRParams(TorchParameters):
    """torch's ExponentialLR."""

    gamma: Float = key(..., "Factor per step.", minimum=0)


class LambdaLRParams(TorchParameters):
    """torch's LambdaLR."""

    lr_lambda: Any = key(
        ..., "Gives for a step the factor on the initial rate; or a list of these. Only from a program."
    )


class MultiplicativeLRParams(TorchParameters):
    """torch's MultiplicativeLR."""

    lr_lambda: Any = key(
        ..., "Gives for a step the factor on the rate before; or a list of these. Only from a program."
    )


class LinearLRParams(TorchParameters):
    """torch's LinearLR."""

    start_factor: Float = key(1 / 3, "Factor at the start.", above=0, maximum=1)
    end_factor: Float = key(1.0, "Factor at the end.", minimum=0, maximum=1)
    total_iters: Int = key(5, "Steps from the first factor to the last.", unit="steps", above=0)


class MultiStepLRParams(TorchParameters):
    """torch's MultiStepLR."""

    milestones: IntList = key(..., "Steps at which the rate falls.", unit="steps", minimum=0)
    gamma: Float = key(0.1, "Factor on the rate at each of these steps.", minimum=0)


class OneCycleLRParams(TorchParameters):
    """torch's OneCycleLR."""

    max_lr: PerGroup = key(..., "Largest rate.", minimum=0)
    total_steps: Int | None = key(None, "Steps of the cycle.", unit="steps", above=0)
    epochs: Int | None = key(None, "Epochs of the cycle.", above=0)
    steps_per_epoch: Int | None = key(None, "Steps per epoch.", unit="steps", above=0)
    pct_start: Float = key(0.3, "Share of the steps in which the rate rises.", minimum=0, maximum=1)
    anneal_strategy: Literal["cos", "linear"] = key("cos", "Shape of the rise and of the fall.")
    cycle_momentum: Bool = key(True, "Cycle the momentum too.")
    base_momentum: PerGroup = key(0.85, "Smallest momentum.", minimum=0)
    max_momentum: PerGroup = key(0.95, "Largest momentum.", minimum=0)
    div_factor: Float = key(25.0, "Largest rate divided by the first.", above=0)
    final_div_factor: Float = key(1e4, "First rate divided by the last.", above=0)
    three_phase: Bool = key(
        False, "Fall to the first rate in as many steps as the rise, then to the last. false: one fall to the last."
    )


class PolynomialLRParams(TorchParameters):
    """torch's PolynomialLR."""

    total_iters: Int = key(5, "Steps until the rate is 0.", unit="steps", above=0)
    power: Float = key(1.0, "Power of the polynomial.", minimum=0)


class StepLRParams(TorchParameters):
    """torch's StepLR."""

    step_size: Int = key(..., "Steps from one fall to the next.", unit="steps", above=0)
    gamma: Float = key(0.1, "Factor on the rate at each of these steps.", minimum=0)


OWN_SCHEDULERS: dict[str, type[SchedulerParams]] = {
    "LRRangeTest": LRRangeTestParams,
    "OneCycle": OneCycleParams,
    "WarmupLR": WarmupLRParams,
    "WarmupDecayLR": WarmupDecayLRParams,
    "WarmupCosineLR": WarmupCosineLRParams,
}
TORCH_SCHEDULERS: dict[str, type[SchedulerParams]] = {
    "ConstantLR": ConstantLRParams,
    "CosineAnnealingLR": CosineAnnealingLRParams,
    "CosineAnnealingWarmRestarts": CosineAnnealingWarmRestartsParams,
    "CyclicLR": CyclicLRParams,
    "ExponentialLR": ExponentialLRParams,
    "LambdaLR": LambdaLRParams,
    "LinearLR": LinearLRParams,
    "MultiStepLR": MultiStepLRParams,
    "MultiplicativeLR": MultiplicativeLRParams,
    "OneCycleLR": OneCycleLRParams,
    "PolynomialLR": PolynomialLRParams,
    "StepLR": StepLRParams,
}
UNUSABLE_SCHEDULERS = {
    "ReduceLROnPlateau": "it wants a measured value at each step; step it from the program",
    "SequentialLR": "it is made of schedule objects; build it in the program and hand it to initialize",
    "ChainedScheduler": "it is made of schedule objects; build it in the program and hand it to initialize",
}
