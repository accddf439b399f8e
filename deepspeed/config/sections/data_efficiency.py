"""``data_efficiency``, the older ``curriculum_learning`` and ``progressive_layer_drop``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from typing_extensions import override

from deepspeed.config.section import Section, key
from deepspeed.config.types import AnyCase, Bool, FilePath, Float, Int, IntList

ScheduleType = Annotated[Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"], AnyCase]


class CurriculumSchedule(Section):
    """Controls how the difficulty grows."""

    total_curriculum_step: Int | None = key(None, "Steps until the maximum difficulty.", unit="steps", above=0)
    difficulty_step: Int | None = key(None, "The difficulty is a multiple of this.", above=0)
    root_degree: Int | None = key(None, "Degree of the root (fixed_root).", above=0)
    difficulty: IntList | None = key(None, "List of difficulties (fixed_discrete).", minimum=0)
    max_step: IntList | None = key(
        None,
        "Steps at which the difficulty changes, one fewer than difficulties (fixed_discrete).",
        unit="steps",
        minimum=0,
    )


class CurriculumMetric(Section):
    """One metric of difficulty."""

    index_to_sample_path: FilePath = key(
        None, "Index file of a data analysis: the samples of each value. Without extension."
    )
    index_to_metric_path: FilePath = key(None, "Index file of a data analysis: the values. Without extension.")
    difficulty_type: Annotated[Literal["value", "percentile"] | None, AnyCase] = key(
        None, "value: difficulties are values of the metric. percentile: they are percentiles of it."
    )
    clustering_type: Annotated[Literal["schedule_based", "single_cluster"] | None, AnyCase] = key(
        None,
        "single_cluster: the metric does not choose samples; its difficulty is only passed to a function on batches.",
    )
    min_difficulty: Int | None = key(None, "Difficulty at the start; required.", minimum=0)
    max_difficulty: Int | None = key(None, "Difficulty at the end; required.", minimum=0)
    schedule_type: ScheduleType | None = key(None, "How the difficulty grows over the steps; required.")
    schedule_config: CurriculumSchedule = key(None, "Parameters of the schedule.", factory=CurriculumSchedule)


class CurriculumSampling(Section):
    """Samples ordered by difficulty."""

    enabled: Bool = key(False, "Order samples by difficulty.")
    data_cluster_path: FilePath = key(
        None,
        "Folder for index files.",
        no_effect="clusters of samples are kept in memory; no file is written",
    )
    curriculum_metrics: dict[str, CurriculumMetric] = key(None, "Metrics by name; required when enabled.", factory=dict)


class DynamicBatching(Section):
    """Batches with a limit on tokens instead of samples."""

    _feature: ClassVar[str] = "deepspeed.data.batching.feature"

    enabled: Bool = key(False, "Build batches with a limit on tokens instead of samples.")
    metrics_path: FilePath = key(
        None, "Folder with the lengths of samples, created if missing; required unless the program passes the lengths."
    )
    lr_scaling_method: Annotated[Literal["linear", "sqrt", "none"], AnyCase] = key(
        "linear", "How the learning rate depends on the batch size."
    )
    min_batch_size: Int = key(1, "Smallest batch.", unit="samples", above=0)
    max_batch_size: Int | None = key(None, "Largest batch.", unit="samples", above=0)
    sequence_picking_order: Annotated[Literal["dataloader", "random", "seqlen"], AnyCase] = key(
        "dataloader", "Order of sequences."
    )
    max_tokens: Int | None = key(
        None, "Maximum number of tokens of a micro-batch; required when enabled.", unit="tokens", above=0
    )
    verbose: Bool = key(False, "Log more.", per_rank=True)


class DataSampling(Section):
    """The sampler of the data loader."""

    _other_switches: ClassVar[tuple[str, ...]] = ("dynamic_batching",)

    enabled: Bool = key(False, "Use this sampler.")
    num_epochs: Int = key(1000, "Epochs after which the loader ends.", above=0)
    num_workers: Int = key(0, "Number of loader processes.", minimum=0, per_rank=True)
    pin_memory: Bool = key(False, "Load batches into page-locked memory.", per_rank=True)
    curriculum_learning: CurriculumSampling = key(None, "Order samples by difficulty.", factory=CurriculumSampling)
    dynamic_batching: DynamicBatching = key(None, "Batches with a limit on tokens.", factory=DynamicBatching)

    @override
    def is_used(self) -> bool:
        return self.enabled or self.dynamic_batching.enabled


class LtdStepSchedule(Section):
    """Steps of the token schedule."""

    require_steps: Int | None = key(None, "Steps until all tokens are kept.", unit="steps", above=0)
    seq_per_step: Int | None = key(None, "Tokens that are added at each increase.", unit="tokens", above=0)


class LtdSchedule(Section):
    """Controls how many tokens are kept."""

    min_value: Int | None = key(None, "Tokens at the start.", unit="tokens", above=0)
    max_value: Int | None = key(None, "Tokens at the end.", unit="tokens", above=0)
    schedule_type: Annotated[Literal["fixed_linear"] | None, AnyCase] = key(
        None, "How the number grows over the steps."
    )
    schedule_config: LtdStepSchedule = key(None, "Steps of the schedule.", factory=LtdStepSchedule)


class LayerTokenLr(Section):
    """Learning rate by tokens seen; not supported, and it never worked upstream."""

    enabled: Bool = key(False, "Not supported.")
    total_layer_tokens: Int | None = key(None, "Total number of tokens.", unit="tokens", above=0)
    warmup_layer_tokens: Int | None = key(None, "Tokens of the warm-up.", unit="tokens", minimum=0)


class RandomLtd(Section):
    """Random layerwise token dropping."""

    _feature: ClassVar[str] = "deepspeed.dropping.feature"

    enabled: Bool = key(False, "Drop tokens at random.")
    total_layer_num: Int | None = key(None, "Number of layers of the model.", unit="layers", above=0)
    random_ltd_layer_num: Int | None = key(
        None, "Number of layers that drop tokens: the length of random_ltd_layer_id.", unit="layers", above=0
    )
    random_ltd_layer_id: IntList | None = key(None, "Indices of the layers that drop tokens.", minimum=0)
    model_mask_name: str | None = key(None, "Name of the mask argument; null: every argument with mask in its name.")
    model_type: Annotated[Literal["decoder", "encoder"] | None, AnyCase] = key(
        None, "Kind of model.", no_effect="in both kinds the rows and columns of dropped tokens are removed from masks"
    )
    hidden_state_order: Annotated[Literal["batch_seq_dim", "seq_batch_dim"] | None, AnyCase] = key(
        None, "Order of the dimensions of hidden states."
    )
    random_ltd_schedule: LtdSchedule = key(None, "How many tokens are kept.", factory=LtdSchedule)
    layer_token_lr_schedule: LayerTokenLr = key(None, "Learning rate by tokens seen.", factory=LayerTokenLr)


class DataRouting(Section):
    """Controls which tokens pass which layers."""

    enabled: Bool = key(False, "Switch token routing on.")
    random_ltd: RandomLtd = key(None, "Random layerwise token dropping.", factory=RandomLtd)


class DataEfficiency(Section):
    """Curriculum learning, dynamic batching and random token dropping."""

    enabled: Bool = key(False, "Switch for the whole section.")
    seed: Int = key(1234, "Seed of the sampler.", minimum=0)
    data_sampling: DataSampling = key(None, "The sampler of the data loader.", factory=DataSampling)
    data_routing: DataRouting = key(None, "Which tokens pass which layers.", factory=DataRouting)

    @property
    def packs_tokens(self) -> bool:
        """Whether batches have a limit on tokens, whatever ``data_sampling.enabled`` is."""
        return self.enabled and self.data_sampling.dynamic_batching.enabled


class CurriculumLearning(Section):
    """Curriculum learning in the format of releases up to 0.19.6."""

    _feature: ClassVar[str] = "deepspeed.data.curriculum.feature"

    enabled: Bool = key(False, "Grow the sequence length.", removed="0.19.8")
    curriculum_type: Annotated[Literal["seqlen"] | None, AnyCase] = key(None, "What grows.")
    min_difficulty: Int | None = key(None, "Sequence length at the start.", unit="tokens", above=0)
    max_difficulty: Int | None = key(None, "Sequence length at the end.", unit="tokens", above=0)
    schedule_type: ScheduleType | None = key(None, "How the number grows over the steps.")
    schedule_config: CurriculumSchedule = key(None, "Parameters of the schedule.", factory=CurriculumSchedule)


class ProgressiveLayerDropSection(Section):
    """Layers dropped at random, more of them as training continues (removed upstream in 0.19.8)."""

    _feature: ClassVar[str] = "deepspeed.dropping.feature"

    enabled: Bool = key(False, "Drop layers.", removed="0.19.8")
    theta: Float = key(0.5, "Share of layers that are kept at the end.", minimum=0, maximum=1)
    gamma: Float = key(0.001, "How fast the share of kept layers falls to theta.", minimum=0)
