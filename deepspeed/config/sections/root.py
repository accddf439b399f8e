"""The top level: batch sizes, what concerns all gradients, logging, and the sections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator
from typing_extensions import override

from deepspeed.config.section import Section, key
from deepspeed.config.sections.autotuning import Autotuning
from deepspeed.config.sections.checkpoint import Checkpoint, DataStates, Nebula, Preemption
from deepspeed.config.sections.communication_compression import CommunicationCompression
from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.config.sections.data_efficiency import CurriculumLearning, DataEfficiency, ProgressiveLayerDropSection
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.config.sections.expert_parallel import ExpertParallel
from deepspeed.config.sections.float8 import Float8
from deepspeed.config.sections.inference import HybridEngine
from deepspeed.config.sections.monitor import (
    Comet,
    CommsLogger,
    CsvMonitor,
    FlopsProfilerSection,
    RunReport,
    TensorBoard,
    Timers,
    TraceSection,
    Wandb,
)
from deepspeed.config.sections.offload import Aio
from deepspeed.config.sections.optimizer import Optimizer
from deepspeed.config.sections.pipeline import PipelineSection
from deepspeed.config.sections.precision import Amp, Bf16, DataTypes, Fp16, MsAmp, TorchAutocast
from deepspeed.config.sections.quantization import EigenvalueSection, QuantizeTraining, WeightQuantization
from deepspeed.config.sections.scheduler import Scheduler
from deepspeed.config.sections.sparse_attention import SparseAttention
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.config.types import AnyCase, Bool, Degree, DType, Float, Int, Steps, TextList, to_bool


class SequenceParallel(Section):
    """Controls how the ranks of ``sequence_parallel_size`` share sequences. Upstream has no such section."""

    _feature: ClassVar[str] = "deepspeed.parallel.sequence.feature"

    mode: Annotated[Literal["ulysses", "ring", "both"], AnyCase] = key(
        "ulysses",
        'How attention of Transformers models works on sharded sequences. "ulysses": all-to-all from tokens to '
        'heads. "ring": keys and values pass around the ranks, without a limit by the number of heads. "both": '
        "ulysses among as many neighbors as the heads allow, ring between these groups.",
    )
    loss: Annotated[Literal["gathered", "own_share"], AnyCase] = key(
        "gathered",
        'What each rank back-propagates. "gathered": the loss of the whole sequence, gathered by a collective '
        "whose backward sums over the ranks (the recipe of Accelerate and the Trainer, mean_loss); gradients are "
        'divided by the number of data and sequence ranks. "own_share": only its share of that loss, as older '
        "programs do; gradients are divided by the number of data ranks. Both give the gradient of the unsharded "
        "loss.",
    )
    evaluation: Annotated[Literal["logits", "loss", "whole"], AnyCase] = key(
        "logits",
        "How a causal Transformers model evaluates if every rank has whole sequences of its own (the model was "
        'registered with disable_in_eval, as Accelerate and the Trainer do). "logits": the ranks of a group compute '
        "the batches of all of them together, one batch after the other, and each rank gets the loss and the logits "
        'of its own. "loss": the same, but a batch with labels gives only the loss, by tiles if tiled_loss is set. '
        '"whole": every rank computes its batch alone; needed if only some of the sequence ranks evaluate.',
    )
    recompute_exchange: Bool = key(
        False,
        "Save the output of attention for backward only by tokens, not also by heads, and exchange it once more in "
        "backward. This saves one activation per layer and costs a ninth exchange per layer and step. Only with mode "
        '"ulysses" and layers without activation checkpointing; with packed documents and sliding windows both are '
        "saved.",
    )
    tiled_mlp: Bool = key(
        False,
        "Compute the MLPs of a Transformers model tile by tile along the sequence, and recompute them in "
        "backward. Works without sequence ranks too.",
    )
    tiled_loss: Bool = key(
        False,
        "Compute the loss of a causal Transformers model from its hidden states, so that logits exist for one "
        "tile of tokens at a time. The outputs then have a loss and no logits. Works without sequence ranks too.",
    )
    tile_tokens: Int = key(2048, "Tokens of a tile.", unit="tokens", above=0)
    offload_checkpoints: Bool = key(
        False,
        "Checkpoint the layers of a Transformers model (as gradient_checkpointing_enable does) and keep their "
        "saved inputs in host memory. Works without sequence ranks too.",
    )


class Compile(Section):
    """``torch.compile`` of the model, by the keys of releases up to 0.14.3, as ``engine.compile()`` does.

    The other keys are those of DeepCompile, compiler passes that schedule ZeRO's communication. It is not supported
    yet, so they have no effect.
    """

    switch_name = "enabled"

    deepcompile: Bool = key(False, "Use the passes.", since="0.16.6")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = key(
        None, "Names of passes; autotp only alone, autosp is refused.", null_means="chosen by the stage"
    )
    free_activation: Bool = key(False, "Free large activations.")
    free_activation_threshold: Int = key(
        10_485_760, "Size from which an activation counts as large.", unit="bytes", minimum=0
    )
    offload_activation: Bool = key(False, "Move activations to host memory.")
    offload_activation_pin_memory: Bool = key(True, "Page-locked host memory for them.")
    offload_opt_states: Bool = key(False, "Move optimizer state to host memory.")
    offload_parameters: Bool = key(False, "Move parameters to host memory.")
    double_buffer: Bool = key(True, "Use two buckets for reductions.")
    symmetric_memory: Bool = key(False, "Gather through symmetric memory.")
    debug_log: Bool = key(False, "Log the passes.")
    sync_before_reduce: Bool = key(False, "Debugging: synchronize before reductions.")
    sync_after_reduce: Bool = key(False, "Debugging: synchronize after reductions.")
    sync_before_allgather: Bool = key(False, "Debugging: synchronize before gathers.")
    sync_after_allgather: Bool = key(False, "Debugging: synchronize after gathers.")
    keep_int_input_tensors: Bool = key(True, "Keep integer inputs for the profile.")
    keep_all_input_tensors: Bool = key(False, "Keep all inputs for the profile.")
    autoep_non_moe: Bool = key(False, "Compile the model without its experts.", since="0.19.8")
    enabled: Bool = key(
        False,
        "Compile each repeated block once for all its copies, the remaining parts of the model, and the loss of a "
        "Transformers model.",
        removed="0.14.4",
    )
    backend: str | None = key(
        None,
        "Backend of torch.compile, or the dotted name of a function.",
        removed="0.14.4",
        null_means="the accelerator's: inductor",
    )
    kwargs: dict[str, Any] | None = key(None, "Further arguments of torch.compile.", removed="0.14.4")
    disable: Bool = key(False, "Leave the model as it is although enabled is set.", removed="0.14.4")
    activation_memory_budget: Float | None = key(
        None,
        "Share of activations that compiled parts keep for backward; what is left out is computed again. Only here, "
        "not upstream.",
        minimum=0,
        maximum=1,
        null_means="torch's setting: all that its own choice keeps",
    )


def _to_switch_or_word(value: Any) -> Any:
    word = value.strip().lower() if isinstance(value, str) else None
    return word if word in ("selective", "auto") else to_bool(value)


class ActivationCheckpointing(Section):
    """Settings of ``deepspeed.checkpointing``, which have an effect only where the program calls its functions.

    ``blocks`` and ``recompute_modules`` need no call.
    """

    _feature: ClassVar[str] = "deepspeed.activation_checkpointing.feature"

    blocks: Annotated[bool | Literal["selective", "auto"], BeforeValidator(_to_switch_or_word)] = key(
        False,
        "Recompute repeated blocks in backward and keep only their inputs: children of a ModuleList, or what a "
        "Transformers model checkpoints itself. selective: keep the results of products and attention too, and "
        "recompute what lies between. auto: after the first update, none, selective or whole blocks, by the memory "
        "that it has left. Only here, not upstream.",
        own_auto=True,
    )
    keep: TextList = key(
        None,
        "Operations of torch whose results selective blocks keep, such as aten.mm; empty: products, grouped products "
        "and attention. Only here, not upstream.",
        factory=list,
    )
    partition_activations: Bool = key(False, "Split saved activations over the tensor ranks of the mpu.")
    cpu_checkpointing: Bool = key(False, "Keep saved activations in host memory.")
    contiguous_memory_optimization: Bool = key(
        False,
        "One buffer for saved activations.",
        no_effect="saved activations are kept where they are instead of being copied into a buffer",
    )
    number_checkpoints: Annotated[Int | None, BeforeValidator(lambda value: None if value is False else value)] = key(
        None,
        "Number of checkpointed layers; false is null.",
        unit="layers",
        minimum=0,
        no_effect="only a buffer of saved activations would need it",
    )
    synchronize_checkpoint_boundary: Bool = key(False, "Synchronize the device at each checkpoint.", per_rank=True)
    profile: Bool = key(False, "Time forward and backward of each checkpoint.", per_rank=True)
    recompute_modules: list[Literal["core_attn"]] = key(
        None,
        "Parts of the blocks of a Transformers model (or of modules with recompute_core_attention) that are "
        "recomputed in backward; everything else is kept. core_attn: what attention computes between its "
        "projections.",
        factory=list,
    )

    @override
    def _own_features(self) -> Iterator[str]:
        return super()._own_features() if self.recompute_modules or self.blocks else iter(())


_RULE = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size"


def _switch_as_section(value: Any) -> Any:
    """Translates ``true`` and ``false`` for a section that its presence turns on."""
    if isinstance(value, bool):
        return {} if value else None
    return value


class Root(Section):
    """The whole configuration."""

    _is_shared: ClassVar[bool] = True

    train_batch_size: Int | None = key(
        None,
        f"Samples per optimizer step over all data-parallel ranks. {_RULE}; what is left out is derived.",
        unit="samples",
        above=0,
        null_means="derived",
    )
    train_micro_batch_size_per_gpu: Int | None = key(
        None, "Samples of one forward pass on one rank.", unit="samples", above=0, null_means="derived"
    )
    gradient_accumulation_steps: Int | None = key(
        None,
        "Forward and backward passes per optimizer step. engine.backward divides the loss by it.",
        unit="micro-batches",
        above=0,
        null_means="derived, else 1",
    )
    managed_gradient_accumulation: Bool = key(
        True,
        "true: the engine counts micro-batches and updates at the boundary. false: every step() of the program is "
        "an update; not with a pipeline, DeepCompile or Apex.",
        since="0.19.4",
    )

    gradient_clipping: Float = key(
        1.0,
        "Limit of the global L2 norm of the gradients; 0 switches clipping off. Before 0.19.3 the default was 0.",
        minimum=0,
        infinite=True,
    )
    prescale_gradients: Bool = key(False, "Divide gradients by the number of ranks before the reduction, not after.")
    gradient_predivide_factor: Float = key(
        1.0,
        "Divide gradients by this factor before the reduction, and by (number of ranks / factor) after it. With "
        "prescale_gradients, gradients are divided by the number of ranks before the reduction.",
        above=0,
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], AnyCase] = key(
        "mean",
        "mean: gradients are divided by the number of ranks. sum: they are not; not with stage 3.",
        since="0.19.6",
    )
    communication_data_type: DType | None = key(
        None,
        "Dtype in which gradients are sent.",
        null_means="their own dtype; at stages 0 and 1 sums of several micro-batches in data_types.grad_accum_dtype",
    )
    seq_parallel_communication_data_type: Annotated[
        DType, BeforeValidator(lambda value: "fp32" if value is None else value)
    ] = key(
        "fp32",
        "Dtype in which gradients are sent with sequence_parallel_size above 1, unless communication_data_type is "
        "given. Called seq_parallel_comm_data_type before 0.16.5.",
        null_means="fp32",
    )
    sparse_gradients: Bool = key(
        False,
        "Exchange only those rows of embeddings' gradients that are not zero, with their row numbers.",
        removed="0.19.8",
    )
    disable_allgather: Bool = key(
        False, "From early releases.", no_effect="parameters are always published by all-gather"
    )
    zero_allow_untested_optimizer: Bool = key(
        False,
        "Allow an optimizer class that is not known to be elementwise to update shards. The results are right "
        "only if it updates every element independently. Known elementwise classes need no consent; classes known "
        "to need whole tensors are refused anyway.",
    )
    zero_force_ds_cpu_optimizer: Bool = key(
        True,
        "Require this package's CPU optimizer with optimizer offload.",
        no_effect="a client's optimizer is updated on the host by the same kernels",
    )
    graph_harvesting: Bool = key(
        False,
        "Capture parts of the optimizer as device graphs.",
        removed="0.19.8",
        no_effect="the update is one fused call per run of parameters",
    )
    use_data_before_expert_parallelism: Bool = key(
        False,
        "Which ranks share the experts of a layer: neighbors (false), or ranks as far apart as possible (true), so "
        "that neighbors hold the same experts.",
        since="0.12.4",
    )
    data_parallel_size: Int | None = key(
        None,
        "Data axis of the device mesh, together with sequence_parallel_size.",
        unit="ranks",
        above=0,
        null_means="all ranks that other axes leave",
    )
    sequence_parallel_size: Degree = key(
        1,
        "Sequence axis of the device mesh; divides the data-parallel size.",
        unit="ranks",
        above=0,
        null_means="1",
    )
    max_consecutive_skipped_steps: Int = key(
        100,
        "Steps in a row that may be skipped for infinite or NaN gradients before training stops with the step, rank "
        "and parameter of the first; 0 never stops. Only here, not upstream.",
        unit="steps",
        minimum=0,
    )

    steps_per_print: Steps = key(
        None,
        "Log progress every this many steps. Before 0.15.2 the default was 10.",
        unit="steps",
        above=0,
        null_means="never, as does an infinite number",
        per_rank=True,
    )
    wall_clock_breakdown: Bool = key(False, "Time forward, backward and step. Synchronizes the device.", per_rank=True)
    memory_breakdown: Bool = key(False, "Log memory in use at each phase.", per_rank=True)
    dump_state: Bool = key(False, "Log the engine's state at start-up.", per_rank=True)
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, AnyCase] = key(
        None,
        "Level of the package logger.",
        since="0.19.3",
        null_means="info, or DEEPSPEED_LOG_LEVEL",
        per_rank=True,
    )
    deterministic: Bool = key(
        False,
        "The same run twice on one layout gives the same bits: torch's deterministic algorithms, fixed algorithms of "
        "NCCL and cuBLAS, and fixed seeds of the engine's loader. The program seeds its model and its dropout. Only "
        "here, not upstream.",
        feature="deepspeed.engine.deterministic",
    )
    batch_invariant: Bool = key(
        False,
        "A sample's outputs have the same bits alone, in a batch of any size, at any place, and padded on the right: "
        "products and attention are computed in tiles of fixed sizes, on one thread. On the CPU. Its price is logged. "
        "Only here, not upstream.",
        feature="deepspeed.fast_path.batch_invariant",
    )
    fused_loss: Bool = key(
        False,
        "Compute the loss of a causal Transformers model from its hidden states in training, so that logits never "
        "exist as a whole. Outputs with labels then have a loss and no logits. Only here, not upstream.",
        feature="deepspeed.fast_path.fused_loss",
    )
    dataloader_drop_last: Bool = key(False, "Drop the last incomplete batch, in the engine's own data loader.")
    vocabulary_size: Int | None = key(
        None, "From early releases.", above=0, no_effect="it only gave a warning for sizes that are not a multiple of 8"
    )
    timers: Timers = key(None, "Timers that are always on.", factory=Timers, per_rank=True)
    disable_python_gc: Bool = key(
        False, "Switch Python's garbage collector off while training.", since="0.19.8", per_rank=True
    )

    optimizer: Optimizer | None = key(None, "The optimizer.", null_means="the client's, or none")
    scheduler: Scheduler | None = key(None, "The learning-rate schedule.", null_means="the client's, or none")
    fp16: Fp16 = key(None, "Half precision.", factory=Fp16)
    bf16: Bf16 = key(None, "Bfloat16.", factory=Bf16)
    torch_autocast: TorchAutocast = key(None, "torch.autocast.", factory=TorchAutocast)
    amp: Amp | None = key(None, "Apex mixed precision.", removed="0.19.8")
    data_types: DataTypes = key(None, "Data types.", factory=DataTypes)
    zero_optimization: ZeroOptimization = key(None, "ZeRO.", factory=ZeroOptimization)
    aio: Aio = key(None, "File access of NVMe offload.", factory=Aio, per_rank=True)
    activation_checkpointing: ActivationCheckpointing = key(
        None, "Activation checkpointing.", factory=ActivationCheckpointing
    )
    checkpoint: Checkpoint = key(None, "Checkpoints.", factory=Checkpoint)
    datastates_ckpt: Annotated[DataStates | None, BeforeValidator(_switch_as_section)] = key(
        None, "Asynchronous checkpoint engine.", since="0.18.1"
    )
    nebula: Nebula | None = key(None, "Nebula checkpoints.", removed="0.19.8")
    tensorboard: TensorBoard = key(None, "TensorBoard.", factory=TensorBoard, per_rank=True)
    csv_monitor: CsvMonitor = key(None, "CSV files.", factory=CsvMonitor, per_rank=True)
    wandb: Wandb = key(None, "Weights & Biases.", factory=Wandb, per_rank=True)
    comet: Comet = key(None, "Comet.", factory=Comet, per_rank=True)
    trace: TraceSection = key(
        None, "Trace of a few steps. Only here, not upstream.", factory=TraceSection, per_rank=True
    )
    run_report: RunReport = key(
        None,
        "A page about where the time of a run went. Only here, not upstream.",
        factory=RunReport,
        per_rank=True,
    )
    comms_logger: CommsLogger = key(None, "Log of collectives.", factory=CommsLogger, per_rank=True)
    flops_profiler: FlopsProfilerSection = key(
        None, "Profile of one step.", factory=FlopsProfilerSection, per_rank=True
    )
    autotuning: Autotuning | None = key(None, "Search for a fast configuration.")
    elasticity: Elasticity | None = key(None, "Elastic batch sizes.", removed="0.19.8")
    preemption: Preemption | None = key(None, "Save and exit when a scheduler sends a signal.")
    pipeline: PipelineSection = key(None, "Pipeline modules.", factory=PipelineSection)
    tensor_parallel: TensorParallel = key(None, "AutoTP.", factory=TensorParallel)
    expert_parallel: ExpertParallel | None = key(None, "AutoEP.")
    sequence_parallel: SequenceParallel = key(
        None, "How ranks divide sequences. Only here, not upstream.", factory=SequenceParallel
    )
    communication_compression: CommunicationCompression = key(
        None,
        "Send gradients and weights in fewer bits. Only here, not upstream.",
        factory=CommunicationCompression,
    )
    compile: Compile = key(None, "DeepCompile.", factory=Compile)
    hybrid_engine: HybridEngine = key(None, "Training and generation.", factory=HybridEngine)
    data_efficiency: DataEfficiency | None = key(None, "Curriculum and token dropping.")
    curriculum_learning: CurriculumLearning | None = key(None, "Older curriculum.", removed="0.19.8")
    progressive_layer_drop: ProgressiveLayerDropSection | None = key(None, "Layer drop.", removed="0.19.8")
    compression_training: CompressionTraining | None = key(None, "Compression.", removed="0.19.8")
    float8: Float8 | None = key(None, "Products in float8. Only here, not upstream.")
    weight_quantization: WeightQuantization | None = key(None, "Weight-only quantization.")
    sparse_attention: SparseAttention | None = key(None, "Block-sparse attention: the pattern.", removed="0.19.8")
    quantize_training: QuantizeTraining | None = key(None, "Older quantized training.", removed="0.6.8")
    eigenvalue: EigenvalueSection | None = key(
        None,
        "Reduce the bits of sensitive blocks later, by the eigenvalues of their Hessians. Used if quantize_training "
        "has no section eigenvalue.",
        removed="0.19.8",
    )
    msamp: MsAmp | None = key(None, "MS-AMP; written by accelerate.")
    inference: Any = key(
        None, "Found in files of other programs.", no_effect="init_inference has a configuration of its own"
    )
    comment: Any = key(None, "A remark; keys that begin with an underscore are remarks at every level.")
