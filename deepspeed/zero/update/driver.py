"""What the ranks exchange for an update: first norm, flags and checksums, then what the update reads.

:class:`StepAgreement` is the first exchange. The second one lies behind the interface :class:`UpdateDriver`, of which
:class:`MeanGradient` is what nearly every optimizer gets. ``zero.onebit`` has the drivers of the 1-bit family, which
exchange momenta or what ranks have moved by themselves, and ``zero.update.outer_step`` that of islands, which wraps
any of them.
"""

from __future__ import annotations

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from deepspeed.comm.codecs.codec import Codec
from deepspeed.comm.watch.agreement import Agreement
from deepspeed.config.sections.root import Root
from deepspeed.errors import CallOrderError, DivergenceError
from deepspeed.zero.gradient.error_feedback import feedback_numel
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.placement import Placement
from deepspeed.zero.storage import MemoryTracker
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.tiling.layout import BucketLayout
from deepspeed.zero.update.masters import MasterBucket

_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_
_FLAGS_PER_NUMBER = 48  # bits of an exact integer in fp64
_NAME = 240  # bytes of a parameter's name that are sent

ERROR_FEEDBACK = "error feedback of what is sent in fewer bits"
"""What private states of codecs are called in messages."""


@dataclass(frozen=True)
class UpdateParts:
    """Holds the parts that an update driver works on.

    Attributes:
        masters: Master weights of this rank, by trainable bucket; the list may grow.
        reducer: The gradients, in the same order.
        groups: The ranks that share masters, and those that decide together.
        memory_tracker: Counts the memory.
        carry_user_writes: Takes what a program wrote into parameters into the masters.
        publish_masters: Makes the compute parameters follow masters that were written; a collective.
    """

    masters: list[MasterBucket]
    reducer: GradientReducer
    groups: Groups
    memory_tracker: MemoryTracker
    carry_user_writes: Callable[[], None]
    publish_masters: Callable[[], None]


@dataclass(frozen=True)
class ExchangeResult:
    """Holds what the ranks agree on in the exchange before an update.

    Attributes:
        norm: Of the mean gradient, unscaled, before clipping.
        factor: Multiplier of what the update reads in each bucket; None for exactly 1.
        used: By bucket and parameter, whether it is updated.
    """

    norm: float
    factor: float | None
    used: list[list[bool]]


@dataclass(frozen=True)
class PrivateState:
    """State that a rank keeps for itself, for checkpoints.

    Attributes:
        kind: Its name in a checkpoint, or the beginning of it where it belongs to a bucket.
        layout: Of the bucket; None where it belongs to the rank's place alone.
        tensor: The live tensor.
        what: What it is, for messages.
    """

    kind: str
    layout: BucketLayout | None
    tensor: torch.Tensor
    what: str


def clip_factor(norm: float, limit: float) -> float:
    """Returns the factor on gradients of norm ``norm`` that leaves a norm of at most ``limit`` (0: any)."""
    return min(1.0, limit / (norm + _CLIP_EPSILON)) if limit > 0 else 1.0


class UpdateDriver(ABC):
    """Exchanges what an update needs of other ranks.

    Made before the model is sharded, from the torch optimizer; :meth:`open` gives it what it works on.

    Attributes:
        codec: How what is sent instead of gradients is coded; None where gradients are sent.
        has_warm_up: Gradients are sent in the first updates only.
        reads_mean_gradients: The update reads gradients as the reducer leaves them.
    """

    codec: Codec | None = None
    has_warm_up = False
    reads_mean_gradients = False

    @abstractmethod
    def refuse(self, root: Root, placement: Placement) -> None:
        """Raises DeepSpeedConfigError for settings that this exchange cannot be combined with."""

    @abstractmethod
    def open(self, parts: UpdateParts) -> None:
        """Takes what it works on; the next call is :meth:`begin_update`."""

    @abstractmethod
    def begin_update(self, before: int) -> None:
        """Prepares the reducer for the gradients of the next update. Every rank must call it.

        Args:
            before: Updates so far, skipped ones included; equal on all ranks, also after a checkpoint was loaded.
        """

    @abstractmethod
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        """Puts what the update reads where the reducer keeps gradients. Every rank must call it.

        Args:
            norm: Unscaled norm over all ranks of what gradients each of them has now.
            used: By bucket and parameter, whether any rank has a gradient of it.
            scale: Factor on the loss, and so on the gradients.
            clip_grad: Largest norm; 0 for no clipping.
        """

    @abstractmethod
    def end_update(self) -> None:
        """Follows an update, also one that was skipped. Every rank must call it."""

    @abstractmethod
    def synchronise(self) -> None:
        """Brings ranks together whose weights differ, so that they can be saved. Every rank must call it."""

    @abstractmethod
    def restart(self) -> None:
        """Forgets what follows from weights and optimizer states, which have been replaced."""

    @abstractmethod
    def private_states(self) -> Sequence[PrivateState]:
        """Returns what this rank keeps for itself and a checkpoint should hold."""

    @abstractmethod
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        """Returns ``(bytes on this rank, formula)`` for each kind of state that a rank keeps for itself."""

    @abstractmethod
    def end(self) -> None:
        """The run is over."""


