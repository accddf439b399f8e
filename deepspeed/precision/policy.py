"""Chooses the dtype of each tensor of a training run from the configuration, and checks that the device has it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.base import DeepSpeedAccelerator
from deepspeed.config.sections.root import Root
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once, warn_once
from deepspeed.models.layers import lies_in, modules_in_fp32
from deepspeed.nested import map_tensors
from deepspeed.precision.loss_scaler import CreateLossScaler

_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def dtype_of_name(name: str) -> torch.dtype:
    """Returns the torch dtype of a configuration's dtype name."""
    return _DTYPES[name]


@dataclass(frozen=True)
class PrecisionPolicy:
    """The dtypes of one engine."""

    # dtype of floating parameters in forward and backward; None keeps the model's own
    compute_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None  # dtype of floating buffers; None: as the model has them, see :meth:`cast_buffers`
    accumulate_dtype: torch.dtype  # dtype of the sum over micro-batches
    communication_dtype: torch.dtype | None  # dtype in which gradients are sent; None: the gradient's own
    autocast_dtype: torch.dtype | None  # dtype of ``torch.autocast`` around forward; None: no autocast
    cast_inputs: bool  # cast floating inputs of forward to the compute dtype (``auto_cast``)
    skip_non_finite: bool  # skip an update whose gradient is not finite
    # parts of the names of modules whose parameters stay fp32, such as "norm" or "mlp.gate"
    fp32_modules: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """``fp16`` or ``bf16``; ``fp32`` if the model keeps its own dtype."""
        return {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(self.compute_dtype, "fp32")  # type: ignore[arg-type]

    @classmethod
    def from_config(cls, root: Root, accelerator: DeepSpeedAccelerator, model: nn.Module) -> PrecisionPolicy:
        """Reads the sections ``fp16``, ``bf16``, ``torch_autocast`` and ``data_types``."""
        compute = torch.float16 if root.fp16.enabled else torch.bfloat16 if root.bf16.enabled else None
        autocast = None
        if root.torch_autocast.enabled:
            named = root.torch_autocast.dtype
            autocast = dtype_of_name(named) if named else accelerator.autocast_dtype
        types = root.data_types
        keep = types.keep_in_fp32_modules
        if keep == "auto":
            keep = modules_in_fp32(model)
        return cls(
            compute_dtype=compute,
            buffer_dtype=dtype_of_name(types.buffer_dtype) if types.buffer_dtype else None,
            accumulate_dtype=dtype_of_name(types.grad_accum_dtype)
            if types.grad_accum_dtype
            else compute
            if has_narrow_masters(root) and compute is not None
            else torch.float32,
            communication_dtype=(dtype_of_name(root.communication_data_type) if root.communication_data_type else None),
            autocast_dtype=autocast,
            cast_inputs=(root.fp16.enabled and root.fp16.auto_cast) or (root.bf16.enabled and root.bf16.auto_cast),
            skip_non_finite=root.bf16.check_grad_overflow,
            fp32_modules=tuple(keep or ()),
        )

    def dtype_for(self, name: str, tensor: torch.Tensor) -> torch.dtype:
        """Returns the compute dtype of the parameter ``name``, a tensor of any shape."""
        if self.compute_dtype is None or not tensor.is_floating_point():
            return tensor.dtype
        return torch.float32 if lies_in(name, self.fp32_modules) else self.compute_dtype

    def _buffer_dtype(self, name: str, buffer: torch.Tensor, *, beside_weights: bool) -> torch.dtype:
        """Returns a floating buffer's dtype (any shape); ``beside_weights``: torch requires the weights'."""
        is_kept = lies_in(name, self.fp32_modules)
        if self.buffer_dtype is not None and not is_kept:
            return self.buffer_dtype
        if beside_weights:
            return self.dtype_for(name, buffer)
        return torch.promote_types(buffer.dtype, torch.float32) if is_kept else buffer.dtype

    def reduce_dtype(self, gradient_dtype: torch.dtype) -> torch.dtype:
        """Returns the dtype in which a gradient of ``gradient_dtype`` is sent."""
        return self.communication_dtype or gradient_dtype

    @property
    def needs_loss_scale(self) -> bool:
        """Whether some gradients are fp16."""
        return torch.float16 in (self.compute_dtype, self.autocast_dtype)

    @property
    def may_skip(self) -> bool:
        """Whether an update may be skipped for a gradient that is not finite."""
        return self.skip_non_finite or self.needs_loss_scale

    def cast_buffers(self, model: nn.Module, device: torch.device) -> None:
        """Moves the buffers to ``device`` and casts floating ones. Logs once which are cast and which stay wide.

        A buffer keeps its dtype unless the configuration names another, or torch requires that of the weights. Modules
        with ``keeps_buffer_dtype`` keep theirs in any case.
        """
        beside_weights = buffers_beside_weights(model)
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the former ones, so that no id is used again
        changes: dict[str, list[str]] = {}
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                name, dtype = f"{prefix}.{key}" if prefix else key, buffer.dtype
                if buffer.is_floating_point() and not getattr(module, "keeps_buffer_dtype", False):
                    dtype = self._buffer_dtype(name, buffer, beside_weights=name in beside_weights)
                    if dtype != buffer.dtype:
                        changes.setdefault(f"buffers cast from {buffer.dtype} to {dtype}", []).append(name)
                    elif self.compute_dtype is not None and dtype.itemsize > self.compute_dtype.itemsize:
                        keep = f"buffers that keep {dtype} (to cast them, set data_types.buffer_dtype: {self.name})"
                        changes.setdefault(keep, []).append(name)
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer, buffer.to(device=device, dtype=dtype)
                module._buffers[key] = moved[id(buffer)][1]
        for change, names in changes.items():
            log_dist_once(f"{change}: {_listed(names)}".replace("torch.", ""))

    def forward_context(self, accelerator: DeepSpeedAccelerator) -> AbstractContextManager[Any]:
        """Returns the context that forward runs in."""
        if self.autocast_dtype is None:
            return nullcontext()
        return accelerator.autocast(self.autocast_dtype)

    def cast_arguments(self, value: Any) -> Any:
        """Casts floating tensors in nested arguments to the compute dtype, where the configuration requests it."""
        if not self.cast_inputs:
            return value
        dtype = self.compute_dtype
        return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


_WITH_WEIGHTS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, ParametrizationList)


