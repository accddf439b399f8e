"""``fp16``, ``bf16``, ``torch_autocast``, ``amp``, ``msamp`` and ``data_types``."""

from __future__ import annotations

from typing import Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import Bool, DType, Float, Int, TextList, TextsOrAuto

_APEX = "the scale follows the other keys of this section; Apex's own settings are in the section amp"
_BF16_SCALING = "bf16 has the exponent range of fp32, so there is no loss scale"


class Fp16(Section):
    """Half precision: fp16 weights and gradients, fp32 master weights, a loss scale against underflow."""

    place = ("fp16",)

    enabled: Bool = key(
        False,
        "Train with fp16 weights. Not together with bf16.enabled; the device must support fp16. Master weights are "
        "fp32 and the loss is scaled; a user's own loss.backward() must go through engine.scale(loss).",
    )
    auto_cast: Bool = key(
        False, "Cast floating tensors among the inputs of forward to fp16 before the model sees them.", since="0.7.0"
    )
    loss_scale: Float = key(
        0.0, "Static factor on the loss; 0 makes the scale dynamic. An overflow skips the step either way.", minimum=0
    )
    initial_scale_power: Int = key(
        16, "A dynamic scale starts at 2 to this power.", unit="power of two", minimum=0, maximum=127
    )
    loss_scale_window: Int = key(
        1000, "Steps in a row without overflow after which a dynamic scale doubles.", unit="steps", above=0
    )
    hysteresis: Int = key(
        2,
        "Number of overflows after which a dynamic scale is halved: 1 halves it at the first one, as "
        "torch.amp.GradScaler does.",
        unit="steps",
        above=0,
    )
    consecutive_hysteresis: Bool = key(
        False,
        "Reset the count of hysteresis after every step without overflow, not only when the scale grows.",
        since="0.9.3",
    )
    min_loss_scale: Float = key(
        1,
        "Smallest dynamic scale. An overflow at this scale raises when the overflows of hysteresis are used up.",
        above=0,
    )
    fp16_master_weights_and_grads: Bool = key(
        False,
        "No fp32 master weights: the optimizer updates fp16 weights, rounded stochastically, and gradients are kept in "
        "fp16. Optimizer states stay fp32. With elementwise optimizers, at every stage, on the device or in host "
        "memory.",
    )
    opt_level: str | None = key(None, "Left from Apex.", no_effect=_APEX)
    fp16_scale_tolerance: Float | None = key(None, "Left from fairseq.", minimum=0, no_effect=_APEX)


class Bf16(Section):
    """Bfloat16 weights and gradients with fp32 master weights; no loss scale."""

    place = ("bf16",)

    enabled: Bool = key(
        False, "Train with bfloat16 weights. Not together with fp16.enabled; the device must support bf16."
    )
    immediate_grad_update: Bool = key(
        False,
        "Add each gradient to the fp32 accumulator as soon as backward has produced it.",
        no_effect="gradients always enter the accumulator bucket by bucket while backward runs",
    )
    check_grad_overflow: Bool = key(
        True,
        "Check gradients for inf and NaN at each step; if there are any, skip the step on all ranks. "
        "max_consecutive_skipped_steps sets when training stops.",
        since="0.17.1",
    )
    bf16_master_weights_and_grads: Bool = key(
        False,
        "No fp32 master weights: the optimizer updates bf16 weights, rounded stochastically, and gradients are kept in "
        "bf16. With elementwise optimizers, at every stage, on the device or in host memory.",
        since="0.18.3",
    )
    bf16_optimizer_states: Bool = key(
        False,
        "Optimizer states in bf16, rounded stochastically. Needs bf16_master_weights_and_grads.",
        since="0.18.3",
    )
    loss_scale: Float = key(0.0, "Left from fp16 sections.", no_effect=_BF16_SCALING, minimum=0)
    initial_scale_power: Int = key(16, "Left from fp16 sections.", no_effect=_BF16_SCALING, minimum=0)
    loss_scale_window: Int = key(1000, "Left from fp16 sections.", no_effect=_BF16_SCALING, minimum=0)
    hysteresis: Int = key(2, "Left from fp16 sections.", no_effect=_BF16_SCALING, minimum=0)
    consecutive_hysteresis: Bool = key(False, "Left from fp16 sections.", no_effect=_BF16_SCALING)
    min_loss_scale: Float = key(1, "Left from fp16 sections.", no_effect=_BF16_SCALING, minimum=0)
    auto_cast: Bool = key(
        False, "Cast floating tensors among the inputs of forward to bf16 before the model sees them."
    )
    opt_level: str | None = key(None, "Left from Apex.", no_effect=_BF16_SCALING)