def gradient_factor(norm: float, *, scale: float, clip_grad: float) -> float | None:
    """Returns what the update multiplies gradients by; None for exactly 1.

    Args:
        norm: Unscaled, over all ranks.
        scale: Factor on the loss, and so on the gradients.
        clip_grad: Largest norm; 0 for no clipping.
    """
    factor = 1.0 / scale * clip_factor(norm, clip_grad)
    return None if factor == 1.0 else factor


class MeanGradient(UpdateDriver):
    """The mean of the ranks' gradients, which the reducer has made by the time of the update."""

    reads_mean_gradients = True

    @override
    def refuse(self, root: Root, placement: Placement) -> None:
        pass

    @override
    def open(self, parts: UpdateParts) -> None:
        self._masters = parts.masters
        self._reducer = parts.reducer
        self._groups = parts.groups
        self._memory_tracker = parts.memory_tracker

    @override
    def begin_update(self, before: int) -> None:
        self._reducer.begin_update(before)

    @override
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        return ExchangeResult(norm, gradient_factor(norm, scale=scale, clip_grad=clip_grad), used)

    @override
    def end_update(self) -> None:
        pass

    @override
    def synchronise(self) -> None:
        pass

    @override
    def restart(self) -> None:
        pass

    @override
    def private_states(self) -> Sequence[PrivateState]:
        return [
            PrivateState("error", gradients.bucket.layout, gradients.feedback.tensor, ERROR_FEEDBACK)
            for gradients in self._reducer.buckets
            if gradients.feedback is not None
        ]

    @override
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        if not any(group.feeds_back for group in self._groups):
            return []
        placement = formula.placement
        wide = 8 if self._reducer.policy.may_skip else 4
        to_owner, spread = placement.shard_master, placement.spread_master
        shared = [bucket for bucket in formula.trained_buckets if bucket.num_slices > 1]
        total = sum(wide * feedback_numel(bucket, to_owner=to_owner, spread=spread) for bucket in shared)
        if formula.has_copies:  # neighbours, then the ranks with the same slices
            return [(total, f"{wide} x (Psi + Psi / S)" if spread else f"{wide} x (Psi + Psi / S + Psi / N)")]
        return [(total, f"{wide} x Psi" if to_owner else f"{wide} x (Psi + Psi / N)")]

    @override
    def end(self) -> None:
        pass


