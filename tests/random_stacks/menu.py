"""Draws sections of a configuration. Combinations that are refused by name are drawn too: refusing must be clear."""

from random import Random
from typing import Any

from tests.random_stacks.stack import Config

ONE_BIT = ("OneBitAdam", "ZeroOneAdam", "OneBitLamb")

# eps is large beside the rounding of a gradient, so that rounding does not decide the direction of an update.
_OPTIMIZERS: dict[str, Config] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    "Adam": {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.05, "adam_w_mode": False},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Lion": {"lr": 1e-5, "weight_decay": 0.1},
    "Lamb": {"lr": 0.01, "eps": 1e-3},
    "Muon": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.02, "eps": 1e-2},
    "OneBitAdam": {"lr": 0.005, "freeze_step": 3, "eps": 1e-3},
    "ZeroOneAdam": {"lr": 0.005, "var_freeze_step": 4, "local_step_scaler": 3, "local_step_clipper": 2, "eps": 1e-3},
    "OneBitLamb": {"lr": 0.005, "freeze_step": 3, "eps": 1e-3},
}
_SCHEDULES: tuple[tuple[str, Config], ...] = (
    ("WarmupLR", {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3}),
    ("WarmupDecayLR", {"total_num_steps": 8, "warmup_num_steps": 2, "warmup_max_lr": 0.01}),
    ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 2}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2}),
    ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 2, "cycle_momentum": False}),
    ("LRRangeTest", {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2}),
)
_CURRICULUM: Config = {
    "enabled": True, "curriculum_type": "seqlen", "min_difficulty": 2, "max_difficulty": 6,
    "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 5, "difficulty_step": 1},
}  # fmt: skip

_DATA_ROUTING: Config = {
    "enabled": True,
    "data_routing": {
        "enabled": True,
        "random_ltd": {
            "enabled": True, "total_layer_num": 3, "random_ltd_layer_num": 1, "random_ltd_layer_id": [1],
            "random_ltd_schedule": {
                "min_value": 4, "max_value": 8, "schedule_type": "fixed_linear",
                "schedule_config": {"require_steps": 4, "seq_per_step": 2},
            },
        },
    },
}  # fmt: skip

# Key, probability, values.
_PLAIN: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("gradient_clipping", 0.4, (0.1, 1.0)),
    ("prescale_gradients", 0.2, (True,)),
    ("gradient_predivide_factor", 0.2, (2.0, 3.0)),
    ("communication_data_type", 0.2, ("fp32", "bf16", "fp16")),
    ("sparse_gradients", 0.1, (True,)),
    ("gradient_allreduce_op", 0.1, ("mean",)),
    ("wall_clock_breakdown", 0.1, (True,)),
    ("memory_breakdown", 0.1, (True,)),
    ("dump_state", 0.1, (True,)),
    ("disable_python_gc", 0.1, (True,)),
    ("zero_allow_untested_optimizer", 0.1, (True,)),
    ("comms_logger", 0.1, ({"enabled": True, "verbose": False},)),
    ("flops_profiler", 0.1, ({"enabled": True, "profile_step": 2, "output_file": "FOLDER/flops.txt"},)),
    ("csv_monitor", 0.1, ({"enabled": True, "output_path": "FOLDER/csv", "job_name": "job"},)),
    ("run_report", 0.1, ({"path": "FOLDER/report"}, {"stragglers": True})),
    (
        "checkpoint",
        0.2,
        (
            {"async_save": True},
            {"writer": {"type": "fast", "decoupled": True}},
            {"writer": {"type": "fast", "io_buffer_size": 4096}},
            {"tag_validation": "FAIL"},
            {"parallel_write": {"pipeline_stage": True}},
            {"use_node_local_storage": True},
            {"checkpoint_serialization": False},
            {"keep_last": 1},
        ),
    ),
    ("trace", 0.04, ({"path": "FOLDER/trace", "first_step": 2, "steps": 1},)),
    (
        "data_types",
        0.25,
        (
            {"grad_accum_dtype": "fp32"},
            {"grad_accum_dtype": "bf16"},
            {"grad_accum_dtype": "fp16"},
            {"buffer_dtype": "fp32"},
            {"keep_in_fp32_modules": ["norm"]},
            {"keep_in_fp32_modules": ["norm"], "grad_accum_dtype": "fp32"},
        ),
    ),
    ("progressive_layer_drop", 0.1, ({"enabled": True, "theta": 0.5, "gamma": 0.01},)),
    ("curriculum_learning", 0.15, (_CURRICULUM,)),
    ("activation_checkpointing", 0.15, ({"blocks": True}, {"partition_activations": True})),
    (
        "communication_compression",
        0.12,
        (
            {"gradients": "int8"},
            {"gradients": "sign"},
            {"gradients": "int4"},
            {"gradients": "auto"},
            {"weights": "int8"},
            {"islands": {"size": 1, "sync_every": 2}},
            {"gradients": "int8", "error_feedback": True, "start_step": 2},
            {"gradients": "sign", "start_step": 3, "warm_up": "int8"},
        ),
    ),
    ("compile", 0.03, ({"enabled": True, "backend": "eager"},)),
    ("hybrid_engine", 0.03, ({"enabled": True, "max_out_tokens": 8},)),
)