class TorchAutocast(Section):
    """Runs forward under ``torch.autocast``."""

    enabled: Bool = key(
        False,
        "Run forward inside torch.autocast. Do not nest an autocast of your own.",
        since="0.17.2",
    )
    dtype: DType | None = key(
        None, "The autocast dtype.", null_means="torch's default for the device (bf16 on CPU, fp16 on CUDA)"
    )
    lower_precision_safe_modules: TextList | None = key(
        None,
        "Class paths (package.module.Class) of modules whose parameters upstream communicates in the autocast dtype.",
        null_means="torch.nn.Linear, Conv1d, Conv2d and Conv3d",
        no_effect="parameters and gradients are sent in their own dtype; communication_data_type chooses another",
    )


class Amp(Section):
    """Apex mixed precision; the other keys are the arguments of ``apex.amp.initialize``."""

    enabled: Bool = key(False, "Mixed precision by Apex.", removed="0.19.8")
    opt_level: str | None = key(None, "Apex level, O0 to O3.", removed="0.19.8")
    cast_model_type: str | None = key(None, "Apex: dtype of the model.", removed="0.19.8")
    patch_torch_functions: Bool | None = key(None, "Apex: patch torch functions.", removed="0.19.8")
    keep_batchnorm_fp32: Bool | None = key(None, "Apex: keep batch norm in fp32.", removed="0.19.8")
    master_weights: Bool | None = key(None, "Apex: fp32 master weights.", removed="0.19.8")
    loss_scale: Float | Literal["dynamic"] | None = key(None, "Apex: loss scale.", removed="0.19.8", above=0)
    cast_model_outputs: str | None = key(None, "Apex: dtype of outputs.", removed="0.19.8")
    num_losses: Int = key(1, "Apex: number of losses.", removed="0.19.8", above=0)
    verbosity: Int = key(1, "Apex: verbosity.", removed="0.19.8", minimum=0)
    min_loss_scale: Float | None = key(None, "Apex: smallest dynamic loss scale.", removed="0.19.8", above=0)
    max_loss_scale: Float = key(2.0**24, "Apex: largest dynamic loss scale.", removed="0.19.8", above=0)


class MsAmp(Section):
    """FP8 training by MS-AMP; accelerate writes this section for its own use."""

    enabled: Bool = key(False, "Mixed precision by MS-AMP.")
    opt_level: str | None = key(None, "MS-AMP level, O1 to O3.")


class DataTypes(Section):
    """Data types apart from the precision mode."""

    place = ("data_types",)

    grad_accum_dtype: DType | None = key(
        None,
        "Dtype in which the gradients of several micro-batches are summed. With one micro-batch per step there is "
        "no accumulator.",
        null_means="fp32, also under bf16 and fp16 (upstream: the model's type, which loses small gradients); the "
        "16-bit type with bf16_master_weights_and_grads or fp16_master_weights_and_grads",
    )
    param_dtype: DType | None = key(
        None, "Dtype of the model; must agree with the enabled precision mode.", since="0.19.2"
    )
    buffer_dtype: DType | None = key(
        None,
        "Dtype of floating-point buffers, except in modules kept in fp32.",
        null_means="as the model has them; that of the weights where torch requires it (statistics of a batch norm, "
        "masks of pruning, spectral_norm, parametrizations)",
    )
    keep_in_fp32_modules: TextsOrAuto | None = key(
        None,
        "Modules and buffers kept in fp32: parts of their names, such as norm or mlp.gate; auto takes the model's own "
        "lists (_keep_in_fp32_modules and _keep_in_fp32_modules_strict).",
        since="0.19.8",
        own_auto=True,
        null_means="none",
    )
