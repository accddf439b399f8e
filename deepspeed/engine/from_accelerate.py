"""Takes the sizes of Accelerate's ``ParallelismConfig``, which Accelerate gives no engine, into the configuration."""

from __future__ import annotations

import sys
from typing import Any

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist


def take_accelerate_sizes(config: Any, *, is_cut: bool) -> None:
    """Writes the sizes of ``Accelerator(parallelism_config=...)`` under this package's keys, in place.

    Accelerate builds a mesh from them, which its data loaders follow, and reads the keys back when it saves. Sequence
    ranks come as an mpu, and the number of data ranks follows from the other sizes.

    Args:
        config: What ``initialize`` got. Nothing happens if it is not the one that Accelerate keeps.

    Raises:
        DeepSpeedConfigError: The sizes contradict the configuration, or cannot be used together.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None or not isinstance(config, dict) or not accelerate.is_initialized():
        return
    state = accelerate.AcceleratorState()
    sizes = getattr(state, "parallelism_config", None)
    kept: Any = getattr(getattr(state, "deepspeed_plugin", None), "deepspeed_config", None)
    if sizes is None or kept is not config:
        return
    if sizes.tp_size > 1 and not is_cut:
        _take_tensor_size(config, sizes.tp_size, sizes.sp_size)
    if sizes.dp_replicate_size > 1 and sizes.dp_shard_size > 1:
        _take_shard_size(config, sizes.dp_replicate_size, sizes.dp_shard_size)


def _take_tensor_size(config: dict[str, Any], size: int, sequence: int) -> None:
    if sequence > 1:
        raise DeepSpeedConfigError(
            f"ParallelismConfig(tp_size={size}, sp_size={sequence}): expected one of the two above 1, since Accelerate "
            "gives ranks that share layers different batches beside sequence ranks. Set one of them to 1, or call "
            "deepspeed.initialize with tensor_parallel.autotp_size and sequence_parallel_size in a loop of your own"
        )
    section = config.get("tensor_parallel") or {}
    given = section.get("autotp_size") or size
    if given != size:
        raise DeepSpeedConfigError(
            f"ParallelismConfig(tp_size={size}): tensor_parallel.autotp_size is {given}. Give the same number, or "
            "leave the key out"
        )
    if "autotp_size" not in section:
        log_dist(f"ParallelismConfig(tp_size={size}) sets tensor_parallel.autotp_size to {size}")
    config["tensor_parallel"] = {**section, "autotp_size": size}


def _take_shard_size(config: dict[str, Any], replicas: int, size: int) -> None:
    """Takes the ranks of one replica: at stage 3 they alone share the model states (MiCS)."""
    both = f"ParallelismConfig(dp_replicate_size={replicas}, dp_shard_size={size})"
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") != 3:
        log_dist(f"{both}: below ZeRO stage 3, states are sharded over all {replicas * size} data-parallel ranks")
    elif zero.get("mics_shard_size", -1) < 1 and zero.get("zero_hpz_partition_size", 1) <= 1:
        log_dist(f"{both} sets zero_optimization.mics_shard_size to {size}")
        zero["mics_shard_size"] = size
