"""Tensor constructors and initialisers while ``zero.Init`` is active.

Inside the context floating tensors from ``torch.empty`` and similar functions get the dtype of the configuration, and
tensors without a device the accelerator's. The wrapper is looked up, once per constructor when the context is entered,
in the module where the ecosystem replaces it (transformers does, so that ``torch.arange`` keeps its dtype).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

from deepspeed.models.construction import is_building, is_building_from_config, recorded_initialiser
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.access.views import DeepSpeedTensorOverride
from deepspeed.zero.construction.modules import Patch
from deepspeed.zero.gather.sharded_parameter import ShardedParameter
from deepspeed.zero.untouched import is_untouched, untouched

_orig_torch_arange = torch.arange
"""The object that the wrapper gets for ``torch.arange``; replacements of the wrapper recognise it by identity."""

CONSTRUCTORS = ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")
_UPSTREAM = "deepspeed.runtime.zero.partition_parameters"
_NEW = torch.Tensor.__new__


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor],
    target_fp_dtype: torch.dtype | None = None,
    *,
    target_device: torch.device | str | None = None,
) -> Callable[..., torch.Tensor]:
    """Makes a tensor constructor give floating tensors another dtype and tensors without a device a device.

    Args:
        fn: The constructor, such as ``torch.empty``; the shape of its result stays.
        target_fp_dtype: Dtype of floating results; None leaves them alone.
        target_device: Device where the call names none; None leaves it to torch.
    """

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_untouched():
            return fn(*args, **kwargs)
        if target_device is not None and kwargs.get("device") is None and kwargs.get("out") is None:
            if not _builds_on_meta():  # an inner context asks for no memory at all
                kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is None or not made.is_floating_point() or made.dtype == target_fp_dtype:
            return made
        if fn is _orig_torch_arange and is_building():
            return made
        return _cast(made, target_fp_dtype)

    return construct


def _builds_on_meta() -> bool:
    with untouched():
        return torch.get_default_device().type == "meta"


def _cast(made: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.no_grad():
        return made.to(dtype).requires_grad_(made.requires_grad)


def constructor_patches(
    dtype: torch.dtype | None, device: torch.device | None, overrides: frozenset[DeepSpeedTensorOverride]
) -> list[Patch]:
    """Returns the patches that one ``zero.Init`` context applies to torch's constructors, as these are now.

    Args:
        dtype: Of floating tensors.
        device: Of tensors.
        overrides: Which of the two are overridden.
    """
    dtype = dtype if DeepSpeedTensorOverride.dtype in overrides else None
    device = device if DeepSpeedTensorOverride.device in overrides else None
    if dtype is None and device is None:
        return []
    # `with torch.device(...)` remembers for ever what the constructors are when it is first used: let that be now.
    torch.utils._device._device_constructors()
    upstream = sys.modules.get(_UPSTREAM)  # who has not imported it cannot have replaced anything in it
    found = []
    made: Any
    for name in CONSTRUCTORS:
        wrapper = getattr(upstream, "zero_wrapper_for_fp_tensor_constructor", zero_wrapper_for_fp_tensor_constructor)
        original = _orig_torch_arange if name == "arange" else innermost(getattr(torch, name))
        made = wrapper(original, dtype, target_device=device)
        made.__dict__.setdefault("_ds_original", original)
        found.append(Patch(torch, name, made))
    found.append(Patch(torch.Tensor, "__new__", _legacy_constructor(dtype, device)))
    return found


def innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function under the wrappers of enclosing contexts."""
    while "_ds_original" in getattr(fn, "__dict__", {}):
        fn = fn._ds_original  # type: ignore[attr-defined]
    return fn


def _legacy_constructor(dtype: torch.dtype | None, device: torch.device | None) -> Callable[..., Any]:
    """``torch.Tensor(...)``."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = _NEW(cls, *args, **kwargs)
        if cls is not torch.Tensor or is_untouched():
            return made
        if dtype is not None and made.is_floating_point():
            made = made.to(dtype)
        return made if device is None or "device" in kwargs else made.to(device)

    return new


def initialiser_patches() -> list[Patch]:
    """Initialisers of ``torch.nn.init`` that look at the shape before they touch a value gather a sharded tensor."""
    found = []
    for place in (torch.nn.init, torch.nn.modules.activation, torch.nn.modules.transformer):
        for name in _INITIALISERS:
            if hasattr(place, name):
                found.append(Patch(place, name, _gathering(getattr(place, name), recorded_initialiser(name))))
    return found


_INITIALISERS = (
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "eye_", "dirac_",
    "sparse_", "trunc_normal_", "uniform_", "normal_", "constant_", "ones_", "zeros_",
)  # fmt: skip


def _gathering(fn: Callable[..., Any], recorded: Callable[..., Any] | None) -> Callable[..., Any]:
    """Gathers for ``fn``, or for the function in whose place ``fn`` is while it should work all the same."""

    @functools.wraps(fn)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = recorded if recorded is not None and is_building_from_config() else fn
        if not isinstance(tensor, ShardedParameter):
            return run(tensor, *args, **kwargs)
        with GatheredParameters(tensor, modifier_rank=0):
            run(tensor, *args, **kwargs)
        return tensor

    return initialise