def draw_config(dice: Random) -> tuple[Config, str]:
    """Returns a configuration and the name of its optimizer."""
    config: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": dice.choice((1, 2, 3)),
        "steps_per_print": dice.choice((1, 1_000_000)),
        **_precision(dice),
    }
    optimizer = dice.choice(("AdamW", "client AdamW", "client SGD", *_OPTIMIZERS))
    if optimizer in _OPTIMIZERS:
        config["optimizer"] = {"type": optimizer, "params": dict(_OPTIMIZERS[optimizer])}
    if dice.random() < 0.5 and optimizer != "Lion":
        name, params = dice.choice(_SCHEDULES)
        config["scheduler"] = {"type": name, "params": params}
    for key, probability, values in _PLAIN:
        if dice.random() < probability:
            config[key] = dice.choice(values)
    if dice.random() < 0.2:
        config["compression_training"] = _compression(dice)
    if dice.random() < 0.1:
        config["quantize_training"] = _quantize_training(dice)
    if dice.random() < 0.1:
        config["data_efficiency"] = _DATA_ROUTING
    config["zero_optimization"] = draw_zero(dice)
    return config, optimizer


def possible(dice: Random, config: Config, optimizer: str, world: int) -> Config:
    """Returns a configuration, mostly without what is known to be refused; else few stacks would train."""
    if dice.random() < 0.07:
        return config
    zero = dict(config["zero_optimization"])
    stage, has_own_step = zero["stage"], optimizer in ("Muon", "Lamb", *ONE_BIT)
    highest = {"ZeroOneAdam": 0, "OneBitAdam": 2, "OneBitLamb": 2}.get(optimizer, 3)
    if stage > highest:
        stage = highest
        zero = {key: value for key, value in zero.items() if key in _AT_ANY_STAGE} | {"stage": stage}
    offload = zero.get("offload_optimizer", {})
    has_16_bit_masters = any("master_weights" in key for name in ("bf16", "fp16") for key in config.get(name, {}))
    files = offload.get("device") == "nvme"
    if (
        optimizer in ONE_BIT
        or (has_own_step and (files or "super_offload" in offload))
        or (files and has_16_bit_masters)
    ):
        zero.pop("offload_optimizer", None)
    if "zero_quantized_gradients" not in zero:
        zero.pop("zeropp_loco_param", None)
    if "ratio" in offload and stage < 3:
        zero.pop("offload_optimizer", None)
    for key in ("mics_shard_size", "zero_hpz_partition_size"):
        others = zero.keys() & {"offload_param", "mics_shard_size"} - {key}
        if key in zero and (zero[key] == 1 or world % zero[key] or others):
            del zero[key]
    changed = {**config, "zero_optimization": zero}
    if has_own_step and has_16_bit_masters:
        changed = {key: value for key, value in changed.items() if key not in ("bf16", "fp16")}
    if optimizer in ONE_BIT or zero.keys() & {"zero_quantized_gradients", "mics_shard_size"}:
        changed.pop("communication_compression", None)
    if stage < 3 and "weights" in changed.get("communication_compression", {}):
        del changed["communication_compression"]
    if "compression_training" in changed:
        changed.pop("quantize_training", None)
    if optimizer == "Lamb" and "loss_scale" in changed.get("fp16", {}):
        del changed["fp16"]
    return changed


