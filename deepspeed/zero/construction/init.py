"""``zero.Init``: shards parameters as soon as their module is built, so that no rank ever holds the whole model.

Inside the context tensor constructors and initializers are replaced: floating tensors from ``torch.empty`` and similar
functions get the dtype of the configuration, and tensors without a device the accelerator's. A dtype that a model of
transformers names for a buffer is kept while the library builds it. The wrapper is looked up,
once per constructor when the context is entered, in the module where the ecosystem replaces it (transformers does, so
that ``torch.arange`` keeps its dtype).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

import torch
import torch.utils._device
from torch import nn

from deepspeed import comm
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import zero_group
from deepspeed.config import ParsedConfig, parse
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.models.construction import is_building, is_building_from_config, recorded_initializer
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.access.views import DeepSpeedTensorOverride
from deepspeed.zero.address import ShardedParameter
from deepspeed.zero.construction import modules as construction
from deepspeed.zero.construction.model_files import serve_passes
from deepspeed.zero.construction.modules import Construction, Patch
from deepspeed.zero.construction.sharing import ProvisionalGroups
from deepspeed.zero.untouched import is_untouched, untouched

_EVERYTHING = frozenset(DeepSpeedTensorOverride)


class Init:
    """A context in which every module that is built keeps only this rank's share of its parameters.

    ::

        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        engine, *_ = deepspeed.initialize(model=model, config=config)

    Every rank of the group must build the same modules; rank 0's values count. A module's parameters are sharded when
    its ``__init__`` returns, so never more than one module is whole. Tensors made inside get the accelerator's device
    and, if floating, the configuration's dtype. May be nested; the innermost enabled context counts.

    Args:
        module: A module that exists already: its parameters are sharded at once, without a context.
        data_parallel_group: Process group that shares the parameters; None: all processes.
        mem_efficient_linear: Accepted; has no effect.
        remote_device: ``cpu`` keeps the shards in host memory until ``initialize``; None: where the configuration's
            ``offload_param`` places them, as a rule on the device.
        pin_memory: Accepted; shards wait in ordinary host memory.
        config_dict_or_path: The configuration; only the ZeRO, offload, precision and dtype sections are read.
        config: Old name of ``config_dict_or_path``.
        enabled: False: do nothing.
        dtype: The dtype of floating parameters; None: bf16 or fp16 as configured, else fp32; without a configuration
            each keeps its own.
        mpu: Model-parallel unit whose data-parallel group (with its sequence-parallel ranks) shares the parameters.
        zero_param_parallel_group: Not supported; ``zero_hpz_partition_size`` in the configuration makes the groups.
        zero_quantized_weights: Accepted; has no effect. The configuration of ``initialize`` determines how weights
            are sent.
        zero_quantized_nontrainable_weights: As ``zero_quantized_weights``.
        sequence_data_parallel_group: Used as ``data_parallel_group`` where that is None.
        param_swapper: Not supported; parameters are offloaded by the configuration.
        tensor_overrides: What tensor constructors override: dtype, device or both.

    Raises:
        DeepSpeedConfigError: The configuration or an argument cannot be used.
        NotYetSupportedError: An argument requests something that this release does not have.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
        tensor_overrides: Iterable[DeepSpeedTensorOverride] = _EVERYTHING,
    ) -> None:
        self._construction: Construction | None = None
        self.enabled = enabled
        if not enabled:
            return
        _refuse(
            zero_param_parallel_group=zero_param_parallel_group,
            param_swapper=param_swapper,
        )
        if zero_quantized_weights or zero_quantized_nontrainable_weights:
            log_dist(
                "zero.Init: how weights are sent is decided by zero_optimization.zero_quantized_weights and "
                "zero_quantized_nontrainable_weights in the configuration given to initialize"
            )
        if config_dict_or_path is not None and config is not None and config_dict_or_path is not config:
            raise DeepSpeedConfigError(
                "zero.Init: config_dict_or_path and config are both given; config is its old name, keep one"
            )
        given = config_dict_or_path if config_dict_or_path is not None else config
        parsed = None if given is None else parse(given, purpose="zero_init")
        _check_dtype(dtype)
        if not comm.is_initialized():
            comm.init_distributed()
        group = data_parallel_group if data_parallel_group is not None else sequence_data_parallel_group
        if group is None and mpu is not None:
            group = zero_group(mpu)
        self._device = local_device()
        self._overrides = frozenset(tensor_overrides)
        self.dtype = dtype if dtype is not None else _configured_dtype(parsed)
        job, timeout = Job.adopt(), comm.default_timeout()
        peers = job.axis_of(group).transport("outside engines", device=self._device, timeout=timeout)
        self._construction = Construction(
            ProvisionalGroups(job, peers, self._device, timeout),
            self._device,
            self.dtype,
            _shard_device(remote_device, parsed, self._device),
        )
        if module is not None:
            for part in module.modules():
                self._construction.shard(part)

    def __enter__(self) -> Init:
        if self._construction is not None:
            serve_passes()
            self._construction.patches = [
                *constructor_patches(self.dtype, self._device, self._overrides),
                *initializer_patches(),
            ]
            construction.enter(self._construction)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._construction is None:
            return
        try:
            if error is None:
                self._construction.end()
            else:
                self._construction.drop()
        finally:
            construction.leave(self._construction)


