"""Lists the missing features, each with its public names and its configuration keys.

Whoever implements a feature deletes its row here, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Key:
    """A configuration key that would switch a missing feature on. A file may have it switched off."""

    name: str  # the key, with dots
    # returns whether a value switches the feature on; not called if the section is absent
    switched_on: Callable[[Any], bool]
    off: str  # how to switch it off, for messages

    @property
    def path(self) -> tuple[str, ...]:
        """The key as a path."""
        return tuple(self.name.split("."))


def switch(name: str) -> Key:
    """Returns the row of a key that is true or false."""
    off = "set it to false or leave the section out" if name.endswith(".enabled") else "set it to false"
    return Key(name, lambda value: value is True, off)


def section(name: str) -> Key:
    """Returns the row of a section whose presence switches a feature on."""
    return Key(name, lambda value: value is not None, "leave the section out")


@dataclass(frozen=True)
class Feature:
    """A missing feature."""

    title: str  # what is missing, as the subject of a sentence
    instead: str  # one sentence that says what to use instead
    names: dict[str, str] = field(default_factory=dict)  # its public names, by module
    keys: tuple[Key, ...] = ()  # the configuration keys that would switch it on
    modules: str = ""  # which of the names are modules of upstream, with their paths

    @property
    def heading(self) -> str:
        """The title with a capital."""
        return self.title[0].upper() + self.title[1:]

    def full_names(self) -> list[str]:
        """Returns every name with its module, in the order of the table."""
        return [f"{module}.{name}" for module, names in self.names.items() for name in names.split()]

    def sentence(self, name: str) -> str:
        """Returns the message of the error that using ``name`` raises."""
        return f"{name}: {self.title} is not supported yet. {self.instead}"

    def refusal(self, key: Key, found: str) -> str:
        """Returns the message for a configuration with ``key`` switched on.

        Args:
            key: One of :attr:`keys`.
            found: Its value as text; empty: the value is not shown.
        """
        value = f" ({found})" if found else ""
        return f"{self.heading}{value} does not exist here yet; {key.off}. {self.instead}"


FEATURES: tuple[Feature, ...] = (
    Feature(
        "the exchange of tokens by DeepEP (package deep_ep)",
        "Tokens are sent by the backend's own all-to-all, once to each rank; to install deep_ep changes nothing yet.",
        keys=(Key("expert_parallel.comm_backend", lambda value: value == "deepep", 'set it to "comm"'),),
    ),
    Feature(
        "fused layers in the place of a model's own",
        "deepspeed.init_inference keeps the model's own modules, whose attention torch fuses.",
        {
            "deepspeed.module_inject": (
                "replace_transformer_layer HFBertLayerPolicy HFGPT2LayerPolicy HFGPTJLayerPolicy HFGPTNEOLayerPolicy "
                "HFOPTLayerPolicy BLOOMLayerPolicy GPTNEOXLayerPolicy MegatronLayerPolicy UNetPolicy VAEPolicy "
                "generic_policies revert_transformer_layer"
            ),
            "deepspeed.module_inject.replace_module": "replace_transformer_layer revert_transformer_layer",
            "deepspeed.module_inject.replace_policy": "HFBertLayerPolicy replace_policies",
            "deepspeed.model_implementations": "DeepSpeedTransformerInference",
            "deepspeed.ops.transformer.inference": "DeepSpeedTransformerInference DeepSpeedInferenceConfig",
            "deepspeed.ops.transformer.inference.config": "DeepSpeedInferenceConfig",
            "deepspeed.ops.transformer.inference.diffusers_attention": "DeepSpeedDiffusersAttention",
            "deepspeed.ops.transformer.inference.diffusers_transformer_block": "DeepSpeedDiffusersTransformerBlock",
        },
    ),
    Feature(
        "the parts of upstream's own cut of a model over tensor-parallel ranks",
        "Use tensor_parallel.autotp_size, deepspeed.tp_model_init or deepspeed.init_inference, which cut models by "
        "rules of their own.",
        {
            "deepspeed.module_inject": "ReplaceWithTensorSlicing",
            "deepspeed.module_inject.auto_tp": "AutoTP Loading ReplaceWithTensorSlicing",
            "deepspeed.module_inject.tp_shard": (
                "get_num_attention_heads get_num_kv_heads get_shard_size get_shard_size_list set_n_embd "
                "set_num_attention_heads set_num_kv_heads set_tp_grain_size"
            ),
            "deepspeed.module_inject.layers": "LmHeadLinearAllreduce TensorParallel_Layer",
        },
    ),
    Feature(
        "the parts of upstream's own checkpoint files",
        "Use engine.load_checkpoint, which loads upstream's folders at any number of ranks, and "
        "deepspeed.utils.zero_to_fp32.",
        {
            "deepspeed.checkpoint": (
                "ZeROCheckpoint enable_universal_checkpoint get_model_3d_descriptor merge_state model_3d_desc "
                "reshape_meg_2d_parallel"
            ),
            "deepspeed.checkpoint.reshape_3d_utils": "get_model_3d_descriptor model_3d_desc",
            "deepspeed.checkpoint.reshape_meg_2d": "meg_2d_parallel_map reshape_meg_2d_parallel",
            "deepspeed.checkpoint.reshape_utils": "get_files get_files_with_prefix merge_state partition_data",
            "deepspeed.checkpoint.universal_checkpoint": (
                "enable_universal_checkpoint load_hp_checkpoint_state load_hp_checkpoint_state_from_checkpoint_dir"
            ),
            "deepspeed.checkpoint.zero_checkpoint": "ZeROCheckpoint",
            "deepspeed.runtime.state_dict_factory": "MegatronSDLoader SDLoaderBase SDLoaderFactory",
            "deepspeed.runtime.weight_quantizer": "WeightQuantization",
            "deepspeed.utils.zero_to_fp32": "parse_model_states zero_model_state",
        },
    ),
    Feature(
        "the inside of upstream's engine",
        "Use the engine's methods: engine.was_step_applied(), engine.get_global_grad_norm(), engine.no_sync(); "
        "offload_* and sparse_gradients in the configuration.",
        {
            "deepspeed.runtime.comm.coalesced_collectives": (
                "all_to_all_loco_quant_reduce all_to_all_quant_reduce reduce_scatter_coalesced"
            ),
            "deepspeed.runtime.engine": "EngineTimers SparseTensor",
            "deepspeed.runtime.pipe.p2p": "can_send_recv init_process_groups recv recv_obj send send_obj wait",
            "deepspeed.runtime.sparse_tensor": "SparseTensor",
            "deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper": "PartitionedOptimizerSwapper",
            "deepspeed.runtime.swap_tensor.partitioned_param_swapper": "AsyncPartitionedParameterSwapper",
            "deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper": "PipelinedOptimizerSwapper",
            "deepspeed.runtime.utils": (
                "CheckOverflow DummyOptim get_grad_norm get_weight_norm has_inf_or_nan "
                "mask_nan_or_inf_with_val_inplace memory_status"
            ),
            "deepspeed.utils.bwc": (
                "bwc_pipeline_parallel_group bwc_pipeline_parallel_world_size bwc_tensor_model_parallel_group "
                "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size"
            ),
            "deepspeed.utils.tensor_fragment": "get_full_hp_grads get_full_hp_param tensor_fragment",
        },
    ),
    Feature(
        "the fused transformer layer",
        "Use torch.nn.TransformerEncoderLayer, whose attention torch fuses.",
        {
            "deepspeed": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
            "deepspeed.ops.transformer": "DeepSpeedTransformerLayer DeepSpeedTransformerConfig",
        },
    ),
    Feature(
        "a file writer of its own for checkpoints",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {"deepspeed.io": "FastFileWriter FastFileWriterConfig MockFileWriter PyFileWriter"},
    ),
    Feature(
        "the DataStates checkpoint engine",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {
            "deepspeed.datastates.config": "DeepSpeedDataStatesConfig",
            "deepspeed.runtime.checkpoint_engine.datastates_checkpoint_engine": "DataStatesCheckpointEngine",
        },
        (section("datastates_ckpt"),),
    ),
    Feature(
        "the Nebula checkpoint engine",
        "Use engine.save_checkpoint, which writes in the background with checkpoint.async_save.",
        {
            "deepspeed.nebula.config": "DeepSpeedNebulaConfig",
            "deepspeed.runtime.checkpoint_engine.nebula_checkpoint_engine": "NebulaCheckpointEngine",
        },
        (switch("nebula.enabled"),),
    ),
    Feature(
        "the building of a mixture-of-experts operator",
        "Nothing is compiled here: deepspeed.moe works as it is.",
        {"deepspeed.ops.op_builder": "MoEBuilder"},
    ),
    Feature(
        "the fused attention of Evoformer",
        "Use torch.nn.functional.scaled_dot_product_attention with the sum of the biases as attn_mask.",
        {"deepspeed.ops.deepspeed4science": "DS4Sci_EvoformerAttention"},
    ),
    Feature(
        "Domino",
        "Use tensor_parallel.autotp_size, which sums the gradient of an input while that of the weight is computed.",
        {"deepspeed.runtime.domino.transformer": "DominoTransformer DominoTransformerLayer DominoUtil"},
    ),
    Feature(
        "the quantizer of floats",
        "Use deepspeed.linear, which has weights of few bits, or torchao for fp8.",
        {"deepspeed.ops.fp_quantizer": "FP_Quantize Quantizer"},
    ),
    Feature(
        "the second inference engine",
        "Use vLLM or SGLang to serve a model, and engine.export_weights() to hand it over; deepspeed.init_inference "
        "generates without them.",
        {
            "deepspeed.inference": "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine",
            "deepspeed.inference.v2.inference_utils": "ActivationType DtypeEnum NormTypeEnum ceil_div elem_size",
            "deepspeed.inference.v2.ragged": (
                "AllocationMode DSSequenceDescriptor DSStateManager DSStateManagerConfig KVCacheConfig MemoryConfig "
                "RaggedBatchWrapper"
            ),
            "deepspeed.inference.v2": "InferenceEngineV2 RaggedInferenceEngineConfig build_hf_engine",
            "deepspeed.inference.v2.config_v2": "RaggedInferenceEngineConfig",
            "deepspeed.inference.v2.engine_factory": "build_hf_engine",
            "deepspeed.inference.v2.engine_v2": "InferenceEngineV2",
        },
    ),
    Feature(
        "binding processes to cores",
        "Start the ranks with deepspeed --bind_cores_to_rank.",
        {"deepspeed.utils.numa": "get_numactl_cmd get_numa_cores"},
    ),
    Feature(
        "ZenFlow",
        "Use Adam or AdamW and zero_optimization.offload_optimizer with device cpu; with its super_offload the host's "
        "update begins while gradients still arrive.",
        {
            "deepspeed.ops.adam": "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            "deepspeed.ops.adam.zenflow_cpu_adam": "ZenFlowCPUAdam",
            "deepspeed.ops.adam.zenflow_torch_adam": "ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3",
            "deepspeed.runtime.zenflow.zenflow_config": "ZenFlowConfig",
            "deepspeed.runtime.zenflow.zenflow_stage_1_and_2": "ZenFlowZeroOptimizer",
        },
        (section("zero_optimization.zenflow"),),
    ),
    Feature(
        "mixed precision by Apex or MS-AMP",
        "Use bf16, fp16 or torch_autocast.",
        keys=(switch("amp.enabled"), switch("msamp.enabled")),
    ),
    Feature(
        "AutoSP",
        "Use sequence_parallel_size, which divides the sequences of models of Transformers without a compiler.",
        {"deepspeed.compile.passes.sp_compile": "prepare_autosp_inputs"},
        (Key("compile.passes", lambda value: "autosp" in (value or ()), 'leave "autosp" out'),),
    ),
    Feature(
        "DeepCompile",
        "Use engine.compile(), which needs none of it.",
        {"deepspeed.compile.passes": "offload_adam_states prefetch selective_gather zero3_compile"},
        (switch("compile.deepcompile"),),
        modules=(
            "deepspeed.compile.passes.offload_adam_states deepspeed.compile.passes.prefetch "
            "deepspeed.compile.passes.selective_gather deepspeed.compile.passes.zero3_compile"
        ),
    ),
)