def _precision(dice: Random) -> Config:
    kind = dice.choice(("fp32", "fp32", "bf16", "bf16 masters", "fp16", "fp16 static", "autocast"))
    if kind == "bf16":
        more: Config = dice.choice(({}, {"immediate_grad_update": True}, {"check_grad_overflow": False}))
        return {"bf16": {"enabled": True, **more}}
    if kind == "bf16 masters":
        more = dice.choice(({}, {"bf16_optimizer_states": True}))
        return {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, **more}}
    if kind == "fp16":
        more = dice.choice(({}, {}, {"fp16_master_weights_and_grads": True}))
        return {
            "fp16": {
                "enabled": True,
                "initial_scale_power": dice.choice((4, 8, 20)),
                "loss_scale_window": 2,
                "hysteresis": dice.choice((1, 2)),
                "consecutive_hysteresis": dice.random() < 0.5,
                **more,
            }
        }
    if kind == "fp16 static":
        return {"fp16": {"enabled": True, "loss_scale": 64}}
    if kind == "autocast":
        return {"torch_autocast": {"enabled": True, "dtype": dice.choice(("bfloat16", "float16"))}}
    return {}


def _compression(dice: Random) -> Config:
    """Returns ``compression_training``; layers are those of :mod:`tests.random_stacks.models`."""
    modules = [dice.choice(("*", "blocks.1"))]
    shared: Config = {"enabled": True, "schedule_offset": dice.choice((0, 2))}
    symmetry = {"quantization_type": dice.choice(("symmetric", "asymmetric"))}
    methods: tuple[tuple[str, Config, Config], ...] = (
        (
            "weight_quantization",
            {"quantize_groups": 1, **symmetry, "rounding": "nearest", "quantize_weight_in_forward": True},
            {
                "params": {"start_bits": 8, "target_bits": 4, "quantization_period": 1},
                "modules": modules,
            },
        ),
        (
            "sparse_pruning",
            {"method": dice.choice(("l1", "topk"))},
            {"params": {"dense_ratio": 0.5}, "modules": modules},
        ),
        (
            "row_pruning",
            {"method": "l1"},
            {
                "params": {"dense_ratio": 0.5},
                "modules": ["blocks.1.up"],
                "related_modules": [["blocks.1.down"]],
            },
        ),
        (
            "activation_quantization",
            {**symmetry, "range_calibration": dice.choice(("dynamic", "static"))},
            {"params": {"bits": 8}, "modules": modules},
        ),
    )
    name, more, group = dice.choice(methods)
    return {name: {"shared_parameters": {**shared, **more}, "different_groups": {"a": group}}}


def _quantize_training(dice: Random) -> Config:
    eigenvalue = {"enabled": True, "max_iter": 3, "layer_name": "blocks", "layer_num": 3}
    return {
        "enabled": True,
        "quantize_bits": {"start_bits": 10, "target_bits": 6},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        "quantize_groups": 1,
        "fp16_mixed_quantize": {"enabled": dice.random() < 0.5, "quantize_change_ratio": 0.1},
        **({"eigenvalue": eigenvalue} if dice.random() < 0.4 else {}),
    }


