"""Islands that train independently between outer steps: their ranks, and what the first island does for all.

An island is an engine on its own ranks: it gathers, reduces, skips and clips by itself. What islands exchange every so
many updates is in ``zero.update.outer_step``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from deepspeed import comm
from deepspeed.comm.job.expert_groups import group_name
from deepspeed.comm.job.grid import island_groups
from deepspeed.comm.job.mpu import RankCoordinates
from deepspeed.comm.transports.transport import Transport
from deepspeed.config.sections.communication_compression import Islands
from deepspeed.engine_feature import (
    SEQUENCE_RANKS,
    STAGES,
    TENSOR_RANKS,
    Conflict,
    EngineFeature,
    EngineSetup,
    TrainingGroup,
)
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.address import address_of
from deepspeed.zero.storage import broadcast_values, distinct
from deepspeed.zero.update.driver import UpdateDriver
from deepspeed.zero.update.outer_step import OuterStep, bits_sent


class IslandTraining(TrainingGroup):
    """The islands of a job, seen from one rank; ``number`` is that of its island."""

    is_divided = True

    def __init__(
        self, section: Islands, inside: RankCoordinates, everybody: RankCoordinates, number: int, across: Transport
    ) -> None:
        # samples are distributed to all islands
        data = {name: getattr(everybody, name) for name in ("data_group", "data_size", "data_rank")}
        super().__init__(inside, replace(inside, **data))
        self._number = number
        self._section = section
        self._across = across
        self._outer: OuterStep | None = None

    @override
    def driver_around(self, inner: UpdateDriver) -> OuterStep:
        self._outer = OuterStep(inner, self._section, self._across)
        return self._outer

    @property
    @override
    def has_updates(self) -> bool:  # type: ignore[override]
        return self._outer is not None and self._outer.has_updates

    @torch.no_grad()
    def spread(self, model: nn.Module, device: torch.device) -> None:
        """Gives all islands the parameters and buffers of the first one. Every rank must call it.

        Args:
            device: Where the ranks communicate; values elsewhere are sent through it.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            values = distinct(tensor.detach())
            sent = values.to(device)
            broadcast_values(sent, self._across, label="the model of the first island")
            if sent is not values:
                values.copy_(sent)

    @override
    def by_one(self, what: str, action: Callable[[], Any]) -> Any:
        """Makes the outer step, then lets the first island write what is the same on all. Every rank must call it.

        Raises:
            CheckpointError: On the ranks of the other islands: ``action`` failed on the first one.
        """
        assert self._outer is not None
        self._outer.step()
        result, failure = None, None
        if self._number == 0:
            try:
                result = action()
            except Exception as error:  # the other islands wait below
                failure = error
        flags = torch.tensor([int(failure is not None)])
        rows = self._across.gather_small(flags, channel="call", label=f"{what} by the first island")
        if failure is not None:
            raise failure
        if bool(rows.any()):
            raise CheckpointError(f"{what}: the first island, which writes for all, failed; see the message there")
        return result


def settle_islands(setup: EngineSetup) -> IslandTraining | None:
    """Returns the islands that the configuration requests; None for none. Every rank must call it."""
    job, ranks, device = setup.job, setup.ranks, setup.device
    section = setup.root.communication_compression.islands
    if section is None:
        return None
    if section.size == ranks.zero_size:
        log_dist("communication_compression.islands: one island has all ranks, so there is no outer step")
        return None
    island, across = island_groups(job, ranks.zero_size, section.size, device, comm.default_timeout())
    number, place = divmod(ranks.zero_rank, section.size)
    inside = replace(
        ranks,
        zero_group=island,
        data_group=island,
        zero_size=section.size,
        zero_rank=place,
        data_size=section.size,
        data_rank=place,
        islands=ranks.zero_size // section.size,
    )
    outer = job.connector.over(across, device, "islands", is_numbered=True)
    found = IslandTraining(section, inside, ranks, number, outer)
    found.spread(setup.model, device)
    bits = bits_sent(section.wire)
    log_dist(
        f"communication_compression.islands: {ranks.zero_size // section.size} islands of {section.size} rank(s) train "
        f"by themselves; every {section.sync_every} updates they exchange their masters in {bits:g} bits an element, "
        f"{section.sync_every * 32 / bits:.0f} times fewer bytes than an all-reduce of fp32 gradients at every update; "
        f"outer lr {section.outer_lr:g}, momentum {section.outer_momentum:g}"
    )
    return found