class MiCS_Init(Init):  # noqa: N801 - the public name
    """``Init`` under the name of MiCS.

    The parameters are sharded over all ranks, which takes less memory, until ``initialize`` moves them into the
    groups that ``mics_shard_size`` requests. ``Init`` does the same.
    """


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise NotYetSupportedError(f"zero.Init({name}=...): this release does not have it; leave {name} out")


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise DeepSpeedConfigError(f"zero.Init(dtype={dtype}): expected a floating dtype such as torch.bfloat16")


def _configured_dtype(parsed: ParsedConfig | None) -> torch.dtype | None:
    if parsed is None:
        return None
    root = parsed.root
    return torch.bfloat16 if root.bf16.enabled else torch.float16 if root.fp16.enabled else torch.float32


def _shard_device(remote_device: str | None, parsed: ParsedConfig | None, device: torch.device) -> torch.device:
    """Returns where the shards wait for ``initialize``."""
    offload = None if parsed is None else parsed.root.zero_optimization.offload_param
    configured = "none" if offload is None else offload.device
    wanted = remote_device if remote_device is not None else configured
    if wanted in ("none", None):
        return device
    if wanted == "nvme":
        log_dist("zero.Init: parameter shards wait in host memory until initialize moves them to files")
    elif torch.device(wanted).type not in ("cpu", device.type):
        raise DeepSpeedConfigError(f"zero.Init(remote_device={remote_device!r}): expected 'cpu', 'nvme' or None")
    return torch.device("cpu") if wanted == "nvme" else torch.device(wanted)


_orig_torch_arange = torch.arange
"""The object that the wrapper gets for ``torch.arange``; replacements of the wrapper recognize it by identity."""

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
    """

    @functools.wraps(fn)
    def construct(*args: Any, **kwargs: Any) -> torch.Tensor:
        if is_untouched():
            return fn(*args, **kwargs)
        if target_device is not None and kwargs.get("device") is None and kwargs.get("out") is None:
            if not _builds_on_meta():  # an inner context builds on the meta device
                kwargs["device"] = target_device
        made = fn(*args, **kwargs)
        if target_fp_dtype is None or not made.is_floating_point() or made.dtype == target_fp_dtype:
            return made
        is_explicit = kwargs.get("dtype") is not None or fn is _orig_torch_arange
        if is_explicit and is_building():  # kept as requested; parameters get the dtype when they are sharded
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
    """Returns the patches that one ``zero.Init`` context applies to torch's constructors, as these are now."""
    dtype = dtype if DeepSpeedTensorOverride.dtype in overrides else None
    device = device if DeepSpeedTensorOverride.device in overrides else None
    if dtype is None and device is None:
        return []
    # `with torch.device(...)` stores the constructors at its first use, so use it before they are replaced.
    torch.utils._device._device_constructors()
    upstream = sys.modules.get(_UPSTREAM)  # if it is not imported, nothing in it can have been replaced
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
    """Returns ``torch.Tensor(...)``."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        made: Any = _NEW(cls, *args, **kwargs)
        if cls is not torch.Tensor or is_untouched():
            return made
        if dtype is not None and made.is_floating_point():
            made = made.to(dtype)
        return made if device is None or "device" in kwargs else made.to(device)

    return new


def initializer_patches() -> list[Patch]:
    """Returns patches that gather sharded tensors for initializers that read the shape before any value."""
    found = []
    for place in (torch.nn.init, torch.nn.modules.activation, torch.nn.modules.transformer):
        for name in _INITIALIZERS:
            if hasattr(place, name):
                found.append(Patch(place, name, _gathering(getattr(place, name), recorded_initializer(name))))
    return found


_INITIALIZERS = (
    "xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "orthogonal_", "eye_", "dirac_",
    "sparse_", "trunc_normal_", "uniform_", "normal_", "constant_", "ones_", "zeros_",
)  # fmt: skip


def _gathering(fn: Callable[..., Any], recorded: Callable[..., Any] | None) -> Callable[..., Any]:
    """Gathers for ``fn``, or for the function that ``fn`` replaces temporarily."""

    @functools.wraps(fn)
    def initialize(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        run = recorded if recorded is not None and is_building_from_config() else fn
        if not isinstance(tensor, ShardedParameter):
            return run(tensor, *args, **kwargs)
        with GatheredParameters(tensor, modifier_rank=0):
            run(tensor, *args, **kwargs)
        return tensor

    return initialize
