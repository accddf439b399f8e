"""What cannot be trained as asked, said before anything is changed."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import warn_once
from deepspeed.ops.flat import supports_flat_update, why_not_flat
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.zero.placement import Home, Placement


def refuse_what_is_no_model(model: object) -> None:
    """Modules whose parameters have shapes are wanted."""
    if not isinstance(model, nn.Module):
        raise DeepSpeedConfigError(f"initialize(model=...): expected a torch.nn.Module, found {type(model).__name__}")
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise DeepSpeedConfigError(
            f"initialize(model=...): {', '.join(repr(name) for name in lazy[:5])} have no shape yet, as their modules "
            "are lazy; run one batch through the model before initialize"
        )


def refuse_what_the_device_cannot(precision: PrecisionPolicy) -> None:
    """Dtypes that the accelerator does not have."""
    accelerator = get_accelerator()
    for dtype, key, supported in (
        (torch.float16, "fp16.enabled", accelerator.is_fp16_supported),
        (torch.bfloat16, "bf16.enabled", accelerator.is_bf16_supported),
    ):
        if precision.compute_dtype is dtype and not supported():
            raise DeepSpeedConfigError(
                f"{key}: the device {accelerator.device_name()} does not support {dtype}; set {key} to false"
            )


def warn_of_emulation(precision: PrecisionPolicy) -> None:
    """Warns once where the accelerator computes the configured dtype without instructions for it."""
    accelerator = get_accelerator()
    dtype = precision.autocast_dtype or precision.compute_dtype
    if dtype is None or not accelerator.emulates(dtype):
        return
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    key = f"{name}.enabled" if precision.autocast_dtype is None else f"torch_autocast.dtype {name}"
    other = torch.bfloat16 if dtype is torch.float16 else torch.float16
    usable = "fp32" if accelerator.emulates(other) else f"{'bf16' if other is torch.bfloat16 else 'fp16'} or fp32"
    warn_once(
        f"emulated {name}",
        f"{key}: expected a device with {name} instructions, found {accelerator.device_name()}, which emulates "
        f"{name}: the result is right, but a step takes many times as long as in fp32. Use {usable} here",
    )


def refuse_state_before_cutting(optimizer: object, size: int, key: str) -> None:
    """Raises for an optimizer that has states of whole parameters, which are about to be cut.

    Args:
        optimizer: What the caller gave.
        size: Ranks that will share a parameter.
        key: What the configuration calls ``size``.

    Raises:
        DeepSpeedConfigError: It has states of parameters.
    """
    states = getattr(optimizer, "state", None) or {}
    if size > 1 and any(isinstance(value, torch.Tensor) for state in states.values() for value in state.values()):
        raise DeepSpeedConfigError(
            f"initialize(optimizer=<{type(optimizer).__name__}>) has states of {len(states)} whole parameters, which "
            f"{key} {size} is about to cut. Name the optimizer in the configuration, give one that has no states yet, "
            f"or train without {key.rpartition('.')[2]}, save a checkpoint, and load it into an engine that is cut"
        )


def refuse_updates_in_files(placement: Placement, optimizer: torch.optim.Optimizer | None) -> None:
    """Masters in files with an optimizer that needs all of a state at once."""
    if placement.master_home is Home.FILE and optimizer is not None and not supports_flat_update(optimizer):
        raise DeepSpeedConfigError(
            f'zero_optimization.offload_optimizer.device "nvme" with the optimizer {type(optimizer).__name__}: files '
            f"pass through memory piece by piece, which its step cannot follow ({why_not_flat(optimizer)}). Use one of "
            'this package, or torch\'s Adam, AdamW, Adagrad or SGD without that, or device "cpu"'
        )


def refuse_shards_of_nothing(placement: Placement, optimizer: torch.optim.Optimizer | None) -> None:
    """Stages that shard what only an optimizer has, without one."""
    if optimizer is None and placement.shard_master and not placement.shard_params:
        raise DeepSpeedConfigError(
            f"zero_optimization.stage {placement.stage} shards optimizer states, but there is no optimizer; give "
            "initialize an optimizer or an `optimizer` section, or use stage 0, or stage 3 to shard the parameters"
        )
