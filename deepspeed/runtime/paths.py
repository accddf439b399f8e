"""The modules below ``deepspeed.runtime`` that programs import, and where each of their names is defined.

None of these modules is a file: :mod:`.finder` makes them when they are imported. Names of missing features
(:mod:`deepspeed.missing_features`) need no mention.
"""

from __future__ import annotations

# Path below deepspeed.runtime -> defining module -> names; "known=defined" where the two names differ.
PATHS: dict[str, dict[str, str]] = {
    "activation_checkpointing": {},
    "activation_checkpointing.config": {
        "deepspeed.config.sections.activation": "DeepSpeedActivationCheckpointingConfig=ActivationCheckpointing",
    },
    "base_optimizer": {
        "deepspeed.zero.update.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer",
    },
    "bf16_optimizer": {},
    "checkpoint_engine": {
        "deepspeed.runtime.checkpoint_engine.checkpoint_engine": "CheckpointEngine TorchCheckpointEngine",
    },
    "checkpoint_engine.checkpoint_engine": {},
    "config": {
        "deepspeed.config": "DeepSpeedConfig load_ds_config",
        "deepspeed.errors": "DeepSpeedConfigError",
    },
    "config_utils": {
        "deepspeed.config.program_model": "DeepSpeedConfigModel get_scalar_param",
    },
    "constants": {
        "deepspeed.constants": "ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN",
    },
    "data_pipeline": {},
    "data_pipeline.curriculum_scheduler": {
        "deepspeed.data.curriculum.scheduler": "CurriculumScheduler",
    },
    "data_pipeline.data_routing": {},
    "data_pipeline.data_routing.basic_layer": {
        "deepspeed.dropping.tokens": "RandomLayerTokenDrop",
    },
    "data_pipeline.data_routing.helper": {
        "deepspeed.dropping.convert": "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd",
    },
    "data_pipeline.data_routing.scheduler": {
        "deepspeed.dropping.token_schedule": "RandomLTDScheduler",
    },
    "data_pipeline.data_sampling": {},
    "data_pipeline.data_sampling.data_analyzer": {
        "deepspeed.data.analysis.analyzer": "DataAnalyzer",
        "deepspeed.data.analysis.distributed": "DistributedDataAnalyzer",
    },
    "data_pipeline.data_sampling.data_sampler": {
        "deepspeed.data.curriculum.sampler": "DeepSpeedDataSampler",
    },
    "data_pipeline.data_sampling.indexed_dataset": {
        "deepspeed.data.indexed.builder": "MMapIndexedDatasetBuilder",
        "deepspeed.data.indexed.dataset": "MMapIndexedDataset",
        "deepspeed.data.indexed.format": "data_file_path index_file_path",
    },
    "data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "deepspeed.data.batching.loading": "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
        "deepspeed.data.batching.packing": "batch_by_seqlens scale_lr",
        "deepspeed.data.batching.rates": "VariableBatchSizeLR",
    },
    "dataloader": {
        "deepspeed.data": "DeepSpeedDataLoader RepeatingLoader",
    },
    "domino": {},
    "domino.transformer": {},
    "eigenvalue": {
        "deepspeed.compression.eigenvalue": "Eigenvalue",
    },
    "engine": {
        "deepspeed.engine": "DeepSpeedEngine",
        "deepspeed.engine.parts": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    },
    "fp16": {},
    "fp16.fused_optimizer": {},
    "fp16.loss_scaler": {
        "deepspeed.precision.loss_scaler": (
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler INITIAL_LOSS_SCALE "
            "LossScaler LossScalerBase MIN_LOSS_SCALE SCALE_WINDOW"
        ),
    },
    "fp16.onebit": {
        "deepspeed.ops.onebit": "OnebitAdam=OneBitAdam OnebitLamb=OneBitLamb ZeroOneAdam",
    },
    "fp16.onebit.adam": {
        "deepspeed.ops.onebit.adam": "OnebitAdam=OneBitAdam",
    },
    "fp16.onebit.lamb": {
        "deepspeed.ops.onebit.lamb": "OnebitLamb=OneBitLamb",
    },
    "fp16.onebit.zoadam": {
        "deepspeed.ops.onebit.zero_one": "ZeroOneAdam",
    },
    "fp16.unfused_optimizer": {},
    "hybrid_engine": {
        "deepspeed.engine.hybrid": "DeepSpeedHybridEngine",
    },
    "lr_schedules": {
        "deepspeed.schedulers": (
            "LRRangeTest OneCycle VALID_LR_SCHEDULES WarmupCosineLR WarmupDecayLR WarmupLR add_tuning_arguments "
            "get_config_from_args get_lr_from_config get_torch_optimizer override_1cycle_params "
            "override_lr_range_test_params override_params override_warmupLR_params parse_arguments update_lr"
        ),
        "deepspeed.schedulers.names": (
            "COS_MIN_RATIO CYCLE_FIRST_STAIR_COUNT CYCLE_FIRST_STEP_SIZE CYCLE_MAX_LR CYCLE_MAX_MOM CYCLE_MIN_LR "
            "CYCLE_MIN_MOM CYCLE_SECOND_STAIR_COUNT CYCLE_SECOND_STEP_SIZE DECAY_LR_RATE DECAY_MOM_RATE "
            "DECAY_STEP_SIZE LR_RANGE_TEST LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STAIRCASE LR_RANGE_TEST_STEP_RATE "
            "LR_RANGE_TEST_STEP_SIZE LR_SCHEDULE ONE_CYCLE TOTAL_NUM_STEPS WARMUP_COSINE_LR WARMUP_DECAY_LR "
            "WARMUP_LINEAR_RATE WARMUP_LOG_RATE WARMUP_LR WARMUP_MAX_LR WARMUP_MIN_LR WARMUP_MIN_RATIO "
            "WARMUP_NUM_STEPS WARMUP_TYPE"
        ),
    },
    "pipe": {
        "deepspeed.parallel.pipe.topology": "ProcessTopology",
        "deepspeed.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    },
    "pipe.engine": {
        "deepspeed.engine.pipeline": "DualPipeVEngine PipelineEngine",
    },
    "pipe.module": {
        "deepspeed.errors": "PipelineError",
        "deepspeed.pipe": "DualPipeVModule LayerSpec PipelineModule TiedLayerSpec",
    },
    "pipe.schedule": {
        "deepspeed.parallel.pipe.schedule.instructions": (
            "BackwardPass BufferOpInstruction ForwardPass LoadMicroBatch OptimizerStep PipeInstruction "
            "RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation SendGrad"
        ),
        "deepspeed.parallel.pipe.schedule.published": (
            "DataParallelSchedule InferenceSchedule PipeSchedule TrainSchedule"
        ),
    },
    "pipe.topology": {
        "deepspeed.parallel.pipe.grid": "PipelineParallelGrid",
        "deepspeed.parallel.pipe.topology": "PipeDataParallelTopology PipeModelDataParallelTopology ProcessTopology",
    },
    "progressive_layer_drop": {
        "deepspeed.dropping.theta": "ProgressiveLayerDrop",
    },
    "rollout": {
        "deepspeed.engine.rollout": "HybridEngineRollout RolloutBatch RolloutRequest SamplingConfig",
    },
    "sequence_parallel": {},
    "sequence_parallel.ulysses_sp": {
        "deepspeed.parallel.sequence.loader": "UlyssesSPDataLoaderAdapter",
        "deepspeed.parallel.sequence.tiled": (
            "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute"
        ),
        "deepspeed.parallel.sequence.ulysses": "UlyssesSPAttentionHF",
    },
    "tensor_parallel": {
        "deepspeed.config.sections.tensor_parallel": "TPConfig=TpGroup TPTrainingConfig=TensorParallel",
    },
    "utils": {
        "deepspeed.data": "move_to_device set_random_seed",
        "deepspeed.parallel.partition": "partition_balanced partition_uniform prefix_sum_inc",
        "deepspeed.precision.clipping": "clip_grad_norm_ get_global_norm",
        "deepspeed.profiling.memory": "see_memory_usage",
    },
    "zero": {
        "deepspeed.zero": (
            "GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType register_external_parameter "
            "unwrap_model_for_generation"
        ),
        "deepspeed.zero.access.parameter_offload": "DeepSpeedZeRoOffload",
        "deepspeed.zero.tiled_linear": "TiledLinear TiledLinearReturnBias",
    },
    "zero.config": {
        "deepspeed.config.enums": "OffloadDeviceEnum ZeroStageEnum",
        "deepspeed.config.sections.offload": (
            "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer DeepSpeedZeroOffloadParamConfig=OffloadParam"
        ),
        "deepspeed.config.sections.zero": "DeepSpeedZeroConfig=ZeroOptimization",
    },
    "zero.offload_config": {
        "deepspeed.config.enums": "OffloadDeviceEnum OffloadStateTypeEnum",
        "deepspeed.config.sections.offload": (
            "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer DeepSpeedZeroOffloadParamConfig=OffloadParam"
        ),
    },
    "zero.parameter_offload": {
        "deepspeed.zero.access.parameter_offload": "DeepSpeedZeRoOffload",
    },
    "zero.partition_parameters": {
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.zero": (
            "DeepSpeedTensorOverride GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType "
            "register_external_parameter unregister_external_parameter"
        ),
        "deepspeed.zero.construction.constructors": "_orig_torch_arange zero_wrapper_for_fp_tensor_constructor",
        "deepspeed.zero.address": "is_zero_param",
    },
    "zero.stage3": {
        "deepspeed.plan.memory_estimates": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live"
        ),
        "deepspeed.zero.update.optimizer": "DeepSpeedZeroOptimizer_Stage3",
    },
    "zero.stage_1_and_2": {
        "deepspeed.plan.memory_estimates": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        ),
        "deepspeed.zero.update.optimizer": "DeepSpeedZeroOptimizer",
    },
    "zero.tiling": {
        "deepspeed.zero.tiled_linear": "TiledLinear TiledLinearReturnBias",
    },
    "zero.utils": {
        "deepspeed.zero.address": "is_zero_param",
    },
}

# Paths that stand for a whole module.
MODULES: dict[str, str] = {
    "activation_checkpointing.checkpointing": "deepspeed.activation_checkpointing.checkpointing",
    "sequence_parallel.parallel_state_sp": "deepspeed.parallel.sequence.state",
}
