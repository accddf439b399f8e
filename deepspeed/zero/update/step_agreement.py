"""The exchange of all ranks before an update: norm, flags and checksums, and the search for a non-finite gradient."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed.errors import CallOrderError, DivergenceError
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.update.masters import MasterBucket

_FLAGS_PER_NUMBER = 48  # bits of an exact integer in fp64
_NAME = 240  # bytes of a parameter's name that are sent


@dataclass(frozen=True)
class StepExchange:
    """Holds what the ranks know of each other's gradients before an update."""

    squares: float  # sum of squares of the whole gradient, with the loss scale
    used: list[list[bool]]  # per bucket and parameter, whether it got a gradient on any rank that shares it
    extra: torch.Tensor  # the ``extra`` numbers of each rank of the job, by rank: 2-D, fp64


class StepAgreement:
    """The exchange of one optimizer's updates."""

    def __init__(
        self, masters: list[MasterBucket], reducer: GradientReducer, groups: Groups, agreement: Agreement
    ) -> None:
        self._masters = masters
        self._reducer = reducer
        self._groups = groups
        self._agreement = agreement

    def exchange(self, extra: Sequence[float]) -> StepExchange:
        """Exchanges the numbers that the update needs.

        The host waits for the device once, to read what all ranks have sent. One small exchange over the job also
        compares the checksums of the gathers' order. Flags concern the peers only. If these are not all ranks, the
        others have different parameters, and flags are exchanged separately.

        Args:
            extra: Numbers for all ranks of the job; every rank must give as many.
        """
        groups = self._groups
        flags = [
            *_pack_flags([used for gradients in self._reducer.buckets for used in gradients.used]),
            self._digest_of_writes(),
        ]
        squares, on_device = self._own_squares()
        # equal on ranks that must gather in one order: the rank in the job of the first of them
        first = groups.gathering.ranks[:1]
        number = groups.job.ranks.index(first[0]) if first and groups.job.ranks else groups.job.rank
        numbers = [*squares, float(self._agreement.digest), float(number), *extra]
        together = groups.job is groups.peers
        own_row = torch.tensor(numbers + flags if together else numbers, dtype=torch.float64)
        if on_device is not None:
            own_row = own_row.to(on_device.device, non_blocking=True)
            own_row[: len(squares)] += on_device
        rows = groups.job.gather_small(
            own_row,
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
        # The planner's one simulated rank may count nothing; elsewhere both are 0 then.
        total = (counted or copies) if math.isfinite(copies) else counted + copies
        return StepExchange(total, self._merge_flags(flag_rows), received)

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
            sum_of_squares = gradients.sum_of_squares()
            column = 0 if master.counts else 1
            if sum_of_squares is None:
                continue
            if sum_of_squares.device.type in ("cpu", "meta"):
                squares[column] += sum_of_squares.item()
            else:
                on_device[column].append(sum_of_squares)
        if not any(on_device):
            return squares, None
        nothing = next(one for column in on_device for one in column).new_zeros(())
        sums = torch.stack([torch.stack(column or [nothing]).sum() for column in on_device])
        if accepted is not None and accepted.type == sums.device.type:
            return squares, sums
        return [known + more for known, more in zip(squares, sums.cpu().tolist(), strict=True)], None

    def _merge_flags(self, rows: torch.Tensor) -> list[list[bool]]:
        """Returns, per bucket and parameter, whether any rank that shares it had a gradient."""
        count = sum(len(gradients.used) for gradients in self._reducer.buckets)
        merged: dict[str, list[bool]] = {}
        used, position = [], 0
        for gradients in self._reducer.buckets:
            group = gradients.bucket.group
            if group.name not in merged:
                members = self._groups.among_peers(group)
                merged[group.name] = _unpack_flags(rows if members is None else rows[members], count)
            stop = position + len(gradients.used)
            # Copies in other parts of the model are summed whole, even if only some of them were used.
            whole = group.spans_stages and (self._reducer.keeps_own or gradients.result is not None)
            used.append([True] * len(gradients.used) if whole else merged[group.name][position:stop])
            position = stop
        return used

    def refuse_unused(self, used: list[list[bool]]) -> None:
        """Raises on every rank, or on none.

        Raises:
            CallOrderError: Some parameter got no gradient on any rank, and the configuration forbids that.
        """
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
        """Returns the lowest rank and first parameter, in model order, with a non-finite gradient.

        The same on all ranks.
        """
        own_index = first = 0
        names: list[str] = []
        for master, gradients in zip(self._masters, self._reducer.buckets, strict=True):
            names += [tile.name for tile in master.layout.tiles]
            result = gradients.result
            if own_index == 0:
                tile = gradients.first_not_finite() if result is None else master.first_non_finite(result)
                if tile is not None:
                    own_index = first + tile + 1
            first += len(master.layout.tiles)
        rows = self._groups.job.gather_small(
            torch.tensor([own_index], dtype=torch.int64), channel="step", label="the search for a non-finite gradient"
        )
        indices = rows.view(-1).tolist()
        for rank, index in enumerate(indices):
            if index:
                return rank, self._name_on(rank, names[own_index - 1] if own_index else "", names[index - 1 :])
        return 0, "the sum of all gradients"  # every element is finite, but their squares overflow

    def _name_on(self, rank: int, own_name: str, same: list[str]) -> str:
        """Returns the name of a parameter of ``rank``, which ranks with another part of the model do not have."""
        if self._groups.job is self._groups.peers:
            return same[0]
        text = own_name.encode()[:_NAME].ljust(_NAME, b"\0")
        rows = self._groups.job.gather_small(
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(torch.int64),
            channel="step",
            label="the name of a non-finite gradient",
        )
        return bytes(rows[rank].tolist()).rstrip(b"\0").decode(errors="replace")


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
            "optimizer.step: every rank must have set, changed or discarded the gradients of the same parameters "
            "(safe_set_full_grad, safe_set_local_grad, parameter.grad = ..., module.zero_grad()), but ranks "
            f"{alike} have done so with others than the rest, so the replicas of the parameters would differ; nothing "
            "was updated. Make these calls on every rank, with the same parameters and values"
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
    """Returns the bitwise or over the ranks."""
    flags: list[bool] = []
    for column in range(rows.shape[1]):
        bits = 0
        for value in rows[:, column].tolist():
            bits |= int(value)
        flags += [bool(bits >> offset & 1) for offset in range(_FLAGS_PER_NUMBER)]
    return flags[:count]
