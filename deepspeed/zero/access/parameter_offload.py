"""The object that manages sharded parameters: ``engine.optimizer`` at stage 3 without an optimizer.

Programs that generate with a gathered model use it: they remove the hooks, generate, and install them again.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed import comm
from deepspeed.comm.base.device import local_device
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.mpu import zero_group
from deepspeed.comm.job.new_groups import Lease
from deepspeed.config import parse
from deepspeed.errors import CallOrderError, NotYetSupportedError
from deepspeed.zero.access.gathered import GatheredParameters
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.group import BucketGroup, Groups
from deepspeed.zero.model_states import RuntimeOptions
from deepspeed.zero.placement import Placement
from deepspeed.zero.runtime import ZeroRuntime, build_runtime
from deepspeed.zero.storage import Memory
from deepspeed.zero.tiling.layout import Limits


class ParameterCoordinator:
    """Upstream's interface to the order in which parameters are gathered."""

    def __init__(self, runtime: ZeroRuntime) -> None:
        self._runtime = runtime

    def is_invalid_trace(self) -> bool:
        """Returns whether no order is known, so that the next pass is recorded."""
        return not self._runtime.schedule.has_orders

    def _invalidate_trace(self) -> None:
        """Records the order again; every rank must call it."""
        self._runtime.schedule.forget_orders()


class DeepSpeedZeRoOffload:  # noqa: N801 - the public name
    """Sharded parameters of one model: gathered for each forward, freed after it.

    An engine at stage 3 has one, as ``engine.optimizer`` if it has no optimizer, else as
    ``engine.optimizer.parameter_offload``. Constructed directly it shards a model that has no engine; the model can
    then run, but not train. Every rank must construct it.

    Args:
        module: The model.
        timers: Accepted; has no effect.
        ds_config: The configuration; its ZeRO section is read where an argument is left out. May be None.
        zenflow: Not supported.
        overlap_comm: Accepted; gathers always overlap with computing.
        prefetch_bucket_size: Elements that may be in flight ahead of their use.
        max_reuse_distance: Elements until its next use within which a parameter stays gathered.
        max_live_parameters: Gathered elements at once.
        param_persistence_threshold: Units up to this many elements stay gathered.
        model_persistence_threshold: Elements that may stay gathered in all.
        dp_process_group: Process group that shares the parameters; None: all processes.
        offload_param_config: Not supported here; the configuration given to ``initialize`` decides.
        mpu: Model-parallel unit whose data-parallel group (with its sequence-parallel ranks) shares the parameters.
        **others: Further arguments of upstream are not supported.

    Attributes:
        module: The model.

    Raises:
        NotYetSupportedError: An argument is given that is not supported.
    """

    _lease: Lease | None = None  # None for an engine's model: the engine has it

    def __init__(
        self,
        module: nn.Module,
        timers: Any = None,
        ds_config: Any = None,
        zenflow: bool = False,
        overlap_comm: bool = True,
        prefetch_bucket_size: int = 50_000_000,
        max_reuse_distance: int = 1_000_000_000,
        max_live_parameters: int = 1_000_000_000,
        param_persistence_threshold: int = 100_000,
        model_persistence_threshold: int = sys.maxsize,
        dp_process_group: Any = None,
        offload_param_config: Any = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        section = offload_param_config
        device = section.get("device") if isinstance(section, dict) else getattr(section, "device", None)
        refused = {"zenflow": zenflow, "offload_param_config": device not in (None, "none"), **others}
        for name, value in refused.items():
            if value:
                raise NotYetSupportedError(f"DeepSpeedZeRoOffload({name}=...): not supported; leave {name} out")
        if isinstance(ds_config, (dict, str)):
            parse(ds_config, purpose="zero_init")
        if not comm.is_initialized():
            comm.init_distributed()
        group = zero_group(mpu) if dp_process_group is None and mpu is not None else dp_process_group
        device = local_device()
        job, timeout = Job.adopt(), comm.default_timeout()
        axis = job.axis_of(group)
        with job.process_groups.leased() as lease:
            gather, reduce = (axis.transport(device=device, timeout=timeout) for _ in range(2))
        limits = Limits(persistence=param_persistence_threshold, model_persistence=model_persistence_threshold)
        gathers = GatherLimits(
            prefetch=prefetch_bucket_size, max_live=max_live_parameters, max_reuse_distance=max_reuse_distance
        )
        placement = Placement.of_stage(3)
        memory = Memory(device)
        options = RuntimeOptions(
            placement=placement,
            layout=limits,
            gathers=gathers,
            reduction=None,
            granularity=prefetch_bucket_size,
            compute_dtype=lambda name, parameter: parameter.dtype,
            whole_tensors=False,
            device=device,
            param_memories={memory.tier: memory},
            master_memories={memory.tier: memory},
            destination=lambda tier, memory_tracker: GradientDestination(tier),
        )
        self._adopt(build_runtime(module, options, Groups.of(BucketGroup.over(gather, reduce), lease=lease), None))
        self._lease = lease

    def _adopt(self, runtime: ZeroRuntime) -> None:
        self._runtime = runtime
        self.module = runtime.model
        self.param_coordinator = ParameterCoordinator(runtime)
        self.backward_hooks: list[RemovableHandle] = []  # always empty: backward uses hooks on tensors

    @classmethod
    def of(cls, runtime: ZeroRuntime) -> DeepSpeedZeRoOffload:
        """Returns the object for a model that an engine has sharded."""
        made = cls.__new__(cls)
        made._adopt(runtime)
        return made

    @property
    def forward_hooks(self) -> list[RemovableHandle]:
        """The hooks on the model; may be removed one by one, and assigned ``[]`` afterwards."""
        return self._runtime.hooks.handles

    @forward_hooks.setter
    def forward_hooks(self, handles: list[RemovableHandle]) -> None:
        self._runtime.hooks.handles = handles

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Installs the hooks on the model again.

        Raises:
            CallOrderError: ``module`` is another one.
        """
        if module is not self.module:
            raise CallOrderError("_register_deepspeed_module: this object drives another module; pass its own .module")
        self._runtime.hooks.install()

    def setup_zero_stage3_hooks(self) -> None:
        """Installs the hooks on the model if they are missing."""
        self._runtime.hooks.install()

    def get_param_coordinator(self, training: bool = True) -> ParameterCoordinator:
        """Returns the order of gathers."""
        return self.param_coordinator

    def partition_all_parameters(self) -> None:
        """Frees every gathered parameter that is not in use."""
        self._runtime.free_gathered()

    empty_partition_cache = partition_all_parameters

    def destroy(self) -> None:
        """Removes the hooks from the model and closes the communicators that were made for this object."""
        self._runtime.destroy()
        if self._lease is not None:
            self._lease.give_back()


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[nn.Module]:
    """Gathers the whole model of an engine and removes its hooks inside the context, so that forwards gather nothing.

    Yields:
        The wrapped model. If its parameters are not sharded, nothing is done.
    """
    inner = getattr(model, "module", model)
    optimizer = getattr(model, "optimizer", None)
    offload = getattr(optimizer, "parameter_offload", None) or optimizer
    with GatheredParameters(list(inner.parameters())):
        if not isinstance(offload, DeepSpeedZeRoOffload):
            yield inner
            return
        for handle in offload.forward_hooks:
            handle.remove()
        offload.forward_hooks = []
        try:
            yield inner
        finally:
            offload._register_deepspeed_module(inner)