_ZERO: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("reduce_bucket_size", 0.5, (30, 300)),
    ("overlap_comm", 0.3, (True, False)),
    ("contiguous_gradients", 0.2, (False,)),
    ("reduce_scatter", 0.2, (False,)),
    ("round_robin_gradients", 0.2, (True,)),
    ("sub_group_size", 0.2, (20, 200)),
    ("allgather_bucket_size", 0.2, (50,)),
    ("ignore_unused_parameters", 0.2, (False,)),
    ("compute_grad_norm", 0.1, (False,)),
    ("parameter_alignment", 0.1, (True,)),
    ("elastic_checkpoint", 0.05, (True,)),
    ("load_from_fp32_weights", 0.05, (False,)),
    ("save_muon_momentum_buffer_in_memory", 0.1, (True,)),
    (
        "offload_optimizer",
        0.35,
        (
            {"device": "cpu"},
            {"device": "cpu", "pin_memory": False},
            {"device": "cpu", "ratio": 0.4},
            {"device": "cpu", "super_offload": True},
            {"device": "nvme", "nvme_path": "FOLDER/nvme"},
            {"device": "nvme", "nvme_path": "FOLDER/nvme", "pipeline_read": True, "pipeline_write": True},
        ),
    ),
)
_AT_ANY_STAGE = {key for key, _, _ in _ZERO}
_STAGE3: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("stage3_param_persistence_threshold", 1.0, (0, 0, 50, 10**5)),
    ("stage3_prefetch_bucket_size", 0.5, (0, 100)),
    ("stage3_max_live_parameters", 0.3, (0, 400)),
    ("stage3_max_reuse_distance", 0.3, (0, 300)),
    ("stage3_module_granularity_threshold", 0.2, (100, 1000)),
    ("stage3_model_persistence_threshold", 0.1, (60,)),
    ("stage3_allgather_sequential", 0.1, (True,)),
    ("zero_quantized_nontrainable_weights", 0.1, (True,)),
    ("agreement", 0.1, ("serve",)),
    ("mics_hierarchical_params_gather", 0.1, (True,)),
    ("leaf_module", 0.2, ({"names": ["blocks.1"]},)),
    (
        "offload_param",
        0.3,
        (
            {"device": "cpu"},
            {"device": "nvme", "nvme_path": "FOLDER/nvme"},
            {"device": "nvme", "nvme_path": "FOLDER/nvme", "max_in_cpu": 1},
        ),
    ),
    ("zero_quantized_weights", 0.15, (True,)),
    ("zero_quantized_gradients", 0.15, (True,)),
    ("zeropp_loco_param", 0.05, ({"err_beta": 0.8, "reset_T": 4},)),
    ("zero_hpz_partition_size", 0.15, (2,)),
    ("mics_shard_size", 0.15, (1, 2)),
    ("stage3_gather_16bit_weights_on_model_save", 0.3, (True,)),
    ("stage3_use_all_reduce_for_fetch_params", 0.2, (True,)),
)


def draw_zero(dice: Random) -> Config:
    """Returns ``zero_optimization``."""
    zero: Config = {"stage": dice.choice((1, 2, 3, 3))}
    for key, probability, values in (*_ZERO, *(_STAGE3 if zero["stage"] == 3 else ())):
        if dice.random() < probability:
            zero[key] = dice.choice(values)
    return zero


def is_lossy(config: Config) -> bool:
    """Returns whether stages round differently by design, so that they are not compared."""
    zero = config["zero_optimization"]
    quantized = any(key.startswith("zero_quantized") and is_on for key, is_on in zero.items())
    one_bit = config.get("optimizer", {}).get("type") in ONE_BIT
    return quantized or one_bit or "communication_compression" in config


def tolerance_of(config: Config) -> float:
    """Returns the largest relative difference of a loss between stages."""
    tolerance = 2e-4
    if {"bf16", "fp16", "torch_autocast", "data_types"} & set(config):
        tolerance = 3e-2
    if config.get("communication_data_type", "fp32") != "fp32":
        tolerance = 3e-2
    if "compression_training" in config:
        tolerance = 5e-2
    return 0.1 if "quantize_training" in config else tolerance
