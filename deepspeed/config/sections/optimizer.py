"""``optimizer``, and for each optimizer the parameters it takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, FloatList, FloatOrAuto, Int


class Optimizer(Section):
    """The optimizer, if the program does not pass one. Without any optimizer the engine cannot step."""

    type: str | None = key(
        None,
        "Name of the optimizer: Adam, AdamW, Adagrad, Lion, Lamb, Muon, OneBitAdam, OneBitLamb, ZeroOneAdam, SGD (any "
        "case), or an elementwise class of torch.optim, spelt as there.",
        null_means="the client's optimizer, or none",
    )
    params: dict[str, Any] = key(None, "Arguments of the optimizer, listed per optimizer below.", factory=dict)
    legacy_fusion: Bool = key(
        False, "The old fused fp16 wrapper.", no_effect="one wrapper serves all optimizers", removed="0.19.8"
    )

    def _own_features(self) -> Iterator[str]:
        params = OWN_OPTIMIZERS.get(self.type or "")
        if params is not None and params._feature is not None:
            yield params._feature


def lr(default: float) -> Any:
    """Declares the learning rate."""
    return key(
        default,
        'Learning rate. A scheduler may change it. "auto" must be filled in, as Accelerate and the Trainer do.',
        minimum=0,
        own_auto=True,
    )


def betas(default: tuple[float, float] = (0.9, 0.999)) -> Any:
    """Declares the decay rates of the two running averages."""
    return key(
        None, "Decay rates of the running averages.", factory=lambda: list(default), minimum=0, below=1, length=2
    )


def eps(default: float) -> Any:
    """Declares the term against division by zero."""
    return key(default, "Added to the denominator.", minimum=0)


def decay(default: float = 0.0) -> Any:
    """Declares the weight decay."""
    return key(default, "Weight decay.", minimum=0)


class OptimizerParams(Section):
    """Base of the parameter tables."""

    _keeps_own_states: ClassVar[bool] = False
    """Whether each rank has states of this optimizer that no other rank could replace."""


class TorchFlags(OptimizerParams):
    """Holds the parameters that the classes of torch.optim share."""

    foreach: Bool | None = key(None, "torch's multi-tensor path.", null_means="torch decides")
    maximize: Bool = key(False, "Maximize the loss.")
    differentiable: Bool = key(False, "Differentiate through the step: refused, as parameters of an engine are leaves.")


class Capturable(TorchFlags):
    """Those which can be captured in a CUDA graph."""

    capturable: Bool = key(False, "Capture the step in a CUDA graph.")


class AdamParams(OptimizerParams):
    """Adam and AdamW of this package. Adam decouples weight decay too unless adam_w_mode is false."""

    lr: FloatOrAuto = lr(1e-3)
    bias_correction: Bool = key(True, "Correct the averages for their start at zero.")
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    amsgrad: Bool = key(False, "Supported with torch_adam only.")
    set_grad_none: Bool = key(True, "Free gradients rather than set them to zero.")
    torch_adam: Bool = key(False, "Use the class of torch.optim with its arguments and defaults.")
    adam_w_mode: Bool = key(True, "Decoupled weight decay, for Adam; AdamW always decouples.")
    fp32_optimizer_states: Bool = key(True, "Moments in fp32 (with optimizer offload).")


class TorchAdamParams(Capturable):
    """torch.optim.Adam: the type Adam with ``torch_adam: true`` and ``adam_w_mode: false``."""

    lr: FloatOrAuto = lr(1e-3)
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    amsgrad: Bool = key(False, "The AMSGrad variant.")
    fused: Bool | None = key(None, "torch's fused kernel.", null_means="torch decides")
    decoupled_weight_decay: Bool = key(False, "Decoupled weight decay.")
    torch_adam: Bool = key(False, "Use the class of torch.optim with its arguments and defaults.")
    adam_w_mode: Bool = key(True, "false, with the type Adam: torch.optim.Adam instead of torch.optim.AdamW.")


class TorchAdamWParams(TorchAdamParams):
    """torch.optim.AdamW: the type Adam or AdamW with ``torch_adam: true``."""

    weight_decay: Float = decay(0.01)
    decoupled_weight_decay: Bool = key(False, "Refused: torch.optim.AdamW always decouples weight decay.")


class AdagradParams(TorchFlags):
    """Adagrad."""

    lr: FloatOrAuto = lr(1e-2)
    lr_decay: Float = key(0.0, "Decay of the learning rate.", minimum=0)
    weight_decay: Float = decay()
    initial_accumulator_value: Float = key(0.0, "Start of the sum of squares.", minimum=0)
    eps: Float = eps(1e-10)
    fused: Bool | None = key(None, "torch's fused kernel.", null_means="torch decides")
    amsgrad: Bool = key(False, "Not supported.")
    fp32_optimizer_states: Bool = key(True, "State in fp32 (with optimizer offload).")


class LionParams(OptimizerParams):
    """Lion."""

    lr: FloatOrAuto = lr(1e-3)
    betas: FloatList = betas()
    weight_decay: Float = decay()
    set_grad_none: Bool = key(True, "Free gradients rather than set them to zero.")
    fp32_optimizer_states: Bool = key(True, "State in fp32 (with optimizer offload).")


class LambParams(OptimizerParams):
    """LAMB. Under fp16 it needs the dynamic loss scale."""

    lr: FloatOrAuto = lr(1e-3)
    bias_correction: Bool = key(True, "Correct the averages for their start at zero.")
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    eps_inside_sqrt: Bool = key(False, "Add eps before the square root.")
    weight_decay: Float = decay()
    max_coeff: Float = key(10.0, "Largest trust ratio.", above=0)
    min_coeff: Float = key(0.01, "Smallest trust ratio.", minimum=0)
    amsgrad: Bool = key(False, "Not supported.")


class OneBitParams(OptimizerParams):
    """Holds the parameters that the 1-bit family shares."""

    _feature: ClassVar[str] = "deepspeed.ops.onebit.feature"
    _keeps_own_states: ClassVar[bool] = True

    lr: FloatOrAuto = lr(1e-3)
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    amsgrad: Bool = key(False, "Not supported.")
    eps_inside_sqrt: Bool = key(False, "Not supported; it has no effect upstream.")
    cuda_aware: Bool = key(
        False, "CUDA-aware MPI.", no_effect="messages are tensors of the process group's own backend"
    )
    comm_backend_name: str = key(
        "nccl", "Backend of the messages.", no_effect="the engine's process group carries them"
    )


_PRECONDITION = (
    "Before the momentum is sent, divide it by the root of the variance and limit it to the largest step of Adam; "
    "after receiving, multiply it by that root. Then coding errors have the same size in all weights. The publication "
    "does not do this."
)


class OneBitAdamParams(OneBitParams):
    """1-bit Adam: AdamW for freeze_step updates; then the variance is frozen and the momentum is sent in 1 bit."""

    precondition: Bool = key(True, _PRECONDITION)
    freeze_step: Int = key(100000, "Updates of the warm-up; 15 to 25 % of all.", unit="updates", minimum=1)
    bias_correction: Bool = key(
        False,
        "Correct the averages for their start at zero. The publication does not do this; upstream ignores the key.",
    )


class OneBitLambParams(OneBitParams):
    """1-bit LAMB: LAMB for freeze_step updates; then the variance is frozen and the momentum is sent in 1 bit."""

    freeze_step: Int = key(100000, "Updates of the warm-up; 15 to 25 % of all.", unit="updates", minimum=1)
    bias_correction: Bool = key(False, "From LAMB.", no_effect="the publication has none")
    max_coeff: Float = key(10.0, "Largest trust ratio in the warm-up.", above=0)
    min_coeff: Float = key(0.01, "Smallest trust ratio in the warm-up.", minimum=0)
    coeff_beta: Float = key(0.9, "Decay of the average of trust ratios.", minimum=0, below=1)
    factor_max: Float = key(4.0, "Largest factor on that average after the warm-up.", above=0)
    factor_min: Float = key(0.5, "Smallest factor on that average.", above=0)
    factor_threshold: Float = key(0.1, "Largest relative change of the factor in an update.", minimum=0)


class ZeroOneAdamParams(OneBitParams):
    """0/1 Adam: 1 bit per element, except in updates of the variance; later local steps between exchanges."""

    precondition: Bool = key(True, _PRECONDITION)
    bias_correction: Bool = key(
        False,
        "Correct the averages for their start at zero. The publication does not do this; upstream ignores the key.",
    )
    var_freeze_step: Int = key(
        100000,
        "Update after which the variance is frozen; usually the end of the learning rate's warm-up.",
        unit="updates",
        minimum=1,
    )
    var_update_scaler: Int = key(
        16, "Number of variance updates after which the interval between them doubles.", unit="updates", minimum=1
    )
    local_step_scaler: Int = key(
        32678,
        "Number of updates after which the interval between exchanges doubles, once the variance is frozen.",
        unit="updates",
        minimum=1,
    )
    local_step_clipper: Int = key(16, "Largest interval between exchanges.", unit="updates", minimum=1)


class MuonParams(OptimizerParams):
    """Muon for matrices (two dimensions or more, no embed or lm_head in the name, no bias), Adam for the rest.

    A parameter of three dimensions that is not a convolution is a stack of matrices; each is orthogonalized.
    """

    _feature: ClassVar[str] = "deepspeed.ops.muon.feature"
    _keeps_own_states: ClassVar[bool] = True

    lr: FloatOrAuto = key(
        0.02,
        'Learning rate. If given, it is used for both parts; otherwise Adam\'s is 3e-4. "auto" must be filled in.',
        minimum=0,
        own_auto=True,
    )
    momentum: Float = key(0.95, "Momentum of the matrix part.", minimum=0, below=1)
    weight_decay: Float = decay()
    ns_method: Annotated[Literal["gram", "standard"], AnyCase] = key(
        "gram", "How matrices are orthogonalized: Newton-Schulz on the Gram matrix, or on the matrix."
    )
    betas: FloatList = betas((0.9, 0.95))
    eps: Float = eps(1e-10)
    muon_lr: Float | None = key(None, "Learning rate of the matrix part.", minimum=0, null_means="lr")
    adam_lr: Float | None = key(None, "Learning rate of the rest.", minimum=0, null_means="lr")
    qk_clip_threshold: Float | None = key(
        None,
        "If the attention logits of a head exceed this, its rows of the query and key projections are scaled down "
        "after the update (QK-clip of MuonClip). For Transformers models.",
        above=0,
        null_means="logits are not measured",
    )


class SGDParams(TorchFlags):
    """torch.optim.SGD."""

    lr: FloatOrAuto = lr(1e-3)
    momentum: Float = key(0.0, "Momentum.", minimum=0)
    dampening: Float = key(0.0, "Dampening of the momentum.")
    weight_decay: Float = decay()
    nesterov: Bool = key(False, "Nesterov momentum; needs momentum above 0 and dampening 0.")
    fused: Bool | None = key(None, "torch's fused kernel.", null_means="torch decides")


class AdadeltaParams(Capturable):
    """torch.optim.Adadelta."""

    lr: FloatOrAuto = lr(1.0)
    rho: Float = key(0.9, "Decay of the squared averages.", minimum=0, maximum=1)
    eps: Float = eps(1e-6)
    weight_decay: Float = decay()


class AdamaxParams(Capturable):
    """torch.optim.Adamax."""

    lr: FloatOrAuto = lr(2e-3)
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()


class ASGDParams(Capturable):
    """torch.optim.ASGD."""

    lr: FloatOrAuto = lr(1e-2)
    lambd: Float = key(1e-4, "Decay term.", minimum=0)
    alpha: Float = key(0.75, "Power of the learning rate's decay.", minimum=0)
    t0: Float = key(1e6, "Step at which averaging starts.", unit="steps", minimum=0)
    weight_decay: Float = decay()


class NAdamParams(Capturable):
    """torch.optim.NAdam."""

    lr: FloatOrAuto = lr(2e-3)
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    momentum_decay: Float = key(4e-3, "Decay of the momentum.", minimum=0)
    decoupled_weight_decay: Bool = key(False, "Decoupled weight decay.")


class RAdamParams(Capturable):
    """torch.optim.RAdam."""

    lr: FloatOrAuto = lr(1e-3)
    betas: FloatList = betas()
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    decoupled_weight_decay: Bool = key(False, "Decoupled weight decay.")


class RMSpropParams(Capturable):
    """torch.optim.RMSprop."""

    lr: FloatOrAuto = lr(1e-2)
    alpha: Float = key(0.99, "Decay of the squared averages.", minimum=0)
    eps: Float = eps(1e-8)
    weight_decay: Float = decay()
    momentum: Float = key(0.0, "Momentum.", minimum=0)
    centered: Bool = key(False, "Normalize by the variance.")


class RpropParams(Capturable):
    """torch.optim.Rprop."""

    lr: FloatOrAuto = lr(1e-2)
    etas: FloatList = key(None, "Factors of decrease and increase.", factory=lambda: [0.5, 1.2], above=0, length=2)
    step_sizes: FloatList = key(None, "Smallest and largest step.", factory=lambda: [1e-6, 50.0], above=0, length=2)


# In any case, as upstream takes them; the rest of torch.optim must be spelt as there.
OWN_OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adam": AdamParams,
    "AdamW": AdamParams,
    "Adagrad": AdagradParams,
    "Lion": LionParams,
    "Lamb": LambParams,
    "Muon": MuonParams,
    "OneBitAdam": OneBitAdamParams,
    "OneBitLamb": OneBitLambParams,
    "SGD": SGDParams,
    "ZeroOneAdam": ZeroOneAdamParams,
}
TORCH_OPTIMIZERS: dict[str, type[OptimizerParams]] = {
    "Adadelta": AdadeltaParams,
    "Adamax": AdamaxParams,
    "ASGD": ASGDParams,
    "NAdam": NAdamParams,
    "RAdam": RAdamParams,
    "RMSprop": RMSpropParams,
    "Rprop": RpropParams,
}
NOT_ELEMENTWISE = {
    "Adafactor": "it needs the shapes of whole parameters",
    "LBFGS": "it needs the whole parameter vector and a closure",
    "SparseAdam": "it needs sparse gradients, and gradients are sent in flat buffers; use Adam",
}
MISSING_OPTIMIZERS = {
    "MuAdam": "muP optimizers do not exist here yet; use Adam with per-group learning rates",
    "MuAdamW": "muP optimizers do not exist here yet; use AdamW with per-group learning rates",
    "MuSGD": "muP optimizers do not exist here yet; use SGD with per-group learning rates",
}


def parameter_model(name: str, torch_adam: bool, adam_w_mode: bool) -> type[OptimizerParams]:
    """Returns the table of parameters for a known optimizer.

    ``torch_adam`` picks torch's classes for Adam and AdamW.
    """
    if torch_adam and name in ("Adam", "AdamW"):
        return TorchAdamWParams if name == "AdamW" or adam_w_mode else TorchAdamParams
    return OWN_OPTIMIZERS.get(name) or TORCH_OPTIMIZERS[name]


def name_for_programs(section: Optimizer | None) -> str | None:
    """Returns the optimizer's name as programs compare it: our own in small letters, torch's as torch spells them."""
    if section is None or section.type is None:
        return None
    return section.type.lower() if section.type in OWN_OPTIMIZERS and section.type != "SGD" else section.type