def buffers_beside_weights(model: nn.Module) -> set[str]:
    """Returns the names of buffers that torch combines with weights, which must have the same dtype.

    These are the statistics of a batch norm with weights, the masks of ``torch.nn.utils.prune``, and what
    ``spectral_norm`` and parametrizations compute a weight from. Beside a weight that hooks compute, torch keeps the
    original with the ending _orig, and buffers with the endings _mask, _u and _v.
    """
    found = set()
    for prefix, module in model.named_modules():
        weights = [name for name, _ in module.named_parameters(recurse=False)]
        takes_all = isinstance(module, _WITH_WEIGHTS) and bool(weights)
        starts = tuple(name.removesuffix("orig") for name in weights if name.rpartition("_")[2] == "orig")
        for name, _ in module.named_buffers(recurse=takes_all):
            if takes_all or name.startswith(starts):
                found.add(f"{prefix}.{name}" if prefix else name)
    return found


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def has_narrow_masters(root: Root) -> bool:
    """Returns whether the configuration requests 16-bit master weights and gradients."""
    return (root.bf16.enabled and root.bf16.bf16_master_weights_and_grads) or (
        root.fp16.enabled and root.fp16.fp16_master_weights_and_grads
    )


def create_loss_scaler(root: Root, policy: PrecisionPolicy) -> Any:
    """Returns the loss scaler of the ``fp16`` section, or None if nothing is scaled."""
    if not policy.needs_loss_scale:
        return None
    fp16 = root.fp16
    return CreateLossScaler(
        torch.float16,
        fp16.loss_scale,
        fp16.loss_scale == 0,
        {
            "init_scale": 2.0**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "min_scale": fp16.min_loss_scale,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
        },
    )


def check_device(precision: PrecisionPolicy) -> None:
    """Checks that the accelerator has the configured dtypes; warns of those that it emulates.

    Raises:
        DeepSpeedConfigError: The accelerator does not support a configured dtype.
    """
    accelerator = get_accelerator()
    for dtype, name, supported in (
        (torch.float16, "fp16", accelerator.is_fp16_supported),
        (torch.bfloat16, "bf16", accelerator.is_bf16_supported),
    ):
        for configured, key in (
            (precision.compute_dtype, f"{name}.enabled"),
            (precision.autocast_dtype, "torch_autocast.enabled"),
        ):
            if configured is dtype and not supported():
                raise DeepSpeedConfigError(
                    f"{key}: the device {accelerator.device_name()} does not support {dtype}; set {key} to false"
                )
    _warn_of_emulation(precision)


def _warn_of_emulation(precision: PrecisionPolicy) -> None:
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
