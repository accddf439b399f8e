"""Forms that published configurations have: each is taken, with a line where it has no effect, or told what to write.

The forms are those of repositories such as Accelerate, Transformers, DeepSpeedExamples, Megatron-DeepSpeed, GPT-NeoX,
LLaMA-Factory, Axolotl, FastChat, trlX, InternVL, EVA and mistral. What the original package reads without an error is
taken here, unless it would silently do something else than it says.
"""

import math
from typing import Any

import pytest

from tests.config.support import nest, problems, read

OFFLOADED = {"device": "cpu", "pin_memory": True}
# Path, value, and the beginning of the line that says it has no effect; None: no line.
TAKEN: list[tuple[str, Any, str | None]] = [
    # axolotl, LLaMA-Factory, the XGLM and Qwen examples: limits of 0, floats for counts, text for counts
    ("zero_optimization", {"stage": 3, "sub_group_size": 0}, None),
    ("zero_optimization", {"stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}, None),
    ("zero_optimization", {"stage": 3, "stage3_prefetch_bucket_size": 0.94e6}, None),
    ("zero_optimization", {"stage": 2, "reduce_bucket_size": "5e8", "allgather_bucket_size": "2e8"}, None),
    ("zero_optimization", {"stage": 2, "allgather_bucket_size": 0}, None),
    ("zero_optimization", {"stage": "2"}, None),
    ("zero_optimization", {"stage": 2.0}, None),
    ("zero_optimization", {"stage": 2, "sub_group_size": 1e12}, None),
    # Accelerate, trlX, DeepSpeed-Chat, the hybrid engine's example: offload_param below stage 3
    ("zero_optimization", {"stage": 2, "offload_param": OFFLOADED}, "zero_optimization.offload_param has no effect"),
    ("zero_optimization", {"offload_param": OFFLOADED}, "zero_optimization.offload_param has no effect"),
    ("zero_optimization", {"stage": 2, "cpu_offload_params": True}, "zero_optimization.cpu_offload_params "),
    (
        "zero_optimization",
        {"stage": 2, "offload_param": {"device": "none", "buffer_count": 0, "buffer_size": 0}},
        "zero_optimization.offload",
    ),
    ("zero_optimization", {"stage": 2, "cpu_offload": False}, None),
    ("zero_optimization", {"stage": 2, "offload_optimizer": None, "offload_param": None}, None),
    # mistral, wav2vec2, the first README
    ("zero_optimization", {"stage": 3, "cpu_offload_pin_memory": True}, "zero_optimization.cpu_offload_pin_memory"),
    ("zero_optimization", {"stage": 2, "find_unused_parameters": True}, "zero_optimization.find_unused"),
    ("zero_optimization", True, "zero_optimization: true is an old form"),
    ("zero_optimization", False, None),
    ("zero_optimization", None, None),
    # Apex's and fairseq's settings that stayed in fp16 sections
    ("fp16", {"enabled": True, "opt_level": "O2"}, "fp16.opt_level has no effect"),
    ("fp16", {"enabled": True, "fp16_scale_tolerance": 0.25, "min_loss_scale": 0.5}, "fp16.fp16_scale_tolerance has"),
    ("fp16", {"enabled": True, "min_loss_scale": 1e-10}, None),
    ("fp16", {"enabled": False, "loss_scale_window": 0, "min_loss_scale": 0}, "fp16."),
    ("bf16", {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "hysteresis": 2}, None),
    ("bf16", {"enabled": True, "opt_level": "O2"}, "bf16.opt_level has no effect"),
    ("bfloat16", {"enabled": "true"}, "bfloat16 is an old name of bf16"),
    ("amp", {"enabled": False, "opt_level": "O2"}, "amp.opt_level has no effect"),
    # hana, Megatron-DeepSpeed: what checkpointing was told in other types
    ("activation_checkpointing", {"number_checkpoints": False, "profile": None}, None),
    (
        "activation_checkpointing",
        {"number_checkpoints": 0},
        "activation_checkpointing.number_checkpoints has no effect",
    ),
    (
        "activation_checkpointing",
        {"contiguous_memory_optimization": True},
        "activation_checkpointing.contiguous_memory_optimization has no effect",
    ),
    # BEiT, EVA, VideoMAE
    ("flops_profiler", {"enabled": True, "profile_step": -1, "detailed": True}, None),
    ("flops_profiler", {"enabled": True, "profile_step": 0}, None),
    ("gradient_accumulation_dtype", "fp32", "gradient_accumulation_dtype is an old name"),
    # sections that are off
    ("elasticity", {"enabled": False, "micro_batch_size": 1}, "elasticity.micro_batch_size is not a known key"),
    ("autotuning", {"enabled": False, "results_dir": None, "tuner_num_trials": 0}, "autotuning."),
    ("comet", {"enabled": False, "samples_log_interval": 0, "api": "x"}, "comet."),
    ("wandb", {"enabled": False, "name": "run"}, "wandb."),
    # null for switches that are off
    *((name, None, None) for name in ("wall_clock_breakdown", "dump_state", "prescale_gradients", "sparse_gradients")),
    *((name, None, None) for name in ("fp16", "aio", "flops_profiler", "optimizer", "scheduler", "tensorboard")),
    ("steps_per_print", math.inf, None),
    ("steps_per_print", "10", None),
    ("communication_data_type", "bfp16", "REFUSED"),
    # settings of programs beside those of this package
    ("cuda_visible_devices", "0,1", "cuda_visible_devices is ignored"),
    ("log", {"level": "info"}, "log is ignored"),
    ("monitor_config", {"tensorboard": {"enabled": True}}, "monitor_config is ignored"),
    ("comms_config", {"enabled": True}, "comms_config is ignored"),
    ("num-attention-heads", 12, "num-attention-heads is ignored"),
    ("comment", "tuned by hand", None),
    ("_note", ["anything"], None),
    # what would change a result, and is meant for another key
    *((name, 1, "REFUSED") for name in ("max_grad_norm", "min_lr", "learning_rate", "lr", "micro_batch_size")),
    *((name, {}, "REFUSED") for name in ("lr_scheduler", "zero", "zero_optimisation", "autocast")),
]


@pytest.mark.parametrize(("name", "value", "line"), TAKEN, ids=lambda given: str(given)[:50])
def test_a_form(name: str, value: Any, line: str | None) -> None:
    config = nest(tuple(name.split(".")), value)
    if line == "REFUSED":
        assert all(each.startswith(name) for each in problems(config))
        assert all("did you mean" in each or "expected" in each for each in problems(config))
        return
    notices = read(config, dp_world_size=1).notices
    assert not notices if line is None else all(each.startswith(line) for each in notices)
    assert bool(notices) is bool(line)


OPTIMIZERS: list[dict[str, Any]] = [
    {"type": "ADAM", "params": {"lr": "3e-5", "betas": [0.9, 0.98], "eps": 1e-6, "bias_correction": True}},
    {"type": "Adam", "params": {"lr": 1e-3, "max_grad_norm": 1.0}},
    {"type": "AdamW", "params": {"lr": 5e-5, "torch_adam": True, "adam_w_mode": True}},
    {"type": "Adam", "adam_w_mode": True, "params": {"lr": 1e-3}},
    {"type": "Adam"},
    {"type": "Adam", "params": None},
    {"type": "Lamb", "params": {"lr": 2e-3, "max_coeff": 0.5, "min_coeff": 0.08}},
    {"type": "OneBitAdam", "params": {"lr": 4e-4, "freeze_step": 400, "cuda_aware": False, "comm_backend_name": "mpi"}},
    {"type": "sgd", "params": {"lr": 0.1, "momentum": 0.9}},
    {"type": "sat.ops.FusedEmaAdam", "params": {"lr": 1e-4, "decay": 0.9999}},
    {},
]


@pytest.mark.parametrize("section", OPTIMIZERS, ids=str)
def test_optimizers(section: dict[str, Any]) -> None:
    read({"optimizer": section})


SCHEDULES: list[dict[str, Any]] = [
    {"type": "WarmupLR"},
    {"type": "WarmupLR", "params": {"last_batch_iteration": -1, "warmup_min_lr": 0, "warmup_num_steps": 0}},
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_type": "linear"}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 1e4, "warmup_num_steps": "1000", "warmup_max_lr": 1e-4}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_min_mom": 0.85}},
    {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 200}},
    {"type": None},
]


@pytest.mark.parametrize("section", SCHEDULES, ids=str)
def test_schedules(section: dict[str, Any]) -> None:
    read({"scheduler": section})


def test_a_switch_must_be_off_by_name() -> None:
    """A misspelt switch leaves a section off, so nothing else in it may pass."""
    assert problems({"fp16": {"enabld": True, "hysterisis": 3}})
    assert problems({"fp16": {"enabled": "auto", "hysterisis": 3}})
    assert problems({"fp16": {"enabled": True, "loss_scale_window": 0}})
    assert problems({"elasticity": {"enabled": False, "continue": True, "copy_evry": 2}})
    batching = {"enabled": False, "dynamic_batching": {"enabled": True, "max_tokns": 9}}
    assert problems({"data_efficiency": {"enabled": True, "data_sampling": batching}})


def test_templates_are_refused_by_the_place_that_is_to_be_filled() -> None:
    found = problems({"train_batch_size": "CONFIG_BATCH_SIZE", "zero_optimization": {"stage": "ZERO_STAGE"}})
    assert [each.partition(":")[0] for each in found] == ["train_batch_size", "zero_optimization.stage"]
