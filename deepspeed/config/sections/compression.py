"""``compression_training``: quantization, pruning and layer reduction during training."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.sections.quantization import MixedQuantize, QuantType
from deepspeed.config.types import AnyCase, Bool, Float, Int, IntList, TextList


class LayerReduction(Section):
    """A student with fewer layers than its teacher."""

    enabled: Bool = key(False, "Reduce layers.", removed="0.19.8")
    keep_number_layer: Int | None = key(None, "Layers kept: the length of teacher_layer.", unit="layers", above=0)
    module_name_prefix: str | None = key(None, "Name of the list of layers, in both models.")
    teacher_layer: IntList | None = key(None, "Layers of the teacher that the student takes, in order.", minimum=0)
    other_module_name: TextList | None = key(None, "Other modules that are copied.")


class TechniqueShared(Section):
    """What all groups of a technique share."""

    enabled: Bool = key(False, "Use the technique.", removed="0.19.8")
    schedule_offset: Int = key(1000, "First step.", unit="steps", minimum=0)


class WeightQuantizationShared(TechniqueShared):
    """Shared settings of weight quantization."""

    schedule_offset: Int = key(0, "First step.", unit="steps", minimum=0)
    quantizer_kernel: Bool = key(False, "Use the kernel.", no_effect="rounding is torch's own arithmetic")
    quantize_groups: Int = key(
        1,
        "Equal slices of a weight with scales of their own; they must divide it. Each row of an embedding has one.",
        above=0,
    )
    quantize_verbose: Bool = key(False, "Say more.", no_effect="each change of bits is always said")
    quantization_type: QuantType = key("symmetric", "Scale around zero, or from least to largest.")
    rounding: Annotated[Literal["nearest", "stochastic"], AnyCase] = key(
        "nearest", "To the nearest code, or by chance."
    )
    quantize_weight_in_forward: Bool = key(
        False, "True: target_bits from schedule_offset on. False: bits fall from start_bits to target_bits."
    )
    fp16_mixed_quantize: MixedQuantize = key(None, "Mixing.", factory=MixedQuantize)


class ActivationQuantizationShared(TechniqueShared):
    """Shared settings of activation quantization."""

    quantization_type: QuantType = key("symmetric", "Scale around zero, or from least to largest.")
    range_calibration: Annotated[Literal["dynamic", "static"], AnyCase] = key(
        "dynamic", "Range of each token (image), or a running range of all."
    )


class SparsePruningShared(TechniqueShared):
    """Shared settings of sparse pruning."""

    method: Annotated[Literal["l1", "topk", "snip_momentum"], AnyCase] = key(
        "l1",
        "l1 keeps what is largest at first, for good; topk what has the largest scores, which are trained; "
        "snip_momentum blocks of all layers together whose weights times gradients have mattered most, with a density "
        "that falls from 1.",
    )
    block_pattern: str = key("4x1", "Outputs x inputs of a block (snip_momentum).")
    dense_ratio: Float = key(0.1, "Share kept in the end, of all layers together (snip_momentum).", above=0, below=1)
    schedule_offset_stride: Int = key(1, "Steps between prunings (snip_momentum).", unit="steps", above=0)
    schedule_offset_end: Int | None = key(
        None,
        "Step after which nothing more is pruned (snip_momentum).",
        unit="steps",
        minimum=0,
        null_means="schedule_offset, so that all is pruned at once",
    )
    excluded_modules: TextList = key(
        None, "As modules of a group: layers that stay whole (snip_momentum).", factory=list
    )


class StructuredPruningShared(TechniqueShared):
    """Shared settings of row and channel pruning."""

    method: Annotated[Literal["l1", "topk"], AnyCase] = key("l1", "As in sparse_pruning, by rows or channels.")


class HeadPruningShared(TechniqueShared):
    """Shared settings of head pruning."""

    method: Annotated[Literal["topk", "l1"], AnyCase] = key("topk", "As in sparse_pruning, by heads.")
    num_heads: Int | None = key(None, "Heads before a layer that is pruned; required.", above=0)


class WeightBits(Section):
    """Widths of a group of weights."""

    start_bits: Int | None = key(None, "Width at the start; required.", unit="bits", above=0)
    target_bits: Int | None = key(None, "Width at the end; required.", unit="bits", above=0)
    quantization_period: Int = key(
        1,
        "Steps from schedule_offset to the first fall by a bit; twice as many to each further one. 0 is allowed where "
        "start_bits and target_bits are equal, so that nothing falls.",
        unit="steps",
        minimum=0,
    )


class ActivationBits(Section):
    """Width of a group of activations."""

    bits: Int | None = key(None, "Width; required.", unit="bits", above=0)


class Density(Section):
    """Share of a group that is kept."""

    dense_ratio: Float | None = key(None, "Share kept; required.", above=0, maximum=1)


class Group(Section):
    """Modules that a group covers."""

    modules: TextList = key(None, "Regular expressions that are searched in names; * is all.", factory=lambda: ["*"])
    related_modules: list[TextList] | None = key(
        None, "For each of modules, expressions for the layers that lose inputs or outputs with it."
    )


class WeightGroup(Group):
    """A group of quantized weights."""

    params: WeightBits = key(None, "Widths.", factory=WeightBits)


class ActivationGroup(Group):
    """A group of quantized activations."""

    params: ActivationBits = key(None, "Width.", factory=ActivationBits)


class PruningGroup(Group):
    """A group of pruned modules."""

    params: Density = key(None, "Share kept.", factory=Density)


def _shared(model: type[Section]) -> Any:
    return key(None, "Settings of all groups.", factory=model)


def _groups() -> Any:
    return key(None, "Groups by a name of one's own; required once enabled.", factory=dict)


class WeightTechnique(Section):
    """Quantized weights."""

    shared_parameters: WeightQuantizationShared = _shared(WeightQuantizationShared)
    different_groups: dict[str, WeightGroup] = _groups()


class ActivationTechnique(Section):
    """Quantized activations."""

    shared_parameters: ActivationQuantizationShared = _shared(ActivationQuantizationShared)
    different_groups: dict[str, ActivationGroup] = _groups()


class SparsePruning(Section):
    """Single weights pruned."""

    shared_parameters: SparsePruningShared = _shared(SparsePruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class StructuredPruning(Section):
    """Rows or channels pruned."""

    shared_parameters: StructuredPruningShared = _shared(StructuredPruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class HeadPruning(Section):
    """Attention heads pruned."""

    shared_parameters: HeadPruningShared = _shared(HeadPruningShared)
    different_groups: dict[str, PruningGroup] = _groups()


class CompressionTraining(Section):
    """Quantization, pruning and layer reduction during training (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.compression.feature"

    layer_reduction: LayerReduction | None = key(None, "Fewer layers.", removed="0.19.8")
    weight_quantization: WeightTechnique | None = key(None, "Quantized weights.", removed="0.19.8")
    activation_quantization: ActivationTechnique | None = key(None, "Quantized activations.", removed="0.19.8")
    sparse_pruning: SparsePruning | None = key(None, "Single weights pruned.", removed="0.19.8")
    row_pruning: StructuredPruning | None = key(None, "Rows pruned.", removed="0.19.8")
    channel_pruning: StructuredPruning | None = key(None, "Channels pruned.", removed="0.19.8")
    head_pruning: HeadPruning | None = key(None, "Heads pruned.", removed="0.19.8")
