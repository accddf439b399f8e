"""Seldom synchronised training (DiLoCo, arXiv 2311.08105): islands of ranks train alone and meet every so many updates.

An island is an engine on its own ranks: it gathers, reduces, skips and clips by itself. Ranks with the same place on
their islands hold the same slices of the masters. They agree every H updates: the mean over islands of how far the
masters have moved is the gradient of an outer step of SGD with Nesterov's momentum,

    d = anchor - mean(master);  b <- mu b + d;  anchor <- anchor - lr (d + mu b);  master <- anchor,

whose anchor is where the masters were after the one before. The inner optimizers keep their states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from deepspeed import comm
from deepspeed.comm.codecs.codec import Codec, bits_of
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.table import CODECS
from deepspeed.comm.job.axes import island_groups
from deepspeed.comm.job.mpu import Standing
from deepspeed.comm.transports.connect import transport_over
from deepspeed.comm.transports.transport import Reduction, Transport, transfer_key
from deepspeed.config.sections.communication_compression import Islands
from deepspeed.config.sections.root import Root
from deepspeed.errors import CheckpointError, DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.zero.holder import address_of
from deepspeed.zero.storage import FlatBuffer, Kind, Ledger
from deepspeed.zero.update.masters import MasterBucket
from deepspeed.zero.update.optimizer import DeepSpeedZeroOptimizer


def _codec_of(wire: str) -> Codec | None:
    """Returns the codec that the key ``wire`` names; None where values travel as floating-point numbers."""
    return CODECS[wire].codec(feeds_back=False) if wire in CODECS else None


def _dtype_of(wire: str) -> torch.dtype:
    """Returns the dtype of what travels, or of what the codec gets."""
    return torch.bfloat16 if wire == "bf16" else torch.float32


@dataclass
class _Outer:
    """The outer state of one master.

    Attributes:
        master: Whose.
        anchor: Its values after the last meeting.
        momentum: Of the outer steps.
    """

    master: MasterBucket
    anchor: FlatBuffer
    momentum: FlatBuffer


class Archipelago:
    """The islands of a job, seen from one rank.

    Attributes:
        inside: Where this rank stands on its island, as if that were all there is.
        number: Of the island.
    """

    def __init__(self, section: Islands, inside: Standing, number: int, outer: Transport) -> None:
        self.inside = inside
        self.number = number
        self._section = section
        self._plain = outer
        self._wire = coded(outer, _codec_of(section.wire))
        self._states: list[_Outer] = []
        self._updater: DeepSpeedZeroOptimizer | None = None
        self._meetings = 0
        self._since = 0

    @torch.no_grad()
    def spread(self, model: nn.Module) -> None:
        """Gives all islands the parameters and buffers of the first one. Every rank must call it."""
        for tensor in (*model.parameters(), *model.buffers()):
            dense = tensor.detach().contiguous()
            self._plain.broadcast(dense.view(-1).view(torch.uint8), 0, label="the model of the first island")
            if dense.data_ptr() != tensor.data_ptr():
                tensor.copy_(dense)

    def begin(self, updater: DeepSpeedZeroOptimizer, masters: list[MasterBucket], ledger: Ledger) -> None:
        """Takes the masters as they are for the first anchor."""
        self._updater = updater
        for master in masters:
            made = [
                FlatBuffer(master.flat.numel(), master.flat.dtype, master.flat.device, kind=Kind.PRIVATE, ledger=ledger)
                for _ in range(2)
            ]
            made[1].tensor.zero_()
            self._states.append(_Outer(master, *made))
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """The masters are as they were after a meeting: a checkpoint has been loaded."""
        self._since = 0
        for state in self._states:
            state.anchor.tensor.copy_(state.master.flat)

    @property
    def momenta(self) -> list[tuple[str, torch.Tensor]]:
        """The outer momentum of this rank's slices, by names that belong to their place; views of live tensors."""
        return [(f"outer:{number}", state.momentum.tensor) for number, state in enumerate(self._states)]

    def after_update(self) -> None:
        """An update of the island is over, or was skipped; the islands meet if it is time. Every rank must call it."""
        self._since += 1
        if self._since >= self._section.sync_every:
            self.meet()

    @torch.no_grad()
    def meet(self) -> None:
        """The outer step. Every rank of the job must call it."""
        if self._since == 0:
            return
        assert self._updater is not None
        self._since = 0
        self._meetings += 1
        section, size = self._section, self._plain.size
        self._updater.carry_user_writes()
        for number, state in enumerate(self._states):
            anchor, momentum = state.anchor.tensor, state.momentum.tensor
            moved = anchor - state.master.flat
            whole = -(-moved.numel() // (64 * size)) * 64 * size
            sent = torch.zeros(whole, dtype=_dtype_of(section.wire), device=moved.device)
            sent[: moved.numel()].copy_(moved)
            mean = torch.empty(whole, dtype=torch.float32, device=moved.device)
            key = transfer_key(self._plain.owner, number, 1, self._meetings)
            how = Reduction(1.0 / size, key, "the outer step of the islands", max(whole, 1))
            self._wire.all_reduce(sent, mean, how).wait()
            step = mean[: moved.numel()].to(anchor.dtype)
            momentum.mul_(section.outer_momentum).add_(step)
            anchor.sub_(step.add(momentum, alpha=section.outer_momentum), alpha=section.outer_lr)
            state.master.flat.copy_(anchor)
        self._updater.publish_masters()

    def by_one(self, what: str, action: Callable[[], Any]) -> Any:
        """The islands meet, and the first one writes what is the same on all. Every rank must call it.

        Args:
            what: For messages.
            action: The first island's part.

        Raises:
            CheckpointError: It failed there, on the ranks of the other islands.
        """
        self.meet()
        result, failure = None, None
        if self.number == 0:
            try:
                result = action()
            except Exception as error:  # the other islands wait below
                failure = error
        flags = torch.tensor([int(failure is not None)])
        rows = self._plain.gather_small(flags, channel="call", label=f"{what} by the first island")
        if failure is not None:
            raise failure
        if bool(rows.any()):
            raise CheckpointError(f"{what}: the first island, which writes for all, failed; see the message there")
        return result


def settle_islands(root: Root, ranks: Standing, model: nn.Module, device: torch.device) -> Archipelago | None:
    """The islands that the configuration asks for; None for none. Every rank must call it.

    Args:
        root: The configuration.
        ranks: Where this rank stands in the job.
        model: Gets the values of the first island.
        device: Where masters are.

    Raises:
        DeepSpeedConfigError: They do not fit the ranks, or what else is asked for.
    """
    section = root.communication_compression.islands
    if section is None:
        return None
    _refuse(section, root, ranks, model)
    if section.size == ranks.zero_size:
        log_dist("communication_compression.islands: one island of all ranks, which meets nobody")
        return None
    island, across = island_groups(ranks.zero_size, section.size, device, comm.default_timeout())
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
    outer = transport_over(across, device)
    outer.axis = "islands"
    outer.owner = outer.next_owner()
    found = Archipelago(section, inside, number, outer)
    found.spread(model)
    codec = _codec_of(section.wire)
    bits = 8.0 * _dtype_of(section.wire).itemsize if codec is None else bits_of(codec)
    log_dist(
        f"communication_compression.islands: {ranks.zero_size // section.size} islands of {section.size} rank(s) train "
        f"alone; every {section.sync_every} updates their masters meet in {bits:g} bits an element, so that "
        f"{section.sync_every * 32 / bits:.0f} times less travels between them than by sums of fp32 gradients at every "
        f"update; outer lr {section.outer_lr:g}, momentum {section.outer_momentum:g}"
    )
    return found


def _refuse(section: Islands, root: Root, ranks: Standing, model: nn.Module) -> None:
    at = "communication_compression.islands"
    if ranks.zero_size % section.size:
        raise DeepSpeedConfigError(
            f"{at}.size: {section.size} does not divide the number of data-parallel ranks, {ranks.zero_size}"
        )
    if ranks.zero_group is not None or ranks.model_size > 1 or ranks.sequence_size > 1:
        raise DeepSpeedConfigError(
            f"{at}: islands are cut out of ranks that are all data-parallel; leave the mpu and the degrees of tensor, "
            "pipeline and sequence parallelism out, or the islands"
        )
    zero = root.zero_optimization
    for name in ("zero_hpz_partition_size", "mics_shard_size"):
        neighbours = getattr(zero, name)
        if zero.stage == 3 and neighbours > 1 and section.size % neighbours:
            raise DeepSpeedConfigError(
                f"{at}.size: {section.size} ranks are no multiple of zero_optimization.{name}, {neighbours}; the "
                "neighbours that share parameters must be on one island"
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
    if any(address_of(parameter) is not None for parameter in model.parameters()):
        raise DeepSpeedConfigError(
            f"{at}: the model's parameters are sharded over all ranks already (deepspeed.zero.Init, or an engine that "
            "had it before); build the model without"
        )
