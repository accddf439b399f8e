"""``weight_quantization`` of the top level, ``quantize_training`` and ``eigenvalue``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, Float, Int, to_int

QuantType = Annotated[Literal["symmetric", "asymmetric"], AnyCase]


class QuantizedWeightGroup(Section):
    """Quantization of one set of weights."""

    num_bits: Annotated[Literal[4, 8], BeforeValidator(to_int)] | None = key(None, "Bit width.", unit="bits")
    group_size: Int | None = key(None, "Elements with one scale.", unit="elements", above=0)
    group_dim: Int | None = key(None, "Dimension along which groups lie.", minimum=0)
    symmetric: Bool | None = key(None, "Symmetric range; only false works.")


_SELECTED = "quantized_initialization and post_init_quant say how the layers that they select are quantized"


class WeightQuantization(Section):
    """Weight-only quantization. The section's presence turns it on unless enabled is false."""

    _feature: ClassVar[str] = "deepspeed.linear.feature"

    enabled: Bool = key(True, "Quantize weights.")
    quantized_initialization: QuantizedWeightGroup = key(
        None,
        "Quantize all linear layers in initialize; embeddings are not quantized. At 4 bits scales and offsets are "
        "rounded to bfloat16.",
        factory=QuantizedWeightGroup,
    )
    post_init_quant: dict[str, QuantizedWeightGroup] = key(
        None, "Quantize layers after the model is built; the keys are parts of their names.", factory=dict
    )
    num_bits: Int = key(8, "Bit width.", unit="bits", above=0, no_effect=_SELECTED)
    q_type: QuantType = key(
        "symmetric",
        "symmetric: a range around zero. asymmetric: from the smallest to the largest value.",
        no_effect=_SELECTED,
    )
    q_groups: Int = key(1, "Number of groups of a weight, each with its own scale.", above=0, no_effect=_SELECTED)


class QuantizeBits(Section):
    """Widths at the start and the end."""

    start_bits: Int = key(16, "Width at the start.", unit="bits", above=0)
    target_bits: Int = key(8, "Width at the end.", unit="bits", above=0)


class QuantizeSchedule(Section):
    """When the width falls."""

    quantize_period: Int = key(
        1000,
        "Steps until the width falls by a bit. 0 is allowed if start_bits and target_bits are equal.",
        unit="steps",
        minimum=0,
    )
    schedule_offset: Int = key(1000, "Step at which it starts.", unit="steps", minimum=0)


class MixedQuantize(Section):
    """Mix of fp16 and quantized weights."""

    enabled: Bool = key(False, "Mix fp16 and quantized weights.")
    quantize_change_ratio: Float = key(0.001, "Change of the mix per step.", minimum=0, maximum=1)


class QuantizeAlgo(Section):
    """Kind of quantizer."""

    q_type: QuantType = key(
        "symmetric", "symmetric: a range around zero. asymmetric: from the smallest to the largest value."
    )
    rounding: Annotated[Literal["nearest", "stochastic"], AnyCase] = key(
        "nearest", "Round to the nearest code, or at random in proportion (stochastic)."
    )


class EigenvalueSection(Section):
    """Largest eigenvalues of blocks' Hessians, which decide when widths fall (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.compression.feature"

    enabled: Bool = key(False, "Stretch a block's period by 1 + floor(4 eigenvalue / largest).", removed="0.19.8")
    verbose: Bool = key(False, "Log the eigenvalues.", per_rank=True)
    max_iter: Int = key(100, "Maximum number of Hessian products per block.", above=0)
    tol: Float = key(1e-2, "Relative change of a value at which the iteration ends.", above=0)
    stability: Float = key(1e-6, "Added to the norm when a vector is normalized.", minimum=0)
    gas_boundary_resolution: Int = key(1, "Updates between two computations.", unit="steps", above=0)
    layer_name: str = key("bert.encoder.layer", "Name of the module that holds the blocks.")
    layer_num: Int = key(0, "Number of blocks, from the first; 0: all.", unit="layers", minimum=0)
    model_name: str | None = key(None, "Found in files.", no_effect="nothing reads it")


class QuantizeTraining(Section):
    """Quantized training in the format of releases up to 0.6.7."""

    _feature: ClassVar[str] = "deepspeed.compression.feature"

    enabled: Bool = key(False, "Quantize while training.", removed="0.6.8")
    quantize_bits: QuantizeBits = key(None, "Bit widths.", factory=QuantizeBits)
    quantize_schedule: QuantizeSchedule = key(None, "When the width falls.", factory=QuantizeSchedule)
    quantize_groups: Int = key(1, "Number of groups of a weight, each with its own scale.", above=0)
    fp16_mixed_quantize: MixedQuantize = key(None, "Mix fp16 and quantized weights.", factory=MixedQuantize)
    quantize_algo: QuantizeAlgo = key(None, "Kind of quantizer.", factory=QuantizeAlgo)
    quantizer_kernel: Bool = key(False, "Use the kernel.", no_effect="rounding is torch's own arithmetic")
    quantize_verbose: Bool = key(False, "Log more.", no_effect="each change of the width is always logged")
    eigenvalue: EigenvalueSection | None = key(None, "Choose when widths fall by the eigenvalues of blocks.")
    quantize_type: QuantType | None = key(
        None, "Found in files; the key is quantize_algo.q_type.", no_effect="nothing reads it"
    )
    quantize_eigenvalue: Bool | None = key(
        None, "Found in files; the key is eigenvalue.enabled.", no_effect="nothing reads it"
    )
