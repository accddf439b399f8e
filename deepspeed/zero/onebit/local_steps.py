"""The exchanges of 0/1 Adam: the movement of each step, later that of several local steps.

See ``ops.onebit.zero_one`` for the arithmetic. Movements, ``lr * momentum``, are sent, so the residuals keep their unit
when the learning rate changes. In updates of the variance the exact mean of the gradients is exchanged instead, and
the update is Adam's with that gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from typing_extensions import override

from deepspeed.comm.transports.transport import LocalTransport, Reduction, transfer_key
from deepspeed.ops.flat import FlatUpdate
from deepspeed.ops.onebit.phases import Phase
from deepspeed.ops.onebit.zero_one import LR_EXCHANGED, LR_OWED, LR_SUM, ZeroOneAdam, apart, denominator_of, farthest_of
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.gradient_sum import clip_factor, squared_norm
from deepspeed.zero.onebit.bucket_momentum import BucketMomentum
from deepspeed.zero.onebit.momentum import MomentumExchange
from deepspeed.zero.update.driver import ExchangeResult
from deepspeed.zero.update.masters import MasterRun

_MEAN = 3  # kind of transfer, as of an exchange of momenta, with which it shares the numbers

_LEAST = 1e-12  # learning rate by which a movement is divided
_AT_ONCE = 0.5  # of the learning rate, between two exchanges

Work = Sequence[tuple[BucketMomentum, GradientBucket, list[bool], torch.Tensor]]


class LocalSteps(MomentumExchange):
    """The exchanges of an engine with 0/1 Adam, at ZeRO stage 0."""

    def __init__(self, optimizer: ZeroOneAdam) -> None:
        # By bucket and tile, the movement since the last exchange; None: to be computed from the states.
        self._apart: dict[int, list[bool]] | None = None
        super().__init__(optimizer)

    @override
    def exchange(self, norm: float, used: list[list[bool]], *, scale: float, clip_grad: float) -> ExchangeResult:
        """Runs this rank's own step, and exchanges what is due. The norm is exact in updates of the variance."""
        self._grow()
        self._open_states()
        if self._apart is None:
            self._take_up()
        taking = self._taking(used)
        return ExchangeResult(self._run(used, taking, scale, clip_grad), None, taking)

    @override
    def restart(self) -> None:
        super().restart()
        self._apart = None

    def _taking(self, used: list[list[bool]]) -> list[list[bool]]:
        """Returns per tile whether it is updated: it has a gradient, or it is exchanged now and has moved.

        A parameter may have had a gradient in a local step but none in the step that exchanges; without an update its
        values would stay different on each rank.
        """
        optimizer = self.optimizer
        if optimizer.phase is not Phase.LOCAL:
            return used
        assert self._apart is not None
        for index, flags in enumerate(used):
            before = self._apart.get(index) or [False] * len(flags)
            self._apart[index] = [one or other for one, other in zip(before, flags, strict=True)]
        if not optimizer.comes_together:
            return used
        taking = [self._apart[index] for index in range(len(used))]
        self._apart.clear()
        return taking

    def _run(self, used: list[list[bool]], taking: list[list[bool]], scale: float, clip_grad: float) -> float:
        optimizer = self.optimizer
        work = []
        still: dict[BucketMomentum, list[int]] = {}
        for bucket, own, flags, has_gradient in zip(self.buckets, self._reducer.buckets, taking, used, strict=True):
            if any(flags):
                still[bucket] = [tile for tile, flag in enumerate(flags) if flag and not has_gradient[tile]]
                total, factor = own.take_own_sum()
                flat = torch.zeros(bucket.master.layout.numel, device=bucket.master.bucket.device)
                if total is not None:
                    flat.copy_(total.tensor).mul_(factor / scale)
                    total.free()
                work.append((bucket, own, flags, flat))
        if optimizer.takes_mean:
            return self._take_means(work, clip_grad)
        norm = self._norm_of_mean([(bucket, flat, 1.0) for bucket, _, _, flat in work])
        clip = clip_factor(norm, clip_grad)
        if optimizer.phase is Phase.MOMENTUM:
            self._exchange(work, clip)
        else:
            self._step_alone(work, still, clip)
        return norm

    def _line(self, phase: Phase) -> str:
        found = super()._line(phase)
        return (
            f"{found}; at updates of the variance gradients are sent uncompressed" if phase is Phase.MOMENTUM else found
        )

    @property
    def optimizer(self) -> ZeroOneAdam:
        """The optimizer whose movements are exchanged."""
        assert isinstance(self._optimizer, ZeroOneAdam)
        return self._optimizer

    def _open_states(self) -> None:
        """Creates missing states, at a time when all ranks have the same weights."""
        optimizer = self._optimizer
        assert isinstance(optimizer, FlatUpdate)
        for master in self._masters:
            for run in master.runs:
                state = optimizer.state[run.param]
                if "anchor" not in state:
                    group = optimizer.param_groups[run.interval.param_group]
                    optimizer.init_flat_state(group, run.param.data, state)
                    state["anchor"].copy_(run.param.data)

    def _mean(self, bucket: BucketMomentum, flat: torch.Tensor) -> torch.Tensor:
        """Returns the exact mean of all ranks' gradients."""
        transport = bucket.master.bucket.group.reduce
        if isinstance(transport, LocalTransport):
            return flat.clone()
        mean = torch.empty_like(flat)
        bucket.rounds += 1
        key = transfer_key(transport.owner, bucket.master.bucket.index, _MEAN, bucket.rounds)
        label = f"the mean gradients of {bucket.master.bucket.label}"
        how = Reduction(scale=1.0 / transport.size, key=key, label=label, limit=flat.numel())
        transport.all_reduce(flat.clone(), mean, how).wait()
        return mean

    def _counted(self, bucket: BucketMomentum, squares: float) -> float:
        group = bucket.master.bucket.group
        return squares if group.is_primary_replica and group.place == 0 else 0.0

    def _take_means(self, work: Work, clip_grad: float) -> float:
        """Stores the exact mean gradients where the update reads them; returns their norm before clipping."""
        means = [self._mean(bucket, flat) for bucket, _, _, flat in work]
        norm = self._root([self._counted(b, squared_norm(m).item()) for (b, *_), m in zip(work, means, strict=True)])
        clip = clip_factor(norm, clip_grad)
        for (bucket, own, flags, _), mean in zip(work, means, strict=True):
            if clip != 1.0:
                mean.mul_(clip)
            bucket.mask_gradient(mean)
            self._rescale_errors(bucket, flags, mean)
            made = own.new_result(bucket.master.flat.numel())
            made.tensor.copy_(mean)
            own.sum.add_reduced(made)
        return norm

    def _rescale_errors(self, bucket: BucketMomentum, flags: list[bool], mean: torch.Tensor) -> None:
        """Rescales the residuals if the next update changes the variance, whose root is their unit."""
        if bucket.private is None:
            return
        before, after = bucket.find_root(), bucket.find_root(mean, flags)
        if before is not None and after is not None:
            # Where nothing could move before, there is no residual.
            bucket.rescale(before.masked_fill_(before.isinf(), 0.0).div_(after))

    def _exchange(self, work: Work, clip: float) -> None:
        """Exchanges the movement of this one step; the result divided by the learning rate is its momentum."""
        # A rate of 0 moves nothing, but its momentum is needed.
        lrs = [max(float(group["lr"]), _LEAST) for group in self._optimizer.param_groups]
        self._send(work, clip, lrs, lrs)
        for bucket, own, *_ in work:
            bucket.divide(lrs)
            bucket.settle(own)

    def _send(
        self,
        work: Work,
        factor: float,
        lrs: Sequence[float],
        rates: Sequence[float],
        still: Mapping[BucketMomentum, list[int]] | None = None,
    ) -> None:
        """Sends the movement of this step; given ``still``, what was moved before too, and only that of its tiles.

        ``lrs`` are those of this step, ``rates`` the sums of those of all that is sent, by param group.
        """
        self._lower_errors(rates)
        before: BucketMomentum | None = None
        for bucket, _, flags, flat in work:
            if still is None:
                bucket.start(flat, factor, flags, multiply=lrs, rates=rates)
            else:
                moved = bucket.of_states("moved")
                bucket.start(flat, factor, flags, multiply=lrs, add=moved, only_added=still[bucket], rates=rates)
            if before is not None:
                before.finish()
            before = bucket
        if before is not None:
            before.finish()

    def _lower_errors(self, rates: Sequence[float]) -> None:
        """Scales the residuals down where the learning rate has dropped in one step.

        Momentum is the exchanged movement divided by the learning rate. An old residual would count in it as often as
        the rate has dropped, ten times for example. If the rate drops over several exchanges, error feedback adapts.
        """
        factors = []
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            last = float(group.get(LR_OWED) or 0.0)
            factors.append(rate / last if 0.0 < rate < _AT_ONCE * last else 1.0)
            if rate:
                group[LR_OWED] = rate
        for bucket in self.buckets:
            bucket.multiply_errors(factors)

    def _step_alone(self, work: Work, still: Mapping[BucketMomentum, list[int]], clip: float) -> None:
        """Makes a local step; at a synchronization the movement since the last one is exchanged."""
        lrs = []
        for group in self._optimizer.param_groups:
            lrs.append(float(group["lr"]))
            group[LR_SUM] = float(group.get(LR_SUM) or 0.0) + lrs[-1]
        if self.optimizer.comes_together:
            self._send(work, clip, lrs, self._rates(), still)
            for group in self._optimizer.param_groups:
                group[LR_EXCHANGED], group[LR_SUM] = group.get(LR_SUM) or 1.0, 0.0
            for bucket, own, *_ in work:
                bucket.settle(own)
            return
        for bucket, own, _, flat in work:
            made = own.new_result(bucket.master.flat.numel())
            made.tensor.copy_(flat).mul_(clip)
            own.sum.add_reduced(made)

    def _rates(self) -> list[float]:
        """Returns for each param group the sum of its learning rates since the last exchange."""
        return [float(group.get(LR_SUM) or 0.0) for group in self._optimizer.param_groups]

    @override
    @torch.no_grad()
    def synchronize(self) -> None:
        """Averages the weights over the ranks now, without a step. Every rank must call it.

        Each rank's movement since the last exchange is replaced by the exact mean over the ranks, and so is momentum.
        The interval continues: the next exchange sends the whole movement, and the error feedback is unchanged.
        """
        for index, flags in (self._apart or {}).items():
            bucket = self.buckets[index]
            if any(flags) and not isinstance(bucket.master.bucket.group.reduce, LocalTransport):
                self._average(bucket, flags)
        self._apart = None

    def _average(self, bucket: BucketMomentum, flags: list[bool]) -> None:
        master, optimizer = bucket.master, self.optimizer
        steps = torch.zeros(master.layout.numel, device=master.bucket.device)
        momenta = torch.zeros_like(steps)
        for run in master.runs:
            place = slice(run.interval.start, run.interval.stop)
            momenta[place] = optimizer.state[run.param]["exp_avg"]
            steps[place] = self._from_anchor(run)
        steps, momenta = self._mean(bucket, steps), self._mean(bucket, momenta)
        for run in master.runs:
            state, group = optimizer.state[run.param], optimizer.param_groups[run.interval.param_group]
            denominator = denominator_of(state["exp_avg_sq"], group, optimizer.variance_updates)
            denominator.masked_fill_(denominator.isinf(), 0.0)
            for tile, start, stop in master.tile_intervals(run.interval):
                if flags[tile]:
                    part, place = slice(start - run.interval.start, stop - run.interval.start), slice(start, stop)
                    state["exp_avg"][part] = momenta[place]
                    state["moved"][part] = steps[place] * denominator[part]
            torch.sub(state["anchor"], self._from_anchor(run), out=run.param.data.view(-1))
        master.publish()
        master.bucket.remember_values()

    def _from_anchor(self, run: MasterRun) -> torch.Tensor:
        """Returns this rank's weights minus those at the last exchange."""
        optimizer = self.optimizer
        state, group = optimizer.state[run.param], optimizer.param_groups[run.interval.param_group]
        farthest = farthest_of(group, optimizer.variance_updates) if optimizer.precondition else math.inf
        denominator = denominator_of(state["exp_avg_sq"], group, optimizer.variance_updates)
        return apart(state["moved"], denominator, farthest)

    @torch.no_grad()
    def _take_up(self) -> None:
        """Computes the movement since the last exchange from the states, after a synchronization or a load.

        Weights that differ from the states have been loaded or written, and become the new anchor.
        """
        self._apart, is_apart = {}, False
        for index, bucket in enumerate(self.buckets):
            flags = self._apart[index] = [False] * len(bucket.master.layout.tiles)
            for run in bucket.master.runs:
                state, weights = self._optimizer.state[run.param], run.param.data.view(-1)
                stand = state["anchor"] - self._from_anchor(run)
                if self.optimizer.phase is not Phase.LOCAL or not torch.equal(stand, weights):
                    state["anchor"].copy_(weights)
                    state["moved"].zero_()
                for tile, start, stop in bucket.master.tile_intervals(run.interval):
                    part = slice(start - run.interval.start, stop - run.interval.start)
                    flags[tile] = flags[tile] or bool(state["moved"][part].any())
            is_apart = is_apart or any(flags)
        if not is_apart:
            for group in self._optimizer.param_groups:
                group[LR_SUM] = 0.0
