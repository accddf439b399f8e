"""The table of modules that only re-export names, under the paths by which programs import them.

These modules have no files. ``import deepspeed`` calls :func:`install`, which adds a finder that creates each module at
its import: an ordinary module in ``sys.modules`` whose names are resolved at first use (:mod:`deepspeed.lazy`). So
``import``, attribute access, pickles and patched attributes work as with files. The ``.pyi`` files in the packages
declare these modules to type checkers.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from deepspeed.lazy import homes_of, lazy_names

ROOT = "deepspeed"

# Names that several paths have.
_LEAF_MODULES = (
    "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
)
_OFFLOAD_SECTIONS = "DeepSpeedZeroOffloadOptimizerConfig=OffloadOptimizer DeepSpeedZeroOffloadParamConfig=OffloadParam"
_SAFE_ACCESS = (
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_grad "
    "safe_set_full_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state safe_update_full_grad_vectorized"
)

# Path below deepspeed -> the table of deepspeed.lazy.lazy_names: defining module -> names; "public=defined" if the two
# names differ. Names of missing features (deepspeed.missing_features) are added automatically.
PATHS: dict[str, dict[str, str]] = {
    "accelerator.abstract_accelerator": {"deepspeed.accelerator.base": "DeepSpeedAccelerator"},
    "accelerator.real_accelerator": {
        "deepspeed.accelerator.selection": "get_accelerator is_current_accelerator_supported set_accelerator",
    },
    "compile": {},
    "checkpoint.reshape_3d_utils": {},
    "checkpoint.reshape_meg_2d": {},
    "checkpoint.reshape_utils": {},
    "checkpoint.zero_checkpoint": {},
    "compile.passes": {},
    "compile.passes.sp_compile": {},
    "inference.v2.inference_utils": {},
    "inference.v2.ragged": {},
    "module_inject.auto_tp": {},
    "module_inject.replace_module": {},
    "module_inject.replace_policy": {},
    "module_inject.tp_shard": {},
    "ops.transformer.inference": {},
    "ops.transformer.inference.config": {},
    "ops.transformer.inference.diffusers_attention": {},
    "ops.transformer.inference.diffusers_transformer_block": {},
    "runtime.comm": {},
    "runtime.comm.coalesced_collectives": {},
    "runtime.pipe.p2p": {},
    "runtime.sparse_tensor": {},
    "runtime.state_dict_factory": {},
    "runtime.swap_tensor": {},
    "runtime.swap_tensor.partitioned_optimizer_swapper": {},
    "runtime.swap_tensor.partitioned_param_swapper": {},
    "runtime.swap_tensor.pipelined_optimizer_swapper": {},
    "runtime.weight_quantizer": {},
    "utils.bwc": {},
    "checkpoint.universal_checkpoint": {"deepspeed.checkpoint.upstream.files": "SubparamShape"},
    "comm.torch": {"deepspeed.comm.torch_backend": "TorchBackend"},
    "ops.aio": {"deepspeed.ops.op_builder": "AsyncIOBuilder GDSBuilder"},
    "compression.compress": {
        "deepspeed.compression.cleaning": "redundancy_clean",
        "deepspeed.compression.installing": "init_compression student_initialization",
    },
    "compression.helper": {
        "deepspeed.compression.installing": "convert_conv1d_to_linear recursive_getattr recursive_setattr",
    },
    "compression.scheduler": {"deepspeed.compression.feature": "compression_scheduler"},
    "datastates": {},
    "datastates.config": {},
    "elasticity.config": {
        "deepspeed.elasticity.elasticity": "ElasticityConfig",
        "deepspeed.errors": "ElasticityConfigError ElasticityError ElasticityIncompatibleWorldSize",
    },
    "elasticity.constants": {
        "deepspeed.elasticity.elasticity": (
            "DEEPSPEED_ELASTICITY_CONFIG ELASTICITY ENABLED ENABLED_DEFAULT LATEST_ELASTICITY_VERSION "
            "MINIMUM_DEEPSPEED_VERSION"
        ),
    },
    "elasticity.utils": {"deepspeed.elasticity.elasticity": "is_torch_elastic_compatible"},
    "features": {"deepspeed.missing_features": "FEATURES Feature is_missing missing_names unavailable"},
    "inference.v2": {},
    "inference.v2.config_v2": {},
    "inference.v2.engine_factory": {},
    "inference.v2.engine_v2": {},
    "io": {},
    "model_implementations": {},
    "monitor.comet": {"deepspeed.monitor.monitor": "CometMonitor"},
    "monitor.config": {
        "deepspeed.config.sections.monitor": (
            "CSVConfig=CsvMonitor CometConfig=Comet TensorBoardConfig=TensorBoard WandbConfig=Wandb"
        ),
        "deepspeed.monitor.monitor": "DeepSpeedMonitorConfig get_monitor_config",
    },
    "monitor.csv_monitor": {"deepspeed.monitor.monitor": "csvMonitor"},
    "monitor.tensorboard": {"deepspeed.monitor.monitor": "TensorBoardMonitor"},
    "monitor.wandb": {"deepspeed.monitor.monitor": "WandbMonitor"},
    "module_inject": {
        "deepspeed.parallel.tensor.linear": "LinearAllreduce=RowLinear LinearLayer=ColumnLinear",
        "deepspeed.parallel.tensor.request": "set_autotp_mode",
    },
    "module_inject.layers": {
        "deepspeed.parallel.tensor.linear": (
            "GateUpPack_LinearLayer=GatedColumnLinear LinearAllreduce=RowLinear "
            "LinearAllreduceWithReplicatedInput=WholeInputRowLinear LinearLayer=ColumnLinear "
            "SubParamLinearAllreduce=PackedRowLinear SubParamLinearLayer=PackedColumnLinear"
        ),
        "deepspeed.parallel.tensor.gathering": "GatherReplacedLayerParams",
        "deepspeed.parallel.tensor.request": "set_autotp_mode",
        "deepspeed.parallel.tensor.vocabulary": (
            "HiddenParallelEmbedding=WidthEmbedding VocabParallelEmbedding=VocabularyEmbedding"
        ),
    },
    "moe": {},
    "moe.ep_experts": {
        "deepspeed.parallel.expert.activations": (
            "EXPERT_ACTIVATIONS ExpertActivation get_expert_activation register_expert_activation"
        ),
    },
    "moe.experts": {"deepspeed.parallel.expert.layer": "Experts"},
    "moe.layer": {
        "deepspeed.parallel.expert.layer": "Experts MOELayer MoE",
        "deepspeed.parallel.expert.gate": "TopKGate",
    },
    "moe.sharded_moe": {
        "deepspeed.parallel.expert.gate": "TopKGate multiplicative_jitter=jittered top1gating top2gating topkgating",
        "deepspeed.parallel.expert.layer": "MOELayer",
    },
    "moe.utils": {
        "deepspeed.parallel.expert.param_groups": (
            "configure_moe_param_groups has_moe_layers is_moe_param is_moe_param_group "
            "split_params_grads_into_shared_and_expert_params "
            "split_params_into_different_moe_groups_for_optimizer split_params_into_shared_and_expert_params"
        ),
    },
    "nebula": {},
    "nebula.config": {},
    "ops.adam.zenflow_cpu_adam": {},
    "ops.adam.zenflow_torch_adam": {},
    "ops.deepspeed4science": {},
    "ops.fp_quantizer": {},
    "ops.lion.cpu_lion": {"deepspeed.ops.lion.fused_lion": "DeepSpeedCPULion"},
    "ops.sparse_attention.bert_sparse_self_attention": {
        "deepspeed.ops.sparse_attention.sparse_self_attention": "BertSparseSelfAttention",
    },
    "ops.transformer": {},
    "pipe": {
        "deepspeed.parallel.pipe.stage_layers": "add_loss",
        "deepspeed.parallel.pipe.module": "DualPipeVModule PipelineModule",
        "deepspeed.parallel.pipe.spec": "LayerSpec TiedLayerSpec",
        "deepspeed.parallel.pipe.transformers_models": "transformers_state_dict",
    },
    "runtime": {"deepspeed.zero.update.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.config": {
        "deepspeed.config.sections.root": "DeepSpeedActivationCheckpointingConfig=ActivationCheckpointing",
    },
    "runtime.base_optimizer": {"deepspeed.zero.update.base_optimizer": "DeepSpeedOptimizer ZeROOptimizer"},
    "runtime.bf16_optimizer": {"deepspeed.zero.update.optimizer": "BF16_Optimizer"},
    "runtime.checkpoint_engine": {
        "deepspeed.checkpoint.checkpoint_engine": "CheckpointCommitInfo CheckpointEngine TorchCheckpointEngine",
    },
    "runtime.checkpoint_engine.checkpoint_engine": {
        "deepspeed.checkpoint.checkpoint_engine": "CheckpointCommitInfo CheckpointEngine",
    },
    "runtime.checkpoint_engine.datastates_checkpoint_engine": {},
    "runtime.checkpoint_engine.nebula_checkpoint_engine": {},
    "runtime.checkpoint_engine.torch_checkpoint_engine": {
        "deepspeed.checkpoint.checkpoint_engine": "TorchCheckpointEngine",
    },
    "runtime.config": {
        "deepspeed.config": "DeepSpeedConfig load_ds_config",
        "deepspeed.errors": "DeepSpeedConfigError",
        "deepspeed.ops.build": (
            "ADAGRAD_OPTIMIZER ADAMW_OPTIMIZER ADAM_OPTIMIZER ADAM_W_MODE DEEPSPEED_OPTIMIZERS LAMB_OPTIMIZER "
            "LION_OPTIMIZER MUADAMW_OPTIMIZER MUADAM_OPTIMIZER MUON_OPTIMIZER MUSGD_OPTIMIZER ONEBIT_ADAM_OPTIMIZER "
            "ONEBIT_LAMB_OPTIMIZER TORCH_ADAM_PARAM ZERO_ONE_ADAM_OPTIMIZER"
        ),
    },
    "runtime.config_utils": {"deepspeed.config.enums": "DeepSpeedConfigModel get_scalar_param"},
    "runtime.constants": {"deepspeed.constants": "ROUTE_EVAL ROUTE_PREDICT ROUTE_TRAIN"},
    "runtime.data_pipeline": {},
    "runtime.data_pipeline.curriculum_scheduler": {"deepspeed.data.curriculum.scheduler": "CurriculumScheduler"},
    "runtime.data_pipeline.data_routing": {},
    "runtime.data_pipeline.data_routing.basic_layer": {"deepspeed.dropping.tokens": "RandomLayerTokenDrop"},
    "runtime.data_pipeline.data_routing.helper": {
        "deepspeed.dropping.tokens": "convert_to_random_ltd remove_random_ltd_state_dict save_without_random_ltd",
    },
    "runtime.data_pipeline.data_routing.scheduler": {"deepspeed.dropping.tokens": "RandomLTDScheduler"},
    "runtime.data_pipeline.data_sampling": {},
    "runtime.data_pipeline.data_sampling.data_analyzer": {
        "deepspeed.data.analysis.analyzer": "DataAnalyzer DistributedDataAnalyzer",
    },
    "runtime.data_pipeline.data_sampling.data_sampler": {"deepspeed.data.curriculum.sampler": "DeepSpeedDataSampler"},
    "runtime.data_pipeline.data_sampling.indexed_dataset": {
        "deepspeed.data.indexed.dataset": "MMapIndexedDataset MMapIndexedDatasetBuilder",
        "deepspeed.data.indexed.format": "data_file_path index_file_path",
    },
    "runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "deepspeed.data.batching.loading": (
            "VariableBatchSizeLR get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed"
        ),
        "deepspeed.data.batching.packing": "batch_by_seqlens scale_lr",
    },
    "runtime.dataloader": {"deepspeed.data": "DeepSpeedDataLoader RepeatingLoader"},
    "runtime.domino": {},
    "runtime.domino.transformer": {},
    "runtime.eigenvalue": {"deepspeed.compression.eigenvalue": "Eigenvalue"},
    "runtime.engine": {
        "deepspeed.engine": "DeepSpeedEngine",
        "deepspeed.engine.engine": "MEMORY_OPT_ALLREDUCE_SIZE autocast_if_enabled",
        "deepspeed.engine.parts": "DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable",
    },
    "runtime.fp16": {},
    "runtime.fp16.fused_optimizer": {"deepspeed.zero.update.optimizer": "FP16_Optimizer"},
    "runtime.fp16.loss_scaler": {
        "deepspeed.precision.loss_scaler": (
            "CONSECUTIVE_HYSTERESIS CreateLossScaler DELAYED_SHIFT DynamicLossScaler INITIAL_LOSS_SCALE "
            "LossScaler LossScalerBase MIN_LOSS_SCALE SCALE_WINDOW"
        ),
    },
    "runtime.fp16.onebit": {"deepspeed.ops.onebit": "OnebitAdam=OneBitAdam OnebitLamb=OneBitLamb ZeroOneAdam"},
    "runtime.fp16.onebit.adam": {"deepspeed.ops.onebit.adam": "OnebitAdam=OneBitAdam"},
    "runtime.fp16.onebit.lamb": {"deepspeed.ops.onebit.lamb": "OnebitLamb=OneBitLamb"},
    "runtime.fp16.onebit.zoadam": {"deepspeed.ops.onebit.zero_one": "ZeroOneAdam"},
    "runtime.fp16.unfused_optimizer": {"deepspeed.zero.update.optimizer": "FP16_UnfusedOptimizer"},
    "runtime.hybrid_engine": {"deepspeed.engine.hybrid": "DeepSpeedHybridEngine"},
    "runtime.lr_schedules": {
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
    "runtime.pipe": {
        "deepspeed.parallel.pipe.topology": "ProcessTopology",
        "deepspeed.pipe": "LayerSpec PipelineModule TiedLayerSpec",
    },
    "runtime.pipe.engine": {
        "deepspeed.engine.engine": "DeepSpeedEngine",
        "deepspeed.engine.pipeline": "DualPipeVEngine PipelineEngine",
    },
    "runtime.pipe.module": {
        "deepspeed.errors": "PipelineError",
        "deepspeed.pipe": "DualPipeVModule LayerSpec PipelineModule TiedLayerSpec",
    },
    "runtime.pipe.schedule": {
        "deepspeed.parallel.pipe.schedule.lists": (
            "BackwardPass BufferOpInstruction ForwardPass LoadMicroBatch OptimizerStep PipeInstruction PipeSchedule "
            "RecvActivation RecvGrad ReduceGrads ReduceTiedGrads SendActivation SendGrad"
        ),
        "deepspeed.parallel.pipe.schedule.published": "DataParallelSchedule InferenceSchedule TrainSchedule",
    },
    "runtime.pipe.topology": {
        "deepspeed.parallel.pipe.topology": (
            "PipeDataParallelTopology PipeModelDataParallelTopology PipelineParallelGrid ProcessTopology"
        ),
    },
    "runtime.progressive_layer_drop": {"deepspeed.dropping.layers": "ProgressiveLayerDrop"},
    "runtime.rollout": {"deepspeed.engine.hybrid": "HybridEngineRollout RolloutBatch RolloutRequest SamplingConfig"},
    "runtime.sequence_parallel": {},
    "runtime.sequence_parallel.ulysses_sp": {
        "deepspeed.parallel.sequence.batches": "UlyssesSPDataLoaderAdapter",
        "deepspeed.parallel.sequence.tiled": (
            "SequenceTiledCompute TiledFusedLogitsLoss TiledMLP sequence_tiled_compute"
        ),
        "deepspeed.parallel.sequence.ulysses": "UlyssesSPAttentionHF",
    },
    "runtime.tensor_parallel": {
        "deepspeed.config.sections.tensor_parallel": "TPConfig=TpGroup TPTrainingConfig=TensorParallel",
    },
    "runtime.utils": {
        "deepspeed.data": "move_to_device set_random_seed",
        "deepspeed.git_version_info": "required_torch_version",
        "deepspeed.parallel.partition": "partition_balanced partition_uniform prefix_sum_inc",
        "deepspeed.parallel.partitioned_tensor": "PartitionedTensor all_gather_dp_groups is_model_parallel_parameter",
        "deepspeed.precision.clipping": "clip_grad_norm_ get_global_norm",
        "deepspeed.profiling.timer": "see_memory_usage",
    },
    "runtime.zenflow": {},
    "runtime.zenflow.zenflow_config": {},
    "runtime.zenflow.zenflow_stage_1_and_2": {},
    "runtime.zero": {
        "deepspeed.zero": (
            "GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType register_external_parameter "
            "unwrap_model_for_generation"
        ),
        "deepspeed.zero.access.parameter_offload": "DeepSpeedZeRoOffload",
        "deepspeed.zero.tiled_linear": "TiledLinear TiledLinearReturnBias",
    },
    "runtime.zero.config": {
        "deepspeed.config.enums": "OffloadDeviceEnum ZeroStageEnum",
        "deepspeed.config.sections.offload": _OFFLOAD_SECTIONS,
        "deepspeed.config.sections.zero": "DeepSpeedZeroConfig=ZeroOptimization",
    },
    "runtime.zero.offload_config": {
        "deepspeed.config.enums": "OffloadDeviceEnum OffloadStateTypeEnum",
        "deepspeed.config.sections.offload": _OFFLOAD_SECTIONS,
    },
    "runtime.zero.parameter_offload": {"deepspeed.zero.access.parameter_offload": "DeepSpeedZeRoOffload"},
    "runtime.zero.partition_parameters": {
        "deepspeed.accelerator": "get_accelerator",
        "deepspeed.zero": (
            "DeepSpeedTensorOverride GatheredParameters Init MiCS_Init ZeroParamStatus ZeroParamType "
            "register_external_parameter unregister_external_parameter"
        ),
        "deepspeed.zero.construction.init": "_orig_torch_arange zero_wrapper_for_fp_tensor_constructor",
        "deepspeed.zero.address": "is_zero_param",
    },
    "runtime.zero.stage3": {
        "deepspeed.plan.memory_estimates": (
            "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_cold "
            "estimate_zero3_model_states_mem_needs_all_live"
        ),
        "deepspeed.zero.access.stage3_optimizer": "DeepSpeedZeroOptimizer_Stage3",
    },
    "runtime.zero.stage_1_and_2": {
        "deepspeed.plan.memory_estimates": (
            "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_cold "
            "estimate_zero2_model_states_mem_needs_all_live"
        ),
        "deepspeed.zero.update.optimizer": "DeepSpeedZeroOptimizer",
    },
    "runtime.zero.tiling": {"deepspeed.zero.tiled_linear": "TiledLinear TiledLinearReturnBias"},
    "runtime.zero.utils": {"deepspeed.zero.address": "is_zero_param"},
    "sequence": {
        "deepspeed.parallel.sequence.chunked": "chunked_attention",
        "deepspeed.parallel.sequence.exchange": "exchange",
        "deepspeed.parallel.sequence.loss": "mean_loss sum_over_ranks",
        "deepspeed.parallel.sequence.ring": "ring_attention",
        "deepspeed.parallel.sequence.vocabulary": "chunked_cross_entropy",
    },
    "sequence.cross_entropy": {
        "deepspeed.parallel.sequence.vocabulary": "chunked_cross_entropy vocab_sequence_parallel_cross_entropy",
    },
    "sequence.fpdt_layer": {
        "deepspeed.parallel.sequence.fpdt": "FPDT_Attention FPDT_FFN FPDT_InputConstruct FPDT_LogitsLoss",
    },
    "sequence.layer": {"deepspeed.parallel.sequence.attention": "DistributedAttention _SeqAllToAll"},
    "utils": {
        "deepspeed.data": "RepeatingLoader",
        "deepspeed.logging": "log_dist log_dist_once logger set_log_level_from_string",
        "deepspeed.precision.on_device": "OnDevice",
        "deepspeed.profiling.ranges": "instrument_w_nvtx",
        "deepspeed.utils.z3_leaf_module": _LEAF_MODULES,
        "deepspeed.zero.access.states": _SAFE_ACCESS,
    },
    "utils.comms_logging": {"deepspeed.comm.base.recorder": "CommsLogger=CommsLog"},
    "utils.exceptions": {
        "deepspeed.errors": (
            "CallOrderError CheckpointError CommunicationError DeepSpeedConfigError DeepSpeedError "
            "DeprecatedException DivergenceError NonFiniteError NotYetSupportedError ShardedAccessError"
        ),
    },
    "utils.init_on_device": {"deepspeed.precision.on_device": "OnDevice"},
    "utils.logging": {
        "deepspeed.logging": "log_dist log_dist_once logger print_dist set_log_level_from_string should_log_le",
    },
    "utils.numa": {},
    "utils.nvtx": {"deepspeed.profiling.ranges": "instrument_w_nvtx"},
    "utils.tensor_fragment": {
        "deepspeed.checkpoint.upstream.files": "fragment_address=FragmentAddress",
        "deepspeed.zero.access.states": _SAFE_ACCESS,
    },
    "utils.timer": {
        "deepspeed.profiling.timer": (
            "BACKWARD_GLOBAL_TIMER BACKWARD_INNER_GLOBAL_TIMER BACKWARD_INNER_MICRO_TIMER BACKWARD_MICRO_TIMER "
            "BACKWARD_REDUCE_GLOBAL_TIMER BACKWARD_REDUCE_MICRO_TIMER FORWARD_GLOBAL_TIMER FORWARD_MICRO_TIMER "
            "NoopTimer STEP_GLOBAL_TIMER STEP_MICRO_TIMER SynchronizedWallClockTimer ThroughputTimer"
        ),
    },
    "utils.torch": {"deepspeed.git_version_info": "required_torch_version"},
    "utils.z3_leaf_module": {
        "deepspeed.zero.gather.leaf_modules": _LEAF_MODULES,
    },
    "utils.zero_to_fp32": {
        "deepspeed.checkpoint.upstream.files": "parse_optim_states",
        "deepspeed.checkpoint.consolidate": (
            "convert_zero_checkpoint_to_fp32_state_dict convert_zero_checkpoint_to_state_dict "
            "get_fp32_state_dict_from_zero_checkpoint load_state_dict_from_zero_checkpoint main to_torch_tensor"
        ),
        "deepspeed.checkpoint.names": (
            "get_checkpoint_files get_model_state_file get_model_state_files get_optim_files"
        ),
    },
    "utils.zero_to_torch": {
        "deepspeed.checkpoint.consolidate": (
            "convert_zero_checkpoint_to_state_dict get_fp32_state_dict_from_zero_checkpoint "
            "load_state_dict_from_zero_checkpoint main to_torch_tensor"
        ),
        "deepspeed.checkpoint.names": "get_model_state_file get_optim_files",
    },
}

# Paths that are aliases of a whole module.
MODULES: dict[str, str] = {
    "comm.comm": "deepspeed.comm",
    "runtime.activation_checkpointing.checkpointing": "deepspeed.activation_checkpointing.checkpointing",
    "runtime.sequence_parallel.parallel_state_sp": "deepspeed.parallel.sequence.state",
    "utils.groups": "deepspeed.comm.job.groups",
}


def children_of(path: str) -> list[str]:
    """Returns the names of the direct submodules of a path in the table; ``""`` is ``deepspeed`` itself."""
    prefix = f"{path}." if path else ""
    below = [name.removeprefix(prefix) for name in (*PATHS, *MODULES) if name.startswith(prefix)]
    return sorted(name for name in below if "." not in name)


def install() -> None:
    """Adds the finder to ``sys.meta_path``, once.

    It precedes the finder of files, which would find a folder with only bytecode, left by an earlier version, as a
    namespace package.
    """
    if not any(isinstance(finder, KnownPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, KnownPathFinder())


class KnownPathFinder(MetaPathFinder, Loader):
    """Finds and loads the modules of the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the spec of a module of the table; None for any other."""
        inner = _path_of(fullname)
        if inner not in PATHS and inner not in MODULES:
            return None
        return ModuleSpec(fullname, self, origin=f"the table of {__name__}", is_package=bool(children_of(inner)))

    def get_code(self, fullname: str) -> CodeType:
        """Returns the code that ``python -m`` runs for a path in the table: it calls the ``main`` listed there.

        Raises:
            ImportError: The table lists no ``main`` for the path.
        """
        for home, names in PATHS.get(_path_of(fullname), {}).items():
            if "main" in names.split():
                lines = [
                    "import sys",
                    f"from {home} import main",
                    f"sys.argv[0] = 'python -m {fullname}'",  # shown in the usage
                    "sys.exit(main())",
                ]
                return compile("\n".join(lines), f"<{fullname}>", "exec")
        raise ImportError(
            f"python -m {fullname}: expected a module with a main(), found none; import its names instead"
        )

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Returns None, so that Python creates an ordinary module."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Sets the names of the module, or replaces it if the path is an alias of a whole module."""
        inner = _path_of(module.__name__)
        if inner in MODULES:
            sys.modules[module.__name__] = importlib.import_module(MODULES[inner])
            return
        listed = ", ".join(f":mod:`{source}`" for source in PATHS[inner]) or "the modules below"
        module.__doc__ = f"Re-exports from {listed}; made from the table of :mod:`{__name__}`."
        children, own = children_of(inner), homes_of(PATHS[inner])
        below = " ".join(name for name in children if name not in own)
        find, listing, names = lazy_names(module.__name__, PATHS[inner], submodules=below)
        module.__dict__.update(__getattr__=find, __dir__=listing, __all__=names)
        for both in own.keys() & set(children):
            # A name and a submodule share this attribute: the import sets it once; afterwards the name is used.
            importlib.import_module(f"{module.__name__}.{both}")
            delattr(module, both)


def _path_of(fullname: str) -> str:
    return fullname.removeprefix(f"{ROOT}.") if fullname.startswith(f"{ROOT}.") else ""