class StepAgreement:
    """The exchange of one optimizer's updates.

    Args:
        masters: What is updated; the list may grow.
        reducer: Of the gradients.
        groups: The ranks that share them.
        agreement: Keeps the checksum of the order of gathers.
    """

    def __init__(
        self, masters: list[MasterBucket], reducer: GradientReducer, groups: Groups, agreement: Agreement
    ) -> None:
        self._masters = masters
        self._reducer = reducer
        self._groups = groups
        self._agreement = agreement

    def exchange(self, extra: Sequence[float]) -> tuple[float, list[list[bool]], torch.Tensor]:
        """Exchanges the numbers that the update needs.

        The host waits for the device once, to read what all ranks have sent. One small exchange over the job also
        compares the checksums of the gathers' order. The flags are a matter of the peers; where these are not all
        ranks, others have other parameters, and the flags are exchanged separately.

        Returns:
            Sum of squares of the whole gradient; per bucket and parameter, whether it got a gradient on any rank that
            shares it; the ``extra`` numbers of each rank of the job, 2-D, fp64.
        """
        groups = self._groups
        flags = [
            *_pack_flags([used for gradients in self._reducer.buckets for used in gradients.used]),
            self._digest_of_writes(),
        ]
        squares, on_device = self._own_squares()
        numbers = [*squares, float(self._agreement.digest), float(_number_of_order(groups)), *extra]
        together = groups.job is groups.peers
        mine = torch.tensor(numbers + flags if together else numbers, dtype=torch.float64)
        if on_device is not None:
            mine = mine.to(on_device.device, non_blocking=True)
            mine[: len(squares)] += on_device
        rows = groups.job.gather_small(
            mine,
            channel="step",
            label="the update (optimizer.step)",
        )
        _check_order(rows)
        received = rows[:, len(numbers) - len(extra) : len(numbers)]
        flag_rows = rows[:, len(numbers) :]
        if not together:
            flag_rows = groups.peers.gather_small(
                torch.tensor(flags, dtype=torch.float64), channel="step", label="which parameters are updated"
            )
        flag_rows, writes = flag_rows[:, :-1], flag_rows[:, -1]
        _check_writes(writes)
        if bool((flag_rows != flag_rows[0]).any()):
            self._reducer.note_uneven()
        counted, copies = rows[:, 0].sum().item(), rows[:, 1].sum().item()
        # A rank that simulates all the others (the planner's) may count nothing; elsewhere both are 0 then.
        total = (counted or copies) if math.isfinite(copies) else counted + copies
        return total, self._merge_flags(flag_rows), received

    def _digest_of_writes(self) -> float:
        """Returns a checksum of the set gradients of parameters that all peers share; 0 if the program set none."""
        shared = self._groups.among_peers
        names = [
            gradients.bucket.layout.tiles[index].name
            for gradients in self._reducer.buckets
            if gradients.writes and shared(gradients.bucket.group) is None
            for index in sorted(gradients.writes)
        ]
        return float(zlib.crc32("\n".join(names).encode())) if names else 0.0

    def _own_squares(self) -> tuple[list[float], torch.Tensor | None]:
        """Returns this rank's parts of the sum of squares: those that it counts, and those that others count.

        Returns:
            (The two sums, as far as the host knows them; what must be added to them, 1-D fp64 on the device that the
            exchange of the update accepts, or None.)
        """
        squares, accepted = [0.0, 0.0], self._groups.job.small_device
        on_device: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for master, gradients in zip(self._masters, self._reducer.buckets, strict=True):
            found = gradients.sum_of_squares()
            column = 0 if master.counts else 1
            if found is None:
                continue
            if found.device.type in ("cpu", "meta"):
                squares[column] += found.item()
            else:
                on_device[column].append(found)
        if not any(on_device):
            return squares, None
        nothing = next(one for column in on_device for one in column).new_zeros(())
        sums = torch.stack([torch.stack(column or [nothing]).sum() for column in on_device])
        if accepted is not None and accepted.type == sums.device.type:
            return squares, sums
        return [known + more for known, more in zip(squares, sums.cpu().tolist(), strict=True)], None

    def _merge_flags(self, rows: torch.Tensor) -> list[list[bool]]:
        """Per bucket and parameter, whether any rank that shares it had a gradient.

        Args:
            rows: The packed flags of every peer.
        """
        count = sum(len(gradients.used) for gradients in self._reducer.buckets)
        merged: dict[str, list[bool]] = {}
        used, position = [], 0
        for gradients in self._reducer.buckets:
            group = gradients.bucket.group
            if group.name not in merged:
                members = self._groups.among_peers(group)
                merged[group.name] = _unpack_flags(rows if members is None else rows[members], count)
            stop = position + len(gradients.used)
            # Copies in other parts of the model are summed whole, whichever of them was used.
            whole = group.spans_parts and (self._reducer.keeps_own or gradients.result is not None)
            used.append([True] * len(gradients.used) if whole else merged[group.name][position:stop])
            position = stop
        return used

    def refuse_unused(self, used: list[list[bool]]) -> None:
        """Raises on every rank, or on none."""
        names = [
            tile.name
            for master, flags in zip(self._masters, used, strict=True)
            for tile, parameter, flag in zip(master.layout.tiles, master.bucket.params, flags, strict=True)
            if not flag and parameter.requires_grad and tile.param_group >= 0 and tile.numel
        ]
        counts = torch.tensor([len(names)])
        if not self._groups.has_all_flags:
            label = "the search for parameters without a gradient"
            counts = self._groups.job.gather_small(counts, channel="step", label=label).view(-1)
        if bool(counts.any()):
            self._reducer.clear()
            names = names or [f"those of rank(s) {torch.nonzero(counts).view(-1).tolist()}"]
            raise CallOrderError(
                f"{len(names)} parameter(s) got no gradient on any rank: {', '.join(names[:10])}; zero_optimization."
                "ignore_unused_parameters is false, so that is an error. Use them in the loss, freeze them, or set it "
                "to true"
            )

    def first_offender(self) -> tuple[int, str]:
        """Lowest rank and first parameter, in model order, whose gradient is not finite; the same on all ranks."""
        mine = first = 0
        names: list[str] = []
        for master, gradients in zip(self._masters, self._reducer.buckets, strict=True):
            names += [tile.name for tile in master.layout.tiles]
            result = gradients.result
            if mine == 0:
                tile = gradients.first_not_finite() if result is None else master.first_non_finite(result)
                if tile is not None:
                    mine = first + tile + 1
            first += len(master.layout.tiles)
        rows = self._groups.job.gather_small(
            torch.tensor([mine], dtype=torch.int64), channel="step", label="the search for a non-finite gradient"
        )
        found = rows.view(-1).tolist()
        for rank, index in enumerate(found):
            if index:
                return rank, self._name_on(rank, names[mine - 1] if mine else "", names[index - 1 :])
        return 0, "the sum of all gradients"  # every element is finite, their squares are not

    def _name_on(self, rank: int, mine: str, same: list[str]) -> str:
        """Returns the name of a parameter of ``rank``, which ranks with another part of the model do not have.

        Args:
            rank: In the job; the same on all ranks.
            mine: The name on this rank.
            same: Begins with the name, where ranks have the same part of the model.
        """
        if self._groups.job is self._groups.peers:
            return same[0]
        text = mine.encode()[:_NAME].ljust(_NAME, b"\0")
        rows = self._groups.job.gather_small(
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64),
            channel="step",
            label="the name of a non-finite gradient",
        )
        return bytes(rows[rank].tolist()).rstrip(b"\0").decode(errors="replace")


