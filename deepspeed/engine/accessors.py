"""The configuration accessors of the engine: methods without arguments that each return one configuration value.

Integrations and scripts call them; they are one table here, from method name to dotted key. The few that need more than
a look-up are written out in the class.
"""

from __future__ import annotations

from typing import Any

from deepspeed.config.sections.optimizer import name_for_programs
from deepspeed.config.sections.root import Root

_ZERO = "zero_optimization."

_KEYS: dict[str, str] = {
    "managed_gradient_accumulation": "managed_gradient_accumulation",
    "gradient_clipping": "gradient_clipping",
    "gradient_predivide_factor": "gradient_predivide_factor",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "torch_autocast_lower_precision_safe_modules": "torch_autocast.lower_precision_safe_modules",
    "steps_per_print": "steps_per_print",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "memory_breakdown": "memory_breakdown",
    "dump_state": "dump_state",
    "log_level": "log_level",
    "flops_profiler_enabled": "flops_profiler.enabled",
    "flops_profiler_recompute_fwd_factor": "flops_profiler.recompute_fwd_factor",
    "flops_profiler_profile_step": "flops_profiler.profile_step",
    "flops_profiler_module_depth": "flops_profiler.module_depth",
    "flops_profiler_top_modules": "flops_profiler.top_modules",
    "flops_profiler_detailed": "flops_profiler.detailed",
    "flops_profiler_output_file": "flops_profiler.output_file",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "checkpoint_serialization_enabled": "checkpoint.checkpoint_serialization",
    "dataloader_drop_last": "dataloader_drop_last",
    "autotp_size": "tensor_parallel.autotp_size",
    "tensor_parallel_config": "tensor_parallel",
    "data_efficiency_config": "data_efficiency",
    "aio_config": "aio",
    "sparse_gradients_enabled": "sparse_gradients",
    "graph_harvesting": "graph_harvesting",
    "zero_allow_untested_optimizer": "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "zero_optimization_stage": _ZERO + "stage",
    "zero_reduce_scatter": _ZERO + "reduce_scatter",
    "zero_reduce_bucket_size": _ZERO + "reduce_bucket_size",
    "zero_multi_rank_bucket_allreduce": _ZERO + "use_multi_rank_bucket_allreduce",
    "zero_allgather_partitions": _ZERO + "allgather_partitions",
    "zero_allgather_bucket_size": _ZERO + "allgather_bucket_size",
    "zero_allgather_sequential": _ZERO + "stage3_allgather_sequential",
    "zero_contiguous_gradients": _ZERO + "contiguous_gradients",
    "zero_compute_grad_norm": _ZERO + "compute_grad_norm",
    "zero_load_from_fp32_weights": _ZERO + "load_from_fp32_weights",
    "zero_elastic_checkpoint": _ZERO + "elastic_checkpoint",
    "zero_offload_optimizer": _ZERO + "offload_optimizer",
    "zero_offload_param": _ZERO + "offload_param",
    "zero_sub_group_size": _ZERO + "sub_group_size",
    "zero_prefetch_bucket_size": _ZERO + "stage3_prefetch_bucket_size",
    "zero_param_persistence_threshold": _ZERO + "stage3_param_persistence_threshold",
    "zero_model_persistence_threshold": _ZERO + "stage3_model_persistence_threshold",
    "zero_max_live_parameters": _ZERO + "stage3_max_live_parameters",
    "zero_max_reuse_distance": _ZERO + "stage3_max_reuse_distance",
    "zero_module_granularity_threshold": _ZERO + "stage3_module_granularity_threshold",
    "zero_ignore_unused_parameters": _ZERO + "ignore_unused_parameters",
    "zero_legacy_stage1": _ZERO + "legacy_stage1",
    "zero_round_robin_gradients": _ZERO + "round_robin_gradients",
    "zero_parameter_alignment": _ZERO + "parameter_alignment",
    "zero_hpz_partition_size": _ZERO + "zero_hpz_partition_size",
    "zero_quantized_weights": _ZERO + "zero_quantized_weights",
    "zero_quantized_nontrainable_weights": _ZERO + "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients": _ZERO + "zero_quantized_gradients",
    "zero_log_trace_cache_warnings": _ZERO + "log_trace_cache_warnings",
    "zero_save_muon_momentum_buffer_in_memory": _ZERO + "save_muon_momentum_buffer_in_memory",
    "zenflow_config": _ZERO + "zenflow",
    "is_sanity_checks_enabled": _ZERO + "enable_sanity_checks",
}


