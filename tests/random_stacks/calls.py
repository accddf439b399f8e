"""Calls of the engine in any order: each stage returns what stage 0 returns."""

from random import Random
from typing import Any

from tests.random_stacks.call_run import ACTIONS, Log, run_calls
from tests.random_stacks.menu import draw_config, tolerance_of
from tests.random_stacks.stack import Config, End, Stack, run_on_ranks

_ZERO: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("reduce_bucket_size", 0.5, (30, 300)),
    ("overlap_comm", 0.3, (True, False)),
    (
        "offload_optimizer",
        0.35,
        (
            {"device": "cpu"},
            {"device": "cpu", "super_offload": True},
            {"device": "nvme", "nvme_path": "FOLDER/nvme"},
        ),
    ),
)
_STAGE3: tuple[tuple[str, float, tuple[Any, ...]], ...] = (
    ("stage3_param_persistence_threshold", 1.0, (0, 0, 50, 10**5)),
    ("stage3_prefetch_bucket_size", 0.5, (0, 100)),
    ("stage3_max_reuse_distance", 0.3, (0, 300)),
    ("offload_param", 0.3, ({"device": "cpu"}, {"device": "nvme", "nvme_path": "FOLDER/nvme"})),
)
_PRECISIONS: tuple[Config, ...] = (
    {},
    {},
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 3}},
    {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
)
_OPTIMIZERS: dict[str, Config] = {
    "AdamW": {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}
_FEATURES = (
    "activation_checkpointing", "checkpoint", "communication_data_type", "compression_training", "curriculum_learning",
    "data_types", "flops_profiler", "gradient_predivide_factor", "prescale_gradients", "wall_clock_breakdown",
)  # fmt: skip
_WARMUP: Config = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 3},
}


def draw(seed: int) -> Stack:
    """Returns the calls of a seed: names, a number between 0 and 1 each, and one that chooses parameters."""
    dice = Random(seed)
    world = dice.choice((1, 2, 2, 3, 4))
    zero: Config = {"stage": dice.choice((1, 2, 3, 3, 3))}
    for key, probability, values in (*_ZERO, *(_STAGE3 if zero["stage"] == 3 else ())):
        if dice.random() < probability:
            zero[key] = dice.choice(values)
    if zero["stage"] == 3 and world == 4 and "offload_param" not in zero and dice.random() < 0.5:
        zero[dice.choice(("zero_hpz_partition_size", "mics_shard_size"))] = 2
    config: Config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": dice.choice((1, 2, 3)),
        "gradient_clipping": dice.choice((0.0, 0.3)),
        "steps_per_print": 1_000_000,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
        **dice.choice(_PRECISIONS),
    }
    optimizer = dice.choice(("AdamW", "AdamW", "SGD", "client AdamW"))
    if optimizer in _OPTIMIZERS:
        config["optimizer"] = {"type": optimizer, "params": _OPTIMIZERS[optimizer]}
    if dice.random() < 0.3:
        config["scheduler"] = _WARMUP
    if dice.random() < 0.5:
        more, _ = draw_config(dice)
        config |= {key: more[key] for key in _FEATURES if key in more}
    names = [*["train"] * 14, *ACTIONS]
    calls = [[dice.choice(names), dice.random(), dice.randrange(1000)] for _ in range(dice.randint(8, 22))]
    model = {name: True for name in ("tied", "frozen", "unused") if dice.random() < 0.35}
    return Stack(
        "calls", seed, world, config, optimizer, {"model": model, "groups": dice.random() < 0.4, "calls": calls}
    )


def attempt(stack: Stack, folder: str, timeout: float) -> End:
    """Runs the stack of features that a seed draws, and returns its outcome."""
    return run_on_ranks(work, stack, folder, timeout)


def work(stack: Stack, folder: str) -> End:
    """Runs on every rank."""
    config = stack.config_in(folder)
    found = run_calls(stack, config, f"{folder}/found")
    wanted = run_calls(stack, {**config, "zero_optimization": {"stage": 0}}, f"{folder}/wanted")
    is_rough = bool({"bf16", "fp16", "torch_autocast"} & set(config))
    tolerance = max(4e-2 if is_rough else 1e-4, tolerance_of(config))
    for number, (mine, its) in enumerate(zip(found, wanted, strict=False)):
        if not is_close(mine, its, tolerance):
            return "different", f"call {number}:\n  found  {str(mine)[:500]}\n  wanted {str(its)[:500]}"
    if len(found) != len(wanted):
        return "different", f"ends after {len(found)} and {len(wanted)} calls: {_last(found)}, {_last(wanted)}"
    if found[-2][0] == "raised":
        return "refused", str(found[-2][1])
    return "equal", ""


def _last(log: Log) -> str:
    return str(log[-2:])[:500]


def is_close(found: Any, wanted: Any, tolerance: float) -> bool:
    """Returns whether two values of a log are equal but for rounding."""
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(is_close(found[key], wanted[key], tolerance) for key in found)
    if isinstance(found, (list, tuple)):
        if not isinstance(wanted, (list, tuple)) or len(found) != len(wanted):
            return False
        return all(is_close(mine, its, tolerance) for mine, its in zip(found, wanted, strict=True))
    if isinstance(found, float) and isinstance(wanted, float):
        limit = tolerance * (abs(found) + abs(wanted)) + tolerance * 1e-2
        return abs(found - wanted) <= limit or (found != found and wanted != wanted)
    return bool(found == wanted)