def _number_of_order(groups: Groups) -> int:
    """Returns a number that ranks share if they must gather in one order: the rank in the job of the first of them."""
    first = groups.gathering.ranks[:1]
    return groups.job.ranks.index(first[0]) if first and groups.job.ranks else groups.job.rank


def _check_order(rows: torch.Tensor) -> None:
    """Raises on every rank where ranks that gather in one order have other checksums of it."""
    expected: dict[float, float] = {}
    for _, _, digest, order in rows[:, :4].tolist():
        if expected.setdefault(order, digest) != digest:
            raise DivergenceError(
                "ranks ran different numbers of forwards and backwards since the last step, or gathered parameters in "
                f"different orders (checksums by rank: {[int(one) for one in rows[:, 2].tolist()]}); nothing was "
                "updated. Every rank must run the same modules, for as many micro-batches"
            )


def _check_writes(digests: torch.Tensor) -> None:
    """Raises on every rank where some ranks have set gradients that others have not."""
    if bool((digests != digests[0]).any()):
        alike = torch.nonzero(digests == digests[0]).view(-1).tolist()
        raise DivergenceError(
            "optimizer.step: every rank must have set the gradients of the same parameters "
            f"(safe_set_full_grad, safe_set_local_grad), but ranks {alike} have set others than the rest, so "
            "the replicas of the parameters would differ; nothing was updated. Call them on every rank, with "
            "the same parameters and values"
        )


def _pack_flags(flags: list[bool]) -> list[float]:
    numbers = []
    for start in range(0, len(flags), _FLAGS_PER_NUMBER):
        bits = 0
        for offset, flag in enumerate(flags[start : start + _FLAGS_PER_NUMBER]):
            bits |= int(flag) << offset
        numbers.append(float(bits))
    return numbers


def _unpack_flags(rows: torch.Tensor, count: int) -> list[bool]:
    """Bitwise or over the ranks."""
    flags: list[bool] = []
    for column in range(rows.shape[1]):
        bits = 0
        for value in rows[:, column].tolist():
            bits |= int(value)
        flags += [bool(bits >> offset & 1) for offset in range(_FLAGS_PER_NUMBER)]
    return flags[:count]
