"""``compression_training``: quantization, pruning and layer reduction during training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.sections.quantization import MixedQuantize, QuantType
from deepspeed.config.types import AnyCase, Bool, Float, Int, IntList, TextList


class LayerReduction(Section):
    """A student with fewer layers than its teacher."""

    enabled: Bool = key(False, "Train a student with fewer layers.", removed="0.19.8")
    keep_number_layer: Int | None = key(None, "Layers kept: the length of teacher_layer.", unit="layers", above=0)
    module_name_prefix: str | None = key(None, "Name of the module that holds the layers, in both models.")
    teacher_layer: IntList | None = key(None, "Layers of the teacher that the student takes, in order.", minimum=0)
    other_module_name: TextList | None = key(None, "Other modules that are copied.")


class TechniqueShared(Section):
    """Holds the keys that all groups of a technique share."""

    enabled: Bool = key(False, "Use the technique.", removed="0.19.8")
    schedule_offset: Int = key(1000, "Step at which it starts.", unit="steps", minimum=0)


class WeightQuantizationShared(TechniqueShared):
    """Shared settings of weight quantization."""

    schedule_offset: Int = key(0, "Step at which it starts.", unit="steps", minimum=0)
    quantizer_kernel: Bool = key(False, "Use the kernel.", no_effect="rounding is torch's own arithmetic")
    quantize_groups: Int = key(
        1,
        "Number of equal slices of a weight, each with its own scale; must divide its number of elements. Each "
        "row of an embedding is a slice.",
        above=0,
    )
    quantize_verbose: Bool = key(False, "Log more.", no_effect="each change of the width is always logged")
    quantization_type: QuantType = key(
        "symmetric", "symmetric: a range around zero. asymmetric: from the smallest to the largest value."
    )
    rounding: Annotated[Literal["nearest", "stochastic"], AnyCase] = key(
        "nearest", "Round to the nearest code, or at random in proportion (stochastic)."
    )
    quantize_weight_in_forward: Bool = key(
        False, "true: target_bits from schedule_offset on. false: the width falls from start_bits to target_bits."
    )
    fp16_mixed_quantize: MixedQuantize = key(None, "Mix fp16 and quantized weights.", factory=MixedQuantize)


class ActivationQuantizationShared(TechniqueShared):
    """Shared settings of activation quantization."""

    quantization_type: QuantType = key(
        "symmetric", "symmetric: a range around zero. asymmetric: from the smallest to the largest value."
    )
    range_calibration: Annotated[Literal["dynamic", "static"], AnyCase] = key(
        "dynamic", "dynamic: the range of each token (image). static: a running range of all."
    )


class SparsePruningShared(TechniqueShared):
    """Shared settings of sparse pruning."""

    method: Annotated[Literal["l1", "topk", "snip_momentum"], AnyCase] = key(
        "l1",
        "l1: keep the weights that are largest at the start, for the whole training. topk: keep those with the "
        "largest scores, which are trained. snip_momentum: keep the blocks with the largest running average of "
        "|weight x gradient| over all layers, with a density that falls from 1.",
    )
    block_pattern: str = key("4x1", "Size of a block: outputs x inputs (snip_momentum).")
    dense_ratio: Float = key(0.1, "Share that is kept at the end, over all layers (snip_momentum).", above=0, below=1)
    schedule_offset_stride: Int = key(1, "Steps between prunings (snip_momentum).", unit="steps", above=0)
    schedule_offset_end: Int | None = key(
        None,
        "Last step at which weights are pruned (snip_momentum).",
        unit="steps",
        minimum=0,
        null_means="schedule_offset: everything is pruned at once",
    )
    excluded_modules: TextList = key(
        None, "Layers that are not pruned, as expressions like those of modules (snip_momentum).", factory=list
    )


class StructuredPruningShared(TechniqueShared):
    """Shared settings of row and channel pruning."""

    method: Annotated[Literal["l1", "topk"], AnyCase] = key(
        "l1", "As in sparse_pruning, but for whole rows or channels."
    )


class HeadPruningShared(TechniqueShared):
    """Shared settings of head pruning."""

    method: Annotated[Literal["topk", "l1"], AnyCase] = key("topk", "As in sparse_pruning, but for whole heads.")
    num_heads: Int | None = key(None, "Number of heads at the input of a pruned layer; required.", above=0)


class WeightBits(Section):
    """Bit widths of a group of weights."""

    start_bits: Int | None = key(None, "Bit width at the start; required.", unit="bits", above=0)
    target_bits: Int | None = key(None, "Bit width at the end; required.", unit="bits", above=0)
    quantization_period: Int = key(
        1,
        "Steps from schedule_offset until the width first falls by a bit; the number doubles for each further "
        "bit. 0 is allowed if start_bits and target_bits are equal.",
        unit="steps",
        minimum=0,
    )


class ActivationBits(Section):
    """Bit width of a group of activations."""

    bits: Int | None = key(None, "Bit width; required.", unit="bits", above=0)


class Density(Section):
    """Share of a group that is kept."""

    dense_ratio: Float | None = key(None, "Share of weights that is kept; required.", above=0, maximum=1)


class Group(Section):
    """Modules that a group covers."""

    modules: TextList = key(
        None, "Regular expressions that are searched in module names; * matches all.", factory=lambda: ["*"]
    )
    related_modules: list[TextList] | None = key(
        None, "For each entry of modules: expressions for the layers whose inputs or outputs are removed with it."
    )


class WeightGroup(Group):
    """A group of quantized weights."""

    params: WeightBits = key(None, "Bit widths.", factory=WeightBits)


class ActivationGroup(Group):
    """A group of quantized activations."""

    params: ActivationBits = key(None, "Bit width.", factory=ActivationBits)


class PruningGroup(Group):
    """A group of pruned modules."""

    params: Density = key(None, "Share of weights that is kept.", factory=Density)


def _shared(model: type[Section]) -> Any:
    return key(None, "Settings of all groups.", factory=model)


def _groups() -> Any:
    return key(None, "Groups of modules, under names of your choice; required when enabled.", factory=dict)


class WeightTechnique(Section):
    """Quantized weights."""

    shared_parameters: WeightQuantizationShared = _shared(WeightQuantizationShared)
    different_groups: dict[str, WeightGroup] = _groups()


class ActivationTechnique(Section):
    """Quantized activations."""

    shared_parameters: ActivationQuantizationShared = _shared(ActivationQuantizationShared)
    different_groups: dict[str, ActivationGroup] = _groups()


class SparsePruning(Section):
    """Pruning of single weights."""

    shared_parameters: SparsePruningShared = _shared(SparsePruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class StructuredPruning(Section):
    """Pruning of rows or channels."""

    shared_parameters: StructuredPruningShared = _shared(StructuredPruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class HeadPruning(Section):
    """Pruning of attention heads."""

    shared_parameters: HeadPruningShared = _shared(HeadPruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class CompressionTraining(Section):
    """Quantization, pruning and layer reduction during training (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.compression.feature"

    layer_reduction: LayerReduction | None = key(None, "Train a student with fewer layers.", removed="0.19.8")
    weight_quantization: WeightTechnique | None = key(None, "Quantized weights.", removed="0.19.8")
    activation_quantization: ActivationTechnique | None = key(None, "Quantized activations.", removed="0.19.8")
    sparse_pruning: SparsePruning | None = key(None, "Pruning of single weights.", removed="0.19.8")
    row_pruning: StructuredPruning | None = key(None, "Pruning of rows.", removed="0.19.8")
    channel_pruning: StructuredPruning | None = key(None, "Pruning of channels.", removed="0.19.8")
    head_pruning: HeadPruning | None = key(None, "Pruning of attention heads.", removed="0.19.8")
