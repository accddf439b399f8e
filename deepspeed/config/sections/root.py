"""The top level: batch sizes, what concerns all gradients, logging, and the sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from deepspeed.config.section import Section, key
from deepspeed.config.sections.activation import ActivationCheckpointing
from deepspeed.config.sections.autotuning import Autotuning
from deepspeed.config.sections.checkpoint import Checkpoint, DataStates, Nebula, Preemption
from deepspeed.config.sections.communication_compression import CommunicationCompression
from deepspeed.config.sections.compile import Compile
from deepspeed.config.sections.compression import CompressionTraining
from deepspeed.config.sections.data_efficiency import CurriculumLearning, DataEfficiency, ProgressiveLayerDropSection
from deepspeed.config.sections.elasticity import Elasticity
from deepspeed.config.sections.expert_parallel import ExpertParallel
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
from deepspeed.config.sections.sequence_parallel import SequenceParallel
from deepspeed.config.sections.sparse_attention import SparseAttention
from deepspeed.config.sections.tensor_parallel import TensorParallel
from deepspeed.config.sections.zero import ZeroOptimization
from deepspeed.config.types import AnyCase, Bool, DType, Float, Int, Steps

_RULE = "train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size"


def _switch_as_section(value: Any) -> Any:
    """``true`` and ``false`` for a section that its presence turns on."""
    if isinstance(value, bool):
        return {} if value else None
    return value


class Root(Section):
    """The whole configuration."""

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
        "Divide gradients by this before the reduction, and by the rest of the number of ranks after it. With "
        "prescale_gradients the whole division is done before.",
        above=0,
    )
    gradient_allreduce_op: Annotated[Literal["mean", "sum"], AnyCase] = key(
        "mean",
        "mean: gradients are divided by the number of ranks. sum: they are not; not with stage 3.",
        since="0.19.6",
    )
    communication_data_type: DType | None = key(
        None, "Dtype in which gradients are sent.", null_means="fp16 or bf16 when enabled, else fp32"
    )
    seq_parallel_communication_data_type: DType = key(
        "fp32",
        "Dtype in which gradients are sent with sequence_parallel_size above 1, unless communication_data_type is "
        "given. Called seq_parallel_comm_data_type before 0.16.5.",
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
        "Which ranks share the experts of a layer: neighbours (false), or ranks as far apart as possible (true), so "
        "that neighbours hold the same experts.",
        since="0.12.4",
    )
    data_parallel_size: Int | None = key(
        None,
        "Data axis of the device mesh, together with sequence_parallel_size.",
        unit="ranks",
        above=0,
        null_means="all ranks that other axes leave",
    )
    sequence_parallel_size: Int = key(
        1, "Sequence axis of the device mesh; divides the data-parallel size.", unit="ranks", above=0
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
    )
    wall_clock_breakdown: Bool = key(False, "Time forward, backward and step. Synchronises the device.")
    memory_breakdown: Bool = key(False, "Log memory in use at each phase.")
    dump_state: Bool = key(False, "Log the engine's state at start-up.")
    log_level: Annotated[Literal["debug", "info", "warning", "error", "critical"] | None, AnyCase] = key(
        None, "Level of the package logger.", since="0.19.3", null_means="info, or DEEPSPEED_LOG_LEVEL"
    )
    dataloader_drop_last: Bool = key(False, "Drop the last incomplete batch, in the engine's own data loader.")
    vocabulary_size: Int | None = key(
        None, "From early releases.", above=0, no_effect="it only gave a warning for sizes that are not a multiple of 8"
    )
    timers: Timers = key(None, "Timers that are always on.", factory=Timers)
    disable_python_gc: Bool = key(False, "Switch Python's garbage collector off while training.", since="0.19.8")

    optimizer: Optimizer | None = key(None, "The optimizer.", null_means="the client's, or none")
    scheduler: Scheduler | None = key(None, "The learning-rate schedule.", null_means="the client's, or none")
    fp16: Fp16 = key(None, "Half precision.", factory=Fp16)
    bf16: Bf16 = key(None, "Bfloat16.", factory=Bf16)
    torch_autocast: TorchAutocast = key(None, "torch.autocast.", factory=TorchAutocast)
    amp: Amp | None = key(None, "Apex mixed precision.", removed="0.19.8")
    data_types: DataTypes = key(None, "Data types.", factory=DataTypes)
    zero_optimization: ZeroOptimization = key(None, "ZeRO.", factory=ZeroOptimization)
    aio: Aio = key(None, "File access of NVMe offload.", factory=Aio)
    activation_checkpointing: ActivationCheckpointing = key(
        None, "Activation checkpointing.", factory=ActivationCheckpointing
    )
    checkpoint: Checkpoint = key(None, "Checkpoints.", factory=Checkpoint)
    datastates_ckpt: Annotated[DataStates | None, BeforeValidator(_switch_as_section)] = key(
        None, "Asynchronous checkpoint engine.", since="0.18.1"
    )
    nebula: Nebula | None = key(None, "Nebula checkpoints.", removed="0.19.8")
    tensorboard: TensorBoard = key(None, "TensorBoard.", factory=TensorBoard)
    csv_monitor: CsvMonitor = key(None, "CSV files.", factory=CsvMonitor)
    wandb: Wandb = key(None, "Weights & Biases.", factory=Wandb)
    comet: Comet = key(None, "Comet.", factory=Comet)
    trace: TraceSection = key(None, "Trace of a few steps. Only here, not upstream.", factory=TraceSection)
    run_report: RunReport = key(
        None, "A page about where the time of a run went. Only here, not upstream.", factory=RunReport
    )
    comms_logger: CommsLogger = key(None, "Log of collectives.", factory=CommsLogger)
    flops_profiler: FlopsProfilerSection = key(None, "Profile of one step.", factory=FlopsProfilerSection)
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
    weight_quantization: WeightQuantization | None = key(None, "Weight-only quantization.")
    sparse_attention: SparseAttention | None = key(None, "Block-sparse attention: the pattern.", removed="0.19.8")
    quantize_training: QuantizeTraining | None = key(None, "Older quantized training.", removed="0.6.8")
    eigenvalue: EigenvalueSection | None = key(
        None,
        "Choose when widths fall by the eigenvalues of blocks, where quantize_training has no section eigenvalue.",
        removed="0.19.8",
    )
    msamp: MsAmp | None = key(None, "MS-AMP; written by accelerate.")
    inference: Any = key(
        None, "Found in files of other programs.", no_effect="init_inference has a configuration of its own"
    )
    comment: Any = key(None, "A remark; keys that begin with an underscore are remarks at every level.")
