"""One small Trainer run, with and without deepspeed, described by a few options."""

import copy
import os
from typing import Any

import torch
import torch.distributed as dist

from tests.zero.construction.pretrained import llama_config

STEPS = 6

AUTO_OPTIMIZER = {"type": "AdamW", "params": dict.fromkeys(["lr", "betas", "eps", "weight_decay"], "auto")}
AUTO_SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        **dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"], "auto"),
        "warmup_type": "linear",
    },
}


def ds_config(stage: int, optimizer: bool = True, scheduler: bool = False, offload: bool = False) -> dict[str, Any]:
    """A configuration as the Trainer's documentation shows it: everything that can be is "auto"."""
    zero: dict[str, Any] = {
        "stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": "auto",
    }  # fmt: skip
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "sub_group_size": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        }  # fmt: skip
    if offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "zero_optimization": zero, "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "steps_per_print": 2000,
        "wall_clock_breakdown": False, "bf16": {"enabled": "auto"},
        "fp16": {
            "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
            "min_loss_scale": 1,
        },
    }  # fmt: skip
    if optimizer:
        config["optimizer"] = copy.deepcopy(AUTO_OPTIMIZER)
    if scheduler:
        config["scheduler"] = copy.deepcopy(AUTO_SCHEDULER)
    return config


def rows(count: int = 64, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    """Sequences with a pattern to learn: each token is the one before plus a constant."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, 97, (count,), generator=generator)
    strides = torch.randint(1, 4, (count,), generator=generator)
    made = [(start + stride * torch.arange(9)) % 97 for start, stride in zip(starts, strides, strict=True)]
    return [{"input_ids": row, "labels": row} for row in made]


def arguments(folder: str, config: Any = None, **more: Any) -> Any:
    """TrainingArguments; without a configuration for plain data parallelism on the CPU."""
    from transformers import TrainingArguments

    given = {
        "max_steps": STEPS, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01,
        "warmup_steps": 2, "weight_decay": 0.0, "max_grad_norm": 0.5, "logging_steps": 1, "report_to": "none",
        "disable_tqdm": True, "save_strategy": "no", "seed": 3, "dataloader_pin_memory": False,
        "per_device_eval_batch_size": 4, "deepspeed": config, "use_cpu": config is None,
    }  # fmt: skip
    return TrainingArguments(folder, **{**given, **more})


def new_model(folder: str | None = None, **more: Any) -> Any:
    """A tiny Llama, or the one saved in ``folder``; sharded while it is made if the present arguments ask for it."""
    from transformers import AutoModelForCausalLM

    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(llama_config(**more))


def new_model_plain(folder: str) -> Any:
    """The model saved in ``folder``, whole, whatever arguments are alive."""
    from transformers.integrations import deepspeed as integration

    kept, integration._hf_deepspeed_config_weak_ref = integration._hf_deepspeed_config_weak_ref, None
    try:
        return new_model(folder)
    finally:
        integration._hf_deepspeed_config_weak_ref = kept


def save_pretrained(folder: str, **more: Any) -> str:
    """Writes the model that all runs start from (outside of any deepspeed arguments); returns its place."""
    place = os.path.join(folder, "pretrained")
    if dist.get_rank() == 0:
        new_model(**more).save_pretrained(place)
    dist.barrier()
    return place


def trainer(model: Any, given: Any, kind: Any = None, **more: Any) -> Any:
    from transformers import Trainer

    return (kind or Trainer)(model, given, train_dataset=rows(), eval_dataset=rows(12, seed=2), **more)


def log(finished: Any, *names: str) -> dict[str, list[float]]:
    """What the Trainer logged, by name."""
    names = names or ("loss", "grad_norm")
    return {name: [entry[name] for entry in finished.state.log_history if name in entry] for name in names}


def assert_same_log(found: Any, expected: Any, tolerance: float = 2e-4) -> None:
    """Losses and norms of two runs agree; rates are logged before a step or after it, depending on the schedule."""
    for name, values in log(expected).items():
        mine = log(found)[name]
        assert len(mine) == len(values) > 0, name
        torch.testing.assert_close(
            torch.tensor(mine), torch.tensor(values), rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
        )


def full_weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: value.float() for name, value in engine.iter_full("fp32")}
