"""Public names exist at the paths from which other libraries import them."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

# What accelerate, transformers, Lightning, peft and trl write, and what scripts import. "a.b:c" is `from a.b import c`.
IMPORTED = """
deepspeed:DeepSpeedEngine,initialize,init_distributed,add_config_arguments,init_inference,tp_model_init,OnDevice
deepspeed:get_accelerator,logger,log_dist,zero,checkpointing,comm,ops,pipe,moe,utils,runtime,accelerator,checkpoint
deepspeed:load_ds_config,set_optimizer_flags,replace_transformer_layer,set_autotp_mode,default_inference_config
deepspeed:DeepSpeedHybridEngine,PipelineEngine,DualPipeVEngine,DualPipeVModule,PipelineModule,InferenceEngine
deepspeed:DeepSpeedInferenceConfig,DeepSpeedConfig,DeepSpeedConfigError,DeepSpeedOptimizer,DeepSpeedDataLoader
deepspeed:DeepSpeedTransformerLayer,DeepSpeedTransformerConfig,DeepSpeedOptimizerCallable,DeepSpeedSchedulerCallable
deepspeed:monitor,profiling,inference,linear,compile,autotuning,constants,git_version_info,model_implementations
deepspeed:datastates,io,module_inject
deepspeed.constants:TORCH_DISTRIBUTED_DEFAULT_PORT,default_pg_timeout
deepspeed.git_version_info:version,git_hash,git_branch
deepspeed.io:FastFileWriter
deepspeed.monitor.config:get_monitor_config,DeepSpeedMonitorConfig
deepspeed:HAS_TRITON,TORCH_DISTRIBUTED_DEFAULT_PORT,MUON_OPTIMIZER,version,__version__,__version_major__,__git_hash__
deepspeed.accelerator:get_accelerator
deepspeed.checkpoint:DeepSpeedCheckpoint
deepspeed.checkpoint.utils:clone_tensors_for_torch_save
deepspeed.comm:get_rank,init_distributed,is_initialized
deepspeed.compression.helper:convert_conv1d_to_linear,recursive_getattr,recursive_setattr
deepspeed.inference.config:DeepSpeedInferenceConfig,DeepSpeedTPConfig
deepspeed.inference:DeepSpeedTPConfig
deepspeed.linear:OptimizedLinear,LoRAConfig,QuantizationConfig
deepspeed.module_inject:LinearAllreduce,LinearLayer,HFBertLayerPolicy,replace_transformer_layer,set_autotp_mode
deepspeed.moe.layer:MoE
deepspeed.moe.utils:has_moe_layers,is_moe_param,split_params_into_different_moe_groups_for_optimizer
deepspeed.monitor.monitor:MonitorMaster,TensorBoardMonitor,WandbMonitor,CometMonitor,csvMonitor
deepspeed.pipe:PipelineModule,LayerSpec,TiedLayerSpec
deepspeed.profiling.flops_profiler:FlopsProfiler,get_model_profile
deepspeed.profiling.flops_profiler.profiler:FlopsProfiler,get_model_profile
deepspeed.runtime.activation_checkpointing:checkpointing
deepspeed.runtime.activation_checkpointing.checkpointing:checkpoint,configure
deepspeed.runtime.base_optimizer:DeepSpeedOptimizer,ZeROOptimizer
deepspeed.runtime.bf16_optimizer:BF16_Optimizer
deepspeed.runtime.checkpoint_engine.checkpoint_engine:CheckpointEngine
deepspeed.runtime.config:DeepSpeedConfig,DeepSpeedConfigError,DEEPSPEED_OPTIMIZERS
deepspeed.runtime.dataloader:RepeatingLoader,DeepSpeedDataLoader
deepspeed.runtime.engine:DeepSpeedEngine
deepspeed.runtime.fp16.fused_optimizer:FP16_Optimizer
deepspeed.runtime.fp16.loss_scaler:LossScaler,DynamicLossScaler,CreateLossScaler
deepspeed.runtime.fp16.unfused_optimizer:FP16_UnfusedOptimizer
deepspeed.runtime.hybrid_engine:DeepSpeedHybridEngine
deepspeed.runtime.lr_schedules:VALID_LR_SCHEDULES,WarmupLR,WarmupDecayLR,WarmupCosineLR,OneCycle,LRRangeTest
deepspeed.runtime.pipe.engine:PipelineEngine,DeepSpeedEngine
deepspeed.runtime.pipe.module:PipelineModule
deepspeed.runtime.pipe.schedule:TrainSchedule
deepspeed.runtime.pipe.topology:ProcessTopology,PipeModelDataParallelTopology
deepspeed.runtime.sequence_parallel.parallel_state_sp:initialize_sequence_parallel
deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF,UlyssesSPDataLoaderAdapter
deepspeed.runtime.utils:see_memory_usage,clip_grad_norm_,move_to_device,set_random_seed,get_global_norm
deepspeed.runtime.zero:Init,GatheredParameters,TiledLinear
deepspeed.runtime.zero.config:ZeroStageEnum,DeepSpeedZeroConfig
deepspeed.runtime.zero.offload_config:OffloadDeviceEnum,OffloadStateTypeEnum
deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload
deepspeed.runtime.zero.partition_parameters:Init,GatheredParameters,ZeroParamStatus,get_accelerator
deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3,estimate_zero3_model_states_mem_needs_all_live
deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer,estimate_zero2_model_states_mem_needs_all_live
deepspeed.sequence.cross_entropy:vocab_sequence_parallel_cross_entropy
deepspeed.sequence.fpdt_layer:FPDT_Attention,FPDT_FFN,FPDT_InputConstruct,FPDT_LogitsLoss
deepspeed.sequence.layer:DistributedAttention
deepspeed.utils:logger,log_dist,log_dist_once,set_log_level_from_string,OnDevice,RepeatingLoader,groups
deepspeed.utils:instrument_w_nvtx,safe_get_full_grad,safe_get_full_fp32_param,set_z3_leaf_modules,z3_leaf_module
deepspeed.utils.groups:_get_data_parallel_group,_get_sequence_parallel_group
deepspeed.utils.init_on_device:OnDevice
deepspeed.utils.logging:logger,log_dist
deepspeed.utils.nvtx:instrument_w_nvtx
deepspeed.utils.tensor_fragment:fragment_address,safe_get_full_grad
deepspeed.utils.timer:SynchronizedWallClockTimer,ThroughputTimer,NoopTimer
deepspeed.utils.zero_to_fp32:get_fp32_state_dict_from_zero_checkpoint,get_model_state_file,get_optim_files
deepspeed.utils.zero_to_torch:convert_zero_checkpoint_to_state_dict,to_torch_tensor
deepspeed.zero:Init,GatheredParameters,register_external_parameter
"""
PAIRS = [
    (line.split(":")[0], name) for line in IMPORTED.split() for name in line.split(":")[1].split(",")
]  # fmt: skip


def _names_of_programs() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("names_of_programs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[module] += line.split()  # noqa: F821  # a module's names go on
        elif not line.startswith("#"):
            module, _, names = line.partition(":")
            found[module] = names.split()
    return found


def test_names_that_public_programs_import():
    lacking = []
    for module, names in _names_of_programs().items():
        for name in names or [""]:
            statement = f"from {module} import {name}" if name else f"import {module}"
            try:
                exec(statement, {})
            except ImportError as error:
                lacking.append(f"{statement}: {error}")
    assert not lacking, "\n".join(lacking)


@pytest.mark.parametrize(("module", "name"), PAIRS)
def test_name_can_be_imported(module, name):
    namespace: dict[str, object] = {}
    exec(f"from {module} import {name}", namespace)
    assert namespace[name] is not None


# Attribute walks from a bare `import deepspeed`, each in the same fresh process but before anything imported its parts.
WALKS = """
deepspeed.runtime.lr_schedules.VALID_LR_SCHEDULES
deepspeed.utils.logging.logger
deepspeed.zero
deepspeed.checkpointing.configure
deepspeed.comm.get_rank
deepspeed.utils.groups._get_data_parallel_group
deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
deepspeed.runtime.zero.partition_parameters.ZeroParamStatus
deepspeed.runtime.base_optimizer.DeepSpeedOptimizer
deepspeed.ops.adam.DeepSpeedCPUAdam
deepspeed.accelerator.get_accelerator
deepspeed.runtime.activation_checkpointing.checkpointing.checkpoint
deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler
deepspeed.moe.layer.MoE
deepspeed.pipe.PipelineModule
deepspeed.profiling.flops_profiler.get_model_profile
deepspeed.DeepSpeedEngine
deepspeed.checkpoint.utils.clone_tensors_for_torch_save
""".split()


def test_attribute_walks_after_a_bare_import():
    code = "import deepspeed\n" + "\n".join(WALKS)
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_same_objects_at_both_paths():
    import deepspeed
    from deepspeed import comm, engine, schedulers
    from deepspeed.runtime import base_optimizer, lr_schedules
    from deepspeed.runtime.activation_checkpointing import checkpointing
    from deepspeed.runtime.engine import DeepSpeedEngine

    assert deepspeed.DeepSpeedEngine is DeepSpeedEngine is engine.DeepSpeedEngine
    assert deepspeed.DeepSpeedOptimizer is base_optimizer.DeepSpeedOptimizer
    assert deepspeed.init_distributed is comm.init_distributed
    assert deepspeed.checkpointing is checkpointing
    assert lr_schedules.WarmupLR is schedulers.WarmupLR
    assert issubclass(base_optimizer.ZeROOptimizer, base_optimizer.DeepSpeedOptimizer)


def test_modules_that_are_commands():
    def run(path):
        command = [sys.executable, "-m", path, "--help"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    done = run("deepspeed.utils.zero_to_fp32")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m deepspeed.utils.zero_to_fp32")
    done = run("deepspeed.utils.zero_to_torch")
    assert done.returncode == 0 and done.stdout.startswith("usage: python -m deepspeed.utils.zero_to_torch")


def test_groups_is_one_module_with_one_mpu():
    import deepspeed.utils.groups as by_import
    from deepspeed.comm.job import groups
    from deepspeed.utils import groups as by_attribute

    assert by_import is by_attribute is groups


def test_z3_leaf_module_is_function_and_submodule():
    code = "from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules\nimport deepspeed.utils.z3_leaf_module\n"
    code += "import deepspeed; assert callable(deepspeed.utils.z3_leaf_module), deepspeed.utils.z3_leaf_module"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_dist_is_there_once_there_is_a_group():
    import torch.distributed as torch_dist

    import deepspeed

    assert deepspeed.dist is None
    torch_dist.init_process_group("gloo", store=torch_dist.HashStore(), rank=0, world_size=1)
    try:
        assert deepspeed.dist is deepspeed.comm
    finally:
        torch_dist.destroy_process_group()
    assert deepspeed.dist is None


def test_unknown_names_are_attribute_errors():
    import deepspeed

    with pytest.raises(AttributeError, match="module 'deepspeed' has no attribute 'initialise'"):
        _ = deepspeed.initialise
    with pytest.raises(ImportError, match="no_such_thing"):
        exec("from deepspeed.runtime.zero import no_such_thing")
    assert "initialize" in dir(deepspeed) and "PipelineModule" in dir(deepspeed.pipe)


def test_version_parts():
    import deepspeed

    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, parts)) == deepspeed.__version__.partition("+")[0]
    assert deepspeed.__version__ == deepspeed.version


@pytest.mark.parametrize("module", ["deepspeed", "deepspeed.utils", "deepspeed.runtime", "deepspeed.runtime.zero"])
def test_everything_announced_is_there(module):
    loaded = importlib.import_module(module)
    missing = [name for name in loaded.__all__ if not hasattr(loaded, name)]
    assert not missing
