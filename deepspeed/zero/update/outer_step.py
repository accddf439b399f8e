"""The outer step of DiLoCo (arXiv 2311.08105): islands of ranks synchronize every H updates.

Inside an island updates are those of any engine. Ranks with the same place on their islands hold the same slices of the
masters. The mean over islands of how far the masters have moved is the gradient of an outer step of SGD with Nesterov's
momentum,

    d = anchor - mean(master);  b <- mu b + d;  anchor <- anchor - lr (d + mu b);  master <- anchor,

whose anchor is the masters after the outer step before. The inner optimizers keep their states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from typing_extensions import override

from deepspeed.comm.base.codec import Codec, bits_of
from deepspeed.comm.codecs.coded import coded
from deepspeed.comm.codecs.table import CODECS
from deepspeed.comm.transports.transport import Reduction, Transport, transfer_key
from deepspeed.config.sections.communication_compression import Islands
from deepspeed.zero.storage import FlatBuffer, StorageKind
from deepspeed.zero.tiling.formula import MemoryFormula, itemsize
from deepspeed.zero.update.driver import ExchangeResult, PrivateState, UpdateDriver, UpdateParts
from deepspeed.zero.update.masters import MasterBucket


@dataclass
class OuterState:
    """The outer state of one master."""

    master: MasterBucket  # whose
    anchor: FlatBuffer  # its values after the last outer step
    momentum: FlatBuffer  # the momentum of the outer steps


class OuterStep(UpdateDriver):
    """Adds the outer step of islands to the exchange inside an island."""

    def __init__(self, inner: UpdateDriver, section: Islands, across: Transport) -> None:
        self.inner = inner  # exchanges inside this rank's island
        self.states: list[OuterState] = []  # one for each master
        self.reported_codec, self.has_warm_up = inner.reported_codec, inner.has_warm_up
        self.reads_mean_gradients = inner.reads_mean_gradients
        self._section = section
        self._across = across
        self._transport = coded(across, _codec_of(section.wire))
        self._steps = 0  # outer ones so far
        self._since = 0  # updates since the last one

    @override
    def open(self, parts: UpdateParts) -> None:
        """Also copies the masters as the first anchor."""
        self.inner.open(parts)
        self._parts = parts
        for master in parts.masters:
            flat = master.flat
            anchor, momentum = (
                FlatBuffer(
                    flat.numel(), flat.dtype, flat.device, kind=StorageKind.PRIVATE, memory_tracker=parts.memory_tracker
                )
                for _ in range(2)
            )
            momentum.tensor.zero_()
            self.states.append(OuterState(master, anchor, momentum))
        self._take_anchors()

    @torch.no_grad()
    def _take_anchors(self) -> None:
        self._since = 0
        for state in self.states:
            state.anchor.tensor.copy_(state.master.flat)

    @override
    def begin_update(self, before: int) -> None:
        self.inner.begin_update(before)

    @override
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        return self.inner.exchange(norm, used, scale=scale, clip_grad=clip_grad)

    @override
    def end_update(self) -> None:
        """Makes the outer step every ``sync_every`` updates. Every rank of the job must call it."""
        self.inner.end_update()
        self._since += 1
        if self._since >= self._section.sync_every:
            self.step()

    @property
    def has_updates(self) -> bool:
        """Returns whether there was an update since the last outer step."""
        return self._since > 0

    @torch.no_grad()
    def step(self) -> None:
        """Makes the outer step, if there was an update since the last one.

        Every rank of the job must call it, with no parameter gathered.
        """
        if not self.has_updates:
            return
        self._since = 0
        self._steps += 1
        section, size = self._section, self._across.size
        self._parts.carry_user_writes()
        for number, state in enumerate(self.states):
            anchor, momentum = state.anchor.tensor, state.momentum.tensor
            moved = anchor - state.master.flat
            whole = -(-moved.numel() // (64 * size)) * 64 * size
            sent = torch.zeros(whole, dtype=_dtype_of(section.wire), device=moved.device)
            sent[: moved.numel()].copy_(moved)
            mean = torch.empty(whole, dtype=torch.float32, device=moved.device)
            key = transfer_key(self._across.owner, number, 1, self._steps)
            how = Reduction(1.0 / size, key, "the outer step of the islands", max(whole, 1))
            self._transport.all_reduce(sent, mean, how).wait()
            step = mean[: moved.numel()].to(anchor.dtype)
            momentum.mul_(section.outer_momentum).add_(step)
            anchor.sub_(step.add(momentum, alpha=section.outer_momentum), alpha=section.outer_lr)
            state.master.flat.copy_(anchor)
        self._parts.publish_masters()

    @override
    def synchronize(self) -> None:
        self.inner.synchronize()

    @override
    def restart(self) -> None:
        """Also copies the masters as the anchor: a checkpoint has them as of an outer step."""
        self.inner.restart()
        self._take_anchors()

    @override
    def private_states(self) -> Sequence[PrivateState]:
        what = "the momentum of the outer steps of islands"
        return [
            *self.inner.private_states(),
            *(PrivateState(f"outer:{n}", None, state.momentum.tensor, what) for n, state in enumerate(self.states)),
        ]

    @override
    def private_formula(self, formula: MemoryFormula) -> Sequence[tuple[int, str]]:
        total = sum(2 * max(itemsize(b.dtype), 4) * formula.owned_numel(b) for b in formula.trained_buckets)
        text = f"8 x Psi / {formula.owners}" if formula.placement.shard_master else "8 x Psi"
        return [*self.inner.private_formula(formula), (total, text)]

    @override
    def end(self) -> None:
        self.inner.end()


def bits_sent(wire: str) -> float:
    """Returns the bits of an element that is sent, by the key ``communication_compression.islands.wire``."""
    codec = _codec_of(wire)
    return 8.0 * _dtype_of(wire).itemsize if codec is None else bits_of(codec)


def _codec_of(wire: str) -> Codec | None:
    """Returns the codec that the key ``wire`` names; None where values are sent as floating-point numbers."""
    return CODECS[wire].codec(feeds_back=False) if wire in CODECS else None


def _dtype_of(wire: str) -> torch.dtype:
    """Returns the dtype of what is sent, or of what the codec gets."""
    return torch.bfloat16 if wire == "bf16" else torch.float32