_SETTING = "communication_compression.islands"
_WHY = "islands are cut out of ranks that are all data-parallel"


class TrainingOnIslands(EngineFeature):
    """Groups of ranks that train independently and exchange their masters only every ``sync_every`` updates."""

    title = "islands"
    setting = _SETTING
    conflicts = tuple(
        Conflict(
            _SETTING,
            lambda setup: setup.root.communication_compression.islands is not None,
            other,
            _WHY,
            "leave one of the two out",
        )
        for other in (STAGES, TENSOR_RANKS, SEQUENCE_RANKS)
    )

    @override
    def refuse(self, setup: EngineSetup) -> None:
        section = setup.root.communication_compression.islands
        if section is not None:
            _check_ranks(section, setup)

    @override
    def divide(self, setup: EngineSetup) -> IslandTraining | None:
        return settle_islands(setup)


def _check_ranks(section: Islands, setup: EngineSetup) -> None:
    """Refuses islands that do not divide the ranks, or that conflict with the sharding of ZeRO."""
    at, ranks = _SETTING, setup.ranks
    if ranks.zero_size % section.size:
        raise DeepSpeedConfigError(
            f"{at}.size: {section.size} does not divide the number of data-parallel ranks, {ranks.zero_size}; "
            "choose a divisor of it"
        )
    if ranks.zero_group is not None or ranks.model_size > 1:
        raise DeepSpeedConfigError(f"{at} with an mpu: {_WHY}; leave one of the two out")
    if _spreads_experts(setup):
        raise DeepSpeedConfigError(f"{at} with experts that are spread over ranks: {_WHY}; leave one of the two out")
    zero = setup.root.zero_optimization
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        neighbors = getattr(zero, name)
        if zero.stage == 3 and neighbors > 1 and section.size % neighbors:
            raise DeepSpeedConfigError(
                f"{at}.size: {section.size} ranks are not a multiple of zero_optimization.{name}, {neighbors}; the "
                "neighbors that share parameters must be on one island"
            )
    if zero.stage == 3 and zero.mics_hierarchical_params_gather and zero.mics_shard_size > 1:
        raise DeepSpeedConfigError(
            f"{at}: zero_optimization.mics_hierarchical_params_gather needs groups over all ranks; set it to false"
        )
    offload = zero.offload_optimizer
    if offload is not None and offload.device == "nvme":
        raise DeepSpeedConfigError(
            f'{at}: with zero_optimization.offload_optimizer.device "nvme" masters are in files, which the outer step '
            'does not read; use "cpu"'
        )
    if any(address_of(parameter) is not None for parameter in setup.model.parameters()):
        raise DeepSpeedConfigError(
            f"{at}: the model's parameters are sharded over all ranks already (deepspeed.zero.Init, or an engine that "
            "had it before); build the model without"
        )


def _spreads_experts(setup: EngineSetup) -> bool:
    """Returns whether ranks hold different experts, or other parameters in groups of their own."""
    section, model = setup.root.expert_parallel, setup.model
    if section is not None and section.enabled and section.autoep_size > 1:
        return True
    declared = setup.job.declared.defined()
    marked = [parameter for parameter in model.parameters() if getattr(parameter, "allreduce", True) is False]
    names = {str(getattr(parameter, "group_name", None)) for parameter in marked}
    sizes = (getattr(module, "ep_size", None) for module in model.modules())
    later = {group_name(size) for size in sizes if isinstance(size, int) and size > 1}  # initialize declares them
    return bool(names & later) or any(len(declared[name].ranks) > 1 for name in names & declared.keys())


FEATURE = TrainingOnIslands()
