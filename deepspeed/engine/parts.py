"""The arguments of ``initialize``, and the parts that it builds for an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.job.declared_groups import Claim
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.config import ParsedConfig
from deepspeed.engine.arguments import local_rank_of
from deepspeed.engine.features import FeatureSet
from deepspeed.engine.optimizers import exchange_parameters
from deepspeed.engine_feature import EngineSetup, TrainingGroup
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.offload.tiers import OffloadTiers
from deepspeed.precision.policy import PrecisionPolicy
from deepspeed.schedulers import build_scheduler
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.update.driver import UpdateDriver

DeepSpeedOptimizerCallable: TypeAlias = Callable[[Iterable[nn.Parameter] | dict[str, Any]], torch.optim.Optimizer]
DeepSpeedSchedulerCallable: TypeAlias = Callable[[torch.optim.Optimizer], Any]


@dataclass(frozen=True)
class Client:
    """Holds the arguments of the caller of ``initialize``."""

    args: Any
    model: nn.Module
    optimizer: Any
    model_parameters: Any
    training_data: Any
    lr_scheduler: Any
    mpu: Any
    mesh_param: Any
    collate_fn: Any

    def with_parameters(self, exchanged: Iterable[Mapping[int, nn.Parameter]]) -> Client:
        """Returns the same with new parameters in the optimizer and in the groups of parameters.

        Args:
            exchanged: One after the other: new parameters by the ``id`` of those whose places they took.
        """
        optimizer, parameters = self.optimizer, self.model_parameters
        for mapping in exchanged:
            optimizer = exchange_parameters(optimizer, mapping)
            parameters = exchange_parameters(parameters, mapping)
        return replace(self, optimizer=optimizer, model_parameters=parameters)


@dataclass
class EngineParts:
    """Holds everything that an engine is built from."""

    client: Client
    parsed: ParsedConfig
    features: FeatureSet
    setup: EngineSetup
    precision: PrecisionPolicy
    placement: Placement
    tiers: OffloadTiers
    monitor: MonitorMaster
    runtime: ZeroRuntime
    torch_optimizer: torch.optim.Optimizer | None
    driver: UpdateDriver
    groups: Groups
    training_group: TrainingGroup
    claim: Claim
    global_rank: int = field(default_factory=comm.get_rank)
    world_size: int = field(default_factory=comm.get_world_size)

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self.client.model

    @property
    def coordinates(self) -> RankCoordinates:
        """Where this rank stands among those that train together and those that share the samples."""
        return self.training_group.coordinates

    @property
    def device(self) -> torch.device:
        """The device on which this rank computes."""
        return self.setup.device

    @property
    def local_rank(self) -> int:
        """The number of this process on its host."""
        return local_rank_of(self.client.args)

    def make_scheduler(self) -> Any:
        """Returns the schedule: the client's object, what its callable builds, or the configured one."""
        given = self.client.lr_scheduler
        if given is not None:
            is_object = hasattr(given, "step") and not isinstance(given, type)
            return given if is_object or self.torch_optimizer is None else given(self.torch_optimizer)
        section = self.parsed.root.scheduler
        if section is None or section.type is None or self.torch_optimizer is None:
            return None
        return build_scheduler(section.type, dict(section.params), self.torch_optimizer)
