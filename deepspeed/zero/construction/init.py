"""``zero.Init``: parameters are sharded as soon as their module is built, so that the whole never is on one rank."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import zero_group
from deepspeed.comm.start.device import local_device
from deepspeed.config import ParsedConfig, parse
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.zero.access.views import DeepSpeedTensorOverride
from deepspeed.zero.construction import modules as construction
from deepspeed.zero.construction.constructors import constructor_patches, initialiser_patches
from deepspeed.zero.construction.model_files import serve_passes
from deepspeed.zero.construction.modules import Construction
from deepspeed.zero.construction.sharing import ProvisionalGroups

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
            ``offload_param`` says, as a rule on the device.
        pin_memory: Accepted; shards wait in ordinary host memory.
        config_dict_or_path: The configuration; only the ZeRO, offload, precision and dtype sections are read.
        config: Old name of ``config_dict_or_path``.
        enabled: False: do nothing.
        dtype: Of floating parameters; None: bf16 or fp16 as the configuration says, else fp32; without a configuration
            each keeps its own.
        mpu: Model-parallel unit whose data-parallel group (with its sequence-parallel ranks) shares the parameters.
        zero_param_parallel_group: Not supported; ``zero_hpz_partition_size`` in the configuration makes the groups.
        zero_quantized_weights: Accepted; has no effect here, where nothing computes. The configuration of
            ``initialize`` says how weights are sent from then on.
        zero_quantized_nontrainable_weights: As ``zero_quantized_weights``.
        sequence_data_parallel_group: Used as ``data_parallel_group`` where that is None.
        param_swapper: Not supported; parameters are offloaded by the configuration.
        tensor_overrides: What tensor constructors override: dtype, device or both.

    Raises:
        DeepSpeedConfigError: The configuration or an argument cannot be used.
        NotYetSupportedError: An argument asks for something that this release does not have.
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
        given = _one_config(config_dict_or_path, config)
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
        self._construction = Construction(
            ProvisionalGroups(
                Job.current()
                .axis_of(group)
                .transport("outside engines", device=self._device, timeout=comm.default_timeout()),
                self._device,
                comm.default_timeout(),
            ),
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
                *initialiser_patches(),
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

    Until ``initialize`` the parameters are shared by all ranks, which takes less memory; there they move into the
    groups that ``mics_shard_size`` asks for. ``Init`` serves as well.
    """


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise NotYetSupportedError(f"zero.Init({name}=...): this release does not have it; leave {name} out")


def _one_config(config_dict_or_path: Any, config: Any) -> Any:
    if config_dict_or_path is not None and config is not None and config_dict_or_path is not config:
        raise DeepSpeedConfigError(
            "zero.Init: config_dict_or_path and config are both given; config is its old name, keep one"
        )
    return config_dict_or_path if config_dict_or_path is not None else config


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
