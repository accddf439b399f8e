"""The settings of activation checkpointing, one set per process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.logging import warn_once


@dataclass
class Settings:
    """Holds the settings of :func:`configure`.

    Attributes:
        partition_activations: Split saved activations over the model-parallel ranks; nothing if there is one.
        checkpoint_in_cpu: Keep what a block saves, its inputs, in host memory.
        synchronize: Wait for the device before and after each block.
        profile: Log the time of each block's forward and recomputation.
        num_layers: Number of checkpointed blocks, as the program says; for information.
        mpu: The program's model-parallel unit.
        configured: Whether :func:`configure` was called.
    """

    partition_activations: bool = False
    checkpoint_in_cpu: bool = False
    synchronize: bool = False
    profile: bool = False
    num_layers: int | None = None
    mpu: Any = None
    configured: bool = False


settings = Settings()


def configure(
    mpu_: Any,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Sets the options of :func:`~deepspeed.checkpointing.checkpoint`; explicit arguments win over the configuration.

    Args:
        mpu_: The program's model-parallel unit, or None.
        deepspeed_config: A configuration whose ``activation_checkpointing`` section counts: a dict, a path, or a parsed
            one.
        partition_activations: Split saved activations over the model-parallel ranks, which must all run the same
            blocks on equal inputs.
        contiguous_checkpointing: Accepted; saved tensors are not copied into a buffer of their own, so it changes
            nothing.
        num_checkpoints: Number of checkpointed blocks.
        checkpoint_in_cpu: Keep saved activations in host memory.
        synchronize: Wait for the device before and after each block.
        profile: Log the time of each block.
    """
    global settings
    section = _section(deepspeed_config)

    def chosen(explicit: Any, key: str, default: Any) -> Any:
        return explicit if explicit is not None else getattr(section, key, default)

    if chosen(contiguous_checkpointing, "contiguous_memory_optimization", False):
        warn_once(
            "contiguous_memory_optimization",
            "activation checkpointing: contiguous_memory_optimization changes nothing, because saved activations are "
            "kept where they are instead of being copied into a buffer",
        )
    settings = Settings(
        partition_activations=bool(chosen(partition_activations, "partition_activations", False)),
        checkpoint_in_cpu=bool(chosen(checkpoint_in_cpu, "cpu_checkpointing", False)),
        synchronize=bool(chosen(synchronize, "synchronize_checkpoint_boundary", False)),
        profile=bool(chosen(profile, "profile", False)),
        num_layers=chosen(num_checkpoints, "number_checkpoints", None),
        mpu=mpu_,
        configured=True,
    )


def partition_group(options: Settings) -> Any:
    """The process group over which saved activations are divided; None where they stay whole."""
    if not options.partition_activations or options.mpu is None or options.mpu.get_model_parallel_world_size() == 1:
        return None
    return options.mpu.get_model_parallel_group()


def _section(config: Any) -> Any:
    if config is None:
        return None
    from deepspeed.config.parsing import parse_section

    return parse_section(config, "activation_checkpointing")
