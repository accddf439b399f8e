"""The list of what is missing: one :class:`Feature` per thing, with its public names by module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Feature:
    """One thing that is missing.

    Attributes:
        title: What it is, as the subject of a sentence.
        instead: What to do today: one sentence.
        names: Its public names, by module.
    """

    title: str
    instead: str
    names: dict[str, str]

    def full_names(self) -> list[str]:
        """Every name with its module, in the order of the table."""
        return [f"{module}.{name}" for module, names in self.names.items() for name in names.split()]

    def sentence(self, name: str) -> str:
        """What using ``name`` raises."""
        return f"{name}: {self.title} is not supported yet. {self.instead}"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "pipeline parallelism",
        "Shard the model with ZeRO stage 3 instead, which needs no stages.",
        {
            "deepspeed.pipe": "PipelineModule LayerSpec TiedLayerSpec DualPipeVModule",
            "deepspeed.runtime.pipe.engine": "PipelineEngine DualPipeVEngine",
            "deepspeed.runtime.pipe.topology": (
                "ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid"
            ),
            "deepspeed.runtime.pipe.schedule": (
                "PipeSchedule TrainSchedule InferenceSchedule DataParallelSchedule PipeInstruction OptimizerStep "
                "ReduceGrads ReduceTiedGrads BufferOpInstruction LoadMicroBatch ForwardPass BackwardPass "
                "SendActivation RecvActivation SendGrad RecvGrad"
            ),
        },
    ),
    Feature(
        "mixture of experts",
        "Use the model's own expert layers; ZeRO shards their parameters like any others.",
        {
            "deepspeed.moe.layer": "MoE",
            "deepspeed.moe.experts": "Experts",
            "deepspeed.moe.sharded_moe": "TopKGate MOELayer top1gating top2gating topkgating",
            "deepspeed.moe.utils": (
                "split_params_into_shared_and_expert_params split_params_grads_into_shared_and_expert_params "
                "split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups"
            ),
        },
    ),
    Feature(
        "sequence parallelism",
        "Use activation checkpointing (deepspeed.checkpointing) for long sequences.",
        {
            "deepspeed.sequence.layer": "DistributedAttention",
            "deepspeed.runtime.sequence_parallel.ulysses_sp": (
                "UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter sequence_tiled_compute SequenceTiledCompute TiledMLP "
                "TiledFusedLogitsLoss"
            ),
            "deepspeed.runtime.sequence_parallel.parallel_state_sp": (
                "initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_world_size "
                "get_sequence_parallel_rank get_sequence_data_parallel_group get_sequence_data_parallel_world_size "
                "get_sequence_data_parallel_rank"
            ),
        },
    ),
    Feature(
        "tensor parallelism",
        "Shard the model with ZeRO stage 3, or hand in an mpu object that describes your own tensor parallelism.",
        {"deepspeed": "tp_model_init set_autotp_mode"},
    ),
    Feature(
        "the inference engine",
        "Run the model under torch.inference_mode(), or initialize() it without an optimizer at ZeRO stage 3.",
        {
            "deepspeed": "init_inference default_inference_config",
            "deepspeed.inference.engine": "InferenceEngine",
            "deepspeed.inference.config": "DeepSpeedInferenceConfig",
            "deepspeed.module_inject": "replace_transformer_layer",
            "deepspeed.model_implementations": "DeepSpeedTransformerInference",
        },
    ),
    Feature(
        "the hybrid engine for training with generation",
        "Generate with the trained module itself.",
        {"deepspeed.runtime.hybrid_engine": "DeepSpeedHybridEngine"},
    ),
    Feature(
        "the fused transformer layer",
        "Use torch.nn.TransformerEncoderLayer, whose attention torch fuses.",
        {"deepspeed": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig"},
    ),
    Feature(
        "the LoRA-optimized linear layer",
        "Use peft's LoRA on a ZeRO-sharded model.",
        {"deepspeed.linear": "OptimizedLinear LoRAConfig QuantizationConfig Init init_lora"},
    ),
    Feature(
        "model compression",
        "Quantise with torch.ao or prune with torch.nn.utils.prune.",
        {"deepspeed.compression": "init_compression redundancy_clean student_initialization"},
    ),
    Feature(
        "autotuning",
        "Choose the micro-batch size and the ZeRO stage by hand.",
        {"deepspeed.autotuning": "Autotuner"},
    ),
    Feature(
        "an optimizer wrapper for each precision",
        "deepspeed.initialize returns one class for all of them, deepspeed.zero.optimizer.DeepSpeedZeroOptimizer.",
        {
            "deepspeed.runtime.fp16.fused_optimizer": "FP16_Optimizer",
            "deepspeed.runtime.fp16.unfused_optimizer": "FP16_UnfusedOptimizer",
            "deepspeed.runtime.bf16_optimizer": "BF16_Optimizer",
        },
    ),
    Feature(
        "a tiled linear layer",
        "Use torch.nn.Linear; ZeRO stage 3 gathers one layer at a time.",
        {"deepspeed.runtime.zero.tiling": "TiledLinear TiledLinearReturnBias"},
    ),
    Feature(
        "a file writer of its own for checkpoints",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {"deepspeed.io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter"},
    ),
    Feature(
        "the DataStates checkpoint engine",
        "Use engine.save_checkpoint.",
        {"deepspeed.datastates.config": "DeepSpeedDataStatesConfig"},
    ),
    Feature(
        "a pluggable checkpoint engine",
        "Use engine.save_checkpoint and engine.load_checkpoint.",
        {"deepspeed.runtime.checkpoint_engine.checkpoint_engine": "CheckpointEngine TorchCheckpointEngine"},
    ),
    Feature(
        "taking a checkpoint apart by its upstream layout",
        "Use the functions of deepspeed.utils.zero_to_fp32, or ds_inspect to look into it.",
        {"deepspeed.checkpoint": "DeepSpeedCheckpoint"},
    ),
    Feature(
        "binding processes to cores",
        "Start the ranks with deepspeed --bind_cores_to_rank.",
        {"deepspeed.utils.numa": "get_numactl_cmd get_numa_cores"},
    ),
)