def _accessor(name: str, path: str) -> Any:
    steps = path.split(".")

    def read(self: ConfigAccessors) -> Any:
        value: Any = self._root
        for step in steps:
            value = getattr(value, step)
        return value

    read.__name__ = name
    read.__qualname__ = f"ConfigAccessors.{name}"
    read.__doc__ = f"Value of ``{path}``."
    return read


class ConfigAccessors:
    """Mixin of the engine: one method per configuration value."""

    _root: Root

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Returns whether whole weights may be collected for saving: for stage 3, the key of that name.

        Layers that tensor-parallel ranks share are whole below stage 3 once they are collected over these ranks, which
        no key forbids; Accelerate calls this before it collects them.
        """
        zero = self._root.zero_optimization
        shares_layers = self._root.tensor_parallel.autotp_size > 1
        return zero.stage3_gather_16bit_weights_on_model_save or (shares_layers and zero.stage < 3)

    def elasticity_enabled(self) -> bool:
        """Returns whether the section ``elasticity`` chooses the batch."""
        return self._root.elasticity is not None and self._root.elasticity.enabled

    def autotuning_enabled(self) -> bool:
        """Returns ``autotuning.enabled``."""
        return self._root.autotuning is not None and self._root.autotuning.enabled

    def eigenvalue_enabled(self) -> bool:
        """Returns ``eigenvalue.enabled``."""
        return self._root.eigenvalue is not None and self._root.eigenvalue.enabled

    def amp_enabled(self) -> bool:
        """Returns ``amp.enabled``, which ``initialize`` refuses where it is true."""
        return self._root.amp is not None and self._root.amp.enabled

    def zero_optimization(self) -> bool:
        """Returns whether a ZeRO stage above 0 is on."""
        return self._root.zero_optimization.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Returns whether gradients are sharded (stage 2 and above)."""
        return self._root.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Returns whether parameters are sharded (stage 3)."""
        return self._root.zero_optimization.stage >= 3

    def zero_overlap_comm(self) -> bool:
        """Returns ``zero_optimization.overlap_comm``; by default on."""
        return self._root.zero_optimization.overlap_comm is not False

    def zero_cpu_offload(self) -> bool:
        """Returns whether optimizer states live in host memory."""
        return self._offload_optimizer_device() in ("cpu", "nvme")

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        """Returns whether optimizer states live on NVMe."""
        return self._offload_optimizer_device() == "nvme"

    def zero_partial_offload(self) -> float:
        """Returns the share of the parameters that are updated on the host."""
        section = self._root.zero_optimization.offload_optimizer
        return section.ratio if section is not None else 0.0

    def super_offload(self) -> bool:
        """Returns ``offload_optimizer.super_offload``."""
        section = self._root.zero_optimization.offload_optimizer
        return bool(section is not None and section.super_offload)

    def cpuadam_cores_perc(self) -> float:
        """Returns ``offload_optimizer.cpuadam_cores_perc``."""
        section = self._root.zero_optimization.offload_optimizer
        return section.cpuadam_cores_perc if section is not None else 0.9

    def swap_tensor_config(self) -> Any:
        """Returns the ``aio`` section."""
        return self._root.aio

    def _offload_optimizer_device(self) -> str:
        section = self._root.zero_optimization.offload_optimizer
        return str(getattr(section.device, "value", section.device)) if section is not None else "none"

    def postscale_gradients(self) -> bool:
        """Returns whether gradients are divided after the reduction."""
        return not self._root.prescale_gradients

    def optimizer_name(self) -> str | None:
        """Returns ``optimizer.type``, upstream's own names in small letters (``adamw``).

        None for a client optimizer.
        """
        return name_for_programs(self._root.optimizer)

    def optimizer_params(self) -> dict[str, Any] | None:
        """Returns ``optimizer.params``."""
        return dict(self._root.optimizer.params) if self._root.optimizer is not None else None

    def optimizer_legacy_fusion(self) -> bool:
        """Returns ``optimizer.legacy_fusion``."""
        return bool(self._root.optimizer is not None and self._root.optimizer.legacy_fusion)

    def scheduler_name(self) -> str | None:
        """Returns ``scheduler.type``."""
        return self._root.scheduler.type if self._root.scheduler is not None else None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Returns ``scheduler.params``."""
        return dict(self._root.scheduler.params) if self._root.scheduler is not None else None

    def initial_dynamic_scale(self) -> float:
        """Returns the first dynamic loss scale."""
        return 2.0**self._root.fp16.initial_scale_power

    def dynamic_loss_scale(self) -> bool:
        """Returns whether the fp16 loss scale is dynamic."""
        return self._root.fp16.loss_scale == 0

    def loss_scale(self) -> float:
        """Returns ``fp16.loss_scale``; 0 means dynamic. The scale in force is ``engine.optimizer.loss_scale``."""
        return self._root.fp16.loss_scale

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """Returns the settings of the dynamic loss scale."""
        fp16 = self._root.fp16
        return {
            "init_scale": self.initial_dynamic_scale(),
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Returns whether tags are compared across ranks."""
        return self._root.checkpoint.tag_validation.lower() != "ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Returns whether differing tags are an error."""
        return self._root.checkpoint.tag_validation.lower() == "fail"

    def checkpoint_writer_enabled(self) -> bool:
        """Returns whether a writer of its own is configured."""
        return self._root.checkpoint.writer is not None

    def data_efficiency_enabled(self) -> bool:
        """Returns ``data_efficiency.enabled``."""
        return self._root.data_efficiency is not None and self._root.data_efficiency.enabled

    def data_sampling_config(self) -> Any:
        """Returns ``data_efficiency.data_sampling``; None without the section."""
        return None if self._root.data_efficiency is None else self._root.data_efficiency.data_sampling

    def data_sampling_enabled(self) -> bool:
        """Returns whether the sampler is on."""
        return self.data_efficiency_enabled() and self.data_sampling_config().enabled

    def curriculum_learning_config(self) -> Any:
        """Returns ``data_efficiency.data_sampling.curriculum_learning``; None without the section."""
        section = self.data_sampling_config()
        return None if section is None else section.curriculum_learning

    def curriculum_learning_enabled(self) -> bool:
        """Returns whether samples come by difficulty."""
        return self.data_sampling_enabled() and self.curriculum_learning_config().enabled

    def random_ltd_config(self) -> Any:
        """Returns ``data_efficiency.data_routing.random_ltd``; None without the section."""
        return None if self._root.data_efficiency is None else self._root.data_efficiency.data_routing.random_ltd

    def random_ltd_enabled(self) -> bool:
        """Returns whether layers drop tokens."""
        section = self._root.data_efficiency
        return (
            self.data_efficiency_enabled()
            and section is not None
            and (section.data_routing.enabled and section.data_routing.random_ltd.enabled)
        )

    @property
    def communication_data_type(self) -> Any:
        """Dtype of gradient reductions; where the key is not given, that of a micro-batch's gradients."""
        return self._precision.reduce_dtype(self.get_data_types()[0])  # type: ignore[attr-defined]


for _name, _path in _KEYS.items():
    setattr(ConfigAccessors, _name, _accessor(_name, _path))
