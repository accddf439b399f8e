"""Configurations as the integrations and public pages write them."""

import math
from typing import Any

import pytest

from deepspeed.config import BatchSizes, DeepSpeedConfig, parse

# The ds_config.json of a cluster's how-to page, as it stands there.
CLUSTER_PAGE: dict[str, Any] = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 0,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}


def test_cluster_page() -> None:
    parsed = parse(CLUSTER_PAGE, dp_world_size=4)
    assert parsed.notices == []
    assert parsed.batch == BatchSizes(16, 4, 1)
    assert parsed.root.fp16.initial_scale_power == 15


@pytest.mark.parametrize("stage", range(4))
def test_accelerate_plugin(stage: int) -> None:
    config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {
            "stage": stage,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": "none"},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": 1.0,
        "steps_per_print": math.inf,
        "fp16": {"enabled": True, "auto_cast": True},
        "bf16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
    }
    parsed = parse(config, dp_world_size=2)
    assert parsed.notices == [] and parsed.root.steps_per_print is None


def test_transformers_under_zero_init() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "bf16": {"enabled": "auto"},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "sub_group_size": 1e9,
        },
    }
    root = parse(config, purpose="zero_init").root
    assert root.zero_optimization.stage == 3 and not root.fp16.enabled
    assert root.zero_optimization.stage3_prefetch_bucket_size == 50_000_000


def test_evaluation_keeps_a_scheduler_without_an_optimizer() -> None:
    params = {"warmup_min_lr": 0, "warmup_max_lr": 5e-5, "warmup_num_steps": 0, "total_num_steps": 0}
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "zero_optimization": {"stage": 3},
        "scheduler": {"type": "WarmupDecayLR", "params": params},
    }
    assert parse(config, dp_world_size=1).root.scheduler is not None


@pytest.mark.parametrize("stage", range(4))
def test_lightning_defaults(stage: int) -> None:
    config = {
        "activation_checkpointing": {
            "partition_activations": False,
            "cpu_checkpointing": False,
            "contiguous_memory_optimization": False,
            "synchronize_checkpoint_boundary": False,
        },
        "aio": {
            "block_size": 1048576,
            "queue_depth": 8,
            "single_submit": False,
            "overlap_events": True,
            "thread_count": 1,
        },
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "allgather_partitions": True,
            "reduce_scatter": True,
            "allgather_bucket_size": 200_000_000,
            "reduce_bucket_size": 200_000_000,
            "sub_group_size": 1_000_000_000_000,
        },
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": True},
    }
    parsed = parse(config, dp_world_size=2)
    assert parsed.notices == ["gradient_clipping: 0 switches clipping off; the default is 1.0"]


class Mpu:
    def get_data_parallel_world_size(self) -> int:
        return 4


class Mesh:
    mesh_dim_names = ("data_parallel", "sequence_parallel")

    def size(self, dim: int | None = None) -> int:
        return {None: 4, 0: 2, 1: 2}[dim]


def test_the_config_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert DeepSpeedConfig(CLUSTER_PAGE).train_micro_batch_size_per_gpu == 16
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert DeepSpeedConfig(CLUSTER_PAGE).train_micro_batch_size_per_gpu == 2
    assert DeepSpeedConfig(CLUSTER_PAGE, mesh_device=Mesh()).world_size == 2
    config = DeepSpeedConfig(CLUSTER_PAGE, mpu=Mpu())
    assert (config.world_size, config.train_batch_size, config.gradient_accumulation_steps) == (4, 16, 1)
    assert config.optimizer_name == "adam" and config.optimizer_params["lr"] == 0.001
    assert config.scheduler_name == "WarmupLR" and config.scheduler_params["warmup_num_steps"] == 1000
    assert config.fp16_enabled and not config.bfloat16_enabled and not config.zero_enabled
    assert config.loss_scale == 0 and config.initial_dynamic_scale == 2**15
    assert config.zero_config.stage == config.zero_optimization_stage == 0
    assert config.gradient_clipping == 1.0 and config.steps_per_print == 2000
    assert config.activation_checkpointing_config.profile is False
    assert config.comms_config.enabled is False and config.flops_profiler_config.profile_step == 1
    assert config.checkpoint_tag_validation_enabled and not config.checkpoint_tag_validation_fail
    for name in ("amp", "data_efficiency", "eigenvalue", "pld"):
        assert getattr(config, f"{name}_enabled") is False
    assert DeepSpeedConfig({**CLUSTER_PAGE, "data_efficiency": {"enabled": True}}, mpu=Mpu()).data_efficiency_enabled
    layers = {"progressive_layer_drop": {"enabled": True}, "eigenvalue": {"enabled": True}}
    switched_on = DeepSpeedConfig({**CLUSTER_PAGE, **layers}, mpu=Mpu())
    assert switched_on.pld_enabled and switched_on.eigenvalue_enabled and not switched_on.curriculum_enabled_legacy
    with pytest.raises(AttributeError, match="no key 'nothing'"):
        _ = config.nothing
