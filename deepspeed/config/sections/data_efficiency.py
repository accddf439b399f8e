"""``data_efficiency``, the older ``curriculum_learning`` and ``progressive_layer_drop``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Float, Int, IntList

ScheduleType = Annotated[Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"], AnyCase]


class CurriculumSchedule(Section):
    """How the difficulty grows."""

    total_curriculum_step: Int | None = key(None, "Steps until full difficulty.", unit="steps", above=0)
    difficulty_step: Int | None = key(None, "Granularity of the difficulty.", above=0)
    root_degree: Int | None = key(None, "Degree (fixed_root).", above=0)
    difficulty: IntList | None = key(None, "Difficulties (fixed_discrete).", minimum=0)
    max_step: IntList | None = key(
        None, "Steps at which they change (fixed_discrete), one fewer.", unit="steps", minimum=0
    )


class CurriculumMetric(Section):
    """One measure of difficulty."""

    index_to_sample_path: FilePath = key(None, "Index file of an analysis, without ending.")
    index_to_metric_path: FilePath = key(None, "Index file of an analysis, without ending.")
    difficulty_type: Annotated[Literal["value", "percentile"] | None, AnyCase] = key(
        None, "Values of the metric, or places in its order."
    )
    clustering_type: Annotated[Literal["schedule_based", "single_cluster"] | None, AnyCase] = key(
        None,
        "`single_cluster`: the metric chooses no samples, it only has a difficulty for a function on batches.",
    )
    min_difficulty: Int | None = key(None, "Difficulty at the start; required.", minimum=0)
    max_difficulty: Int | None = key(None, "Difficulty at the end; required.", minimum=0)
    schedule_type: ScheduleType | None = key(None, "Shape; required.")
    schedule_config: CurriculumSchedule = key(None, "How it grows.", factory=CurriculumSchedule)


class CurriculumSampling(Section):
    """Samples ordered by difficulty."""

    enabled: Bool = key(False, "Order samples by difficulty.")
    data_cluster_path: FilePath = key(
        None,
        "Folder for index files.",
        no_effect="clusters of samples are kept in memory as numbers, no file is written",
    )
    curriculum_metrics: dict[str, CurriculumMetric] = key(
        None, "Measures by name; required when enabled.", factory=dict
    )


class DynamicBatching(Section):
    """Batches by number of tokens."""

    _feature: ClassVar[str] = "deepspeed.data.batching.feature"

    enabled: Bool = key(False, "Batches by number of tokens.")
    metrics_path: FilePath = key(
        None, "Folder of lengths, made if it is not there; needed unless the lengths are given in code."
    )
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], AnyCase] = key(
        "linear", "How the rate follows the batch."
    )
    min_batch_size: Int = key(1, "Least batch.", unit="samples", above=0)
    max_batch_size: Int | None = key(None, "Greatest batch.", unit="samples", above=0)
    sequence_picking_order: Annotated[Literal["dataloader", "random", "seqlen"], AnyCase] = key(
        "dataloader", "Order of sequences."
    )
    max_tokens: Int | None = key(None, "Most tokens of a micro-batch; required when enabled.", unit="tokens", above=0)
    verbose: Bool = key(False, "Say more.")


class DataSampling(Section):
    """The sampler."""

    enabled: Bool = key(False, "Use this sampler.")
    num_epochs: Int = key(1000, "Passes after which the loader ends.", above=0)
    num_workers: Int = key(0, "Loader processes.", minimum=0)
    pin_memory: Bool = key(False, "Page-locked batches.")
    curriculum_learning: CurriculumSampling = key(None, "Order by difficulty.", factory=CurriculumSampling)
    dynamic_batching: DynamicBatching = key(None, "Batches by tokens.", factory=DynamicBatching)


class LtdStepSchedule(Section):
    """Steps of the token schedule."""

    require_steps: Int | None = key(None, "Steps until all tokens.", unit="steps", above=0)
    seq_per_step: Int | None = key(None, "Tokens added at a time.", unit="tokens", above=0)


class LtdSchedule(Section):
    """How many tokens are kept."""

    min_value: Int | None = key(None, "Tokens at the start.", unit="tokens", above=0)
    max_value: Int | None = key(None, "Tokens at the end.", unit="tokens", above=0)
    schedule_type: Annotated[Literal["fixed_linear"] | None, AnyCase] = key(None, "Shape.")
    schedule_config: LtdStepSchedule = key(None, "Steps.", factory=LtdStepSchedule)


class LayerTokenLr(Section):
    """Rate by tokens seen; never worked."""

    enabled: Bool = key(False, "Not possible.")
    total_layer_tokens: Int | None = key(None, "Tokens in all.", unit="tokens", above=0)
    warmup_layer_tokens: Int | None = key(None, "Tokens of the rise.", unit="tokens", minimum=0)


class RandomLtd(Section):
    """Random layerwise token dropping."""

    _feature: ClassVar[str] = "deepspeed.dropping.feature"

    enabled: Bool = key(False, "Drop tokens.")
    total_layer_num: Int | None = key(None, "Layers.", unit="layers", above=0)
    random_ltd_layer_num: Int | None = key(None, "Layers that drop; length of the list.", unit="layers", above=0)
    random_ltd_layer_id: IntList | None = key(None, "Their numbers.", minimum=0)
    model_mask_name: str | None = key(None, "Name of the mask argument; null: every argument with mask in its name.")
    model_type: Annotated[Literal["decoder", "encoder"] | None, AnyCase] = key(
        None, "Kind of model.", no_effect="masks lose the rows and columns of the tokens left out in either kind"
    )
    hidden_state_order: Annotated[Literal["batch_seq_dim", "seq_batch_dim"] | None, AnyCase] = key(
        None, "Order of axes."
    )
    random_ltd_schedule: LtdSchedule = key(None, "How many tokens are kept.", factory=LtdSchedule)
    layer_token_lr_schedule: LayerTokenLr = key(None, "Rate by tokens.", factory=LayerTokenLr)


class DataRouting(Section):
    """Which tokens pass which layers."""

    enabled: Bool = key(False, "Route tokens.")
    random_ltd: RandomLtd = key(None, "Random layerwise token dropping.", factory=RandomLtd)


class DataEfficiency(Section):
    """Curriculum learning, dynamic batching and random token dropping."""

    enabled: Bool = key(False, "Master switch.")
    seed: Int = key(1234, "Seed of the sampler.", minimum=0)
    data_sampling: DataSampling = key(None, "The sampler.", factory=DataSampling)
    data_routing: DataRouting = key(None, "Token routing.", factory=DataRouting)


class CurriculumLearning(Section):
    """Curriculum learning in the format of releases up to 0.19.6."""

    _feature: ClassVar[str] = "deepspeed.data.curriculum.feature"

    enabled: Bool = key(False, "Grow the sequence length.", removed="0.19.8")
    curriculum_type: Annotated[Literal["seqlen"] | None, AnyCase] = key(None, "What grows.")
    min_difficulty: Int | None = key(None, "Length at the start.", unit="tokens", above=0)
    max_difficulty: Int | None = key(None, "Length at the end.", unit="tokens", above=0)
    schedule_type: ScheduleType | None = key(None, "Shape.")
    schedule_config: CurriculumSchedule = key(None, "How it grows.", factory=CurriculumSchedule)


class ProgressiveLayerDropSection(Section):
    """Layers dropped at random, more of them as training goes on (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.dropping.feature"

    enabled: Bool = key(False, "Drop layers.", removed="0.19.8")
    theta: Float = key(0.5, "Share kept in the end.", minimum=0, maximum=1)
    gamma: Float = key(0.001, "Speed.", minimum=0)
