"""The exchanges of 0/1 Adam: of each step's movement, later of what ranks have moved in several steps of their own.

See ``ops.onebit.zero_one`` for the arithmetic. What travels are movements, ``lr * momentum``, so errors are in their
unit, whatever the learning rate does. Where the variance is to be updated, the exact mean of the gradients travels too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from deepspeed.comm.transport import LocalTransport, Reduction, transfer_key
from deepspeed.ops.flat import FlatUpdate
from deepspeed.ops.onebit.phases import Phase
from deepspeed.ops.onebit.zero_one import LR_SUM, TRAVELLED, ZeroOneAdam, denominator_of
from deepspeed.zero.gradient_bucket import GradientBucket
from deepspeed.zero.group import Groups
from deepspeed.zero.masters import MasterBucket
from deepspeed.zero.norm import squared_norm
from deepspeed.zero.onebit.bucket_momentum import BucketMomentum
from deepspeed.zero.onebit.momentum import MomentumExchange, clip_factor
from deepspeed.zero.storage import Ledger

_MEAN = 3  # kind of transfer, as of an exchange of momenta, with which it shares the numbers

_LEAST = 1e-12  # learning rate by which a movement is divided

Work = Sequence[tuple[BucketMomentum, GradientBucket, list[bool], torch.Tensor]]


class LocalSteps(MomentumExchange):
    """The exchanges of an engine with 0/1 Adam, at ZeRO stage 0."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, masters: list[MasterBucket], groups: Groups, ledger: Ledger
    ) -> None:
        self._apart: dict[int, list[bool]] = {}  # by bucket and tile, what was moved since ranks came together
        super().__init__(optimizer, masters, groups, ledger)

    def run(
        self,
        gradients: Sequence[GradientBucket],
        used: list[list[bool]],
        scale: float,
        clip_grad: float,
        epsilon: float,
    ) -> tuple[float, list[list[bool]]]:
        """See the class this one derives from; where the variance is updated, the norm is exact."""
        self._grow()
        self._open_states()
        taking = self._taking(used)
        return self._run(gradients, used, taking, scale, clip_grad, epsilon), taking

    def forget(self) -> None:
        """See the class this one derives from; checkpoints are made where ranks are together."""
        super().forget()
        self._apart.clear()

    def _taking(self, used: list[list[bool]]) -> list[list[bool]]:
        """Of what there is an update: what has a gradient and, as ranks come together, what moved since they last did.

        A parameter may have had a gradient in a step of the ranks' own and have none in the one that brings them
        together; it would stay where each rank has moved it.
        """
        optimizer = self.optimizer
        if optimizer.phase is not Phase.LOCAL:
            return used
        for index, flags in enumerate(used):
            before = self._apart.get(index) or [False] * len(flags)
            self._apart[index] = [one or other for one, other in zip(before, flags, strict=True)]
        if not optimizer.comes_together:
            return used
        taking = [self._apart[index] for index in range(len(used))]
        self._apart.clear()
        return taking

    def _run(
        self,
        gradients: Sequence[GradientBucket],
        used: list[list[bool]],
        taking: list[list[bool]],
        scale: float,
        clip_grad: float,
        epsilon: float,
    ) -> float:
        optimizer = self.optimizer
        work = []
        still: dict[BucketMomentum, list[int]] = {}
        for bucket, own, flags, has_gradient in zip(self.buckets, gradients, taking, used, strict=True):
            if any(flags):
                still[bucket] = [tile for tile, flag in enumerate(flags) if flag and not has_gradient[tile]]
                total, factor = own.take_own_sum()
                flat = torch.zeros(bucket.master.layout.numel, device=bucket.master.bucket.device)
                if total is not None:
                    flat.copy_(total.tensor).mul_(factor / scale)
                    total.free()
                work.append((bucket, own, flags, flat))
        if optimizer.updates_variance:
            means = [self._mean(bucket, flat) for bucket, _, _, flat in work]
            norm = self._root(
                [self._counted(b, squared_norm(m).item()) for (b, *_), m in zip(work, means, strict=True)]
            )
            clip = clip_factor(norm, clip_grad, epsilon)
            for (bucket, _, flags, _), mean in zip(work, means, strict=True):
                self._update_variance(bucket, flags, mean.mul_(clip))
        else:
            norm = self._norm_of_mean([(bucket, flat, 1.0) for bucket, _, _, flat in work])
            clip = clip_factor(norm, clip_grad, epsilon)
        if optimizer.phase is Phase.MOMENTUM:
            self._exchange(work, clip)
        else:
            self._step_alone(work, still, clip)
        return norm

    @property
    def optimizer(self) -> ZeroOneAdam:
        """Whose exchanges."""
        assert isinstance(self._optimizer, ZeroOneAdam)
        return self._optimizer

    def _open_states(self) -> None:
        """States that are missing, for weights that are the same everywhere."""
        optimizer = self._optimizer
        assert isinstance(optimizer, FlatUpdate)
        for master in self._masters:
            for run in master.runs:
                state = optimizer.state[run.param]
                if "anchor" not in state:
                    group = optimizer.param_groups[run.span.param_group]
                    optimizer.init_flat_state(group, run.param.data, state)
                    state["anchor"].copy_(run.param.data)

    def _mean(self, bucket: BucketMomentum, flat: torch.Tensor) -> torch.Tensor:
        """The exact mean of everybody's gradients."""
        wire = bucket.master.bucket.group.reduce
        if isinstance(wire, LocalTransport):
            return flat.clone()
        mean = torch.empty_like(flat)
        bucket.rounds += 1
        key = transfer_key(wire.owner, bucket.master.bucket.index, _MEAN, bucket.rounds)
        label = f"the mean gradients of {bucket.master.bucket.label}"
        how = Reduction(scale=1.0 / wire.size, key=key, label=label, limit=flat.numel())
        wire.all_reduce(flat.clone(), mean, how).wait()
        return mean

    def _counted(self, bucket: BucketMomentum, squares: float) -> float:
        group = bucket.master.bucket.group
        return squares if group.counts and group.place == 0 else 0.0

    def _update_variance(self, bucket: BucketMomentum, flags: list[bool], mean: torch.Tensor) -> None:
        before = None if bucket.private is None else bucket.find_root()
        for run in bucket.master.runs:
            variance = self._optimizer.state[run.param]["exp_avg_sq"]
            beta = float(self._optimizer.param_groups[run.span.param_group]["betas"][1])
            for tile, start, stop in bucket.master.tile_spans(run.span):
                if flags[tile]:
                    part = variance[start - run.span.start : stop - run.span.start]
                    part.mul_(beta).addcmul_(mean[start:stop], mean[start:stop], value=1 - beta)
        after = None if before is None else bucket.find_root()
        if before is not None and after is not None:
            # What is owed stays what it is. Where nothing could move before nothing is owed.
            bucket.rescale(before.masked_fill_(before.isinf(), 0.0).div_(after))

    def _exchange(self, work: Work, clip: float) -> None:
        """The movement of this one step travels, and its momentum is what has come, by the learning rate."""
        # A rate of 0 moves nothing, but its momentum is to be known.
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

        ``lrs`` are those of this step, ``rates`` the sums of those of all that travels, by param group.
        """
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

    def _step_alone(self, work: Work, still: Mapping[BucketMomentum, list[int]], clip: float) -> None:
        """A step of this rank's own; where ranks come together, what they have moved travels."""
        lrs = []
        for group in self._optimizer.param_groups:
            lrs.append(float(group["lr"]))
            group[LR_SUM] = float(group.get(LR_SUM) or 0.0) + lrs[-1]
        if self.optimizer.comes_together:
            self._send(work, clip, lrs, self._rates(), still)
            self._count_from_zero()
            for bucket, own, *_ in work:
                bucket.settle(own)
            return
        for bucket, own, _, flat in work:
            made = own.new_result(bucket.master.flat.numel())
            made.tensor.copy_(flat).mul_(clip)
            own.sum.add_reduced(made)

    def _rates(self) -> list[float]:
        """By param group, the sum of the learning rates since ranks came together."""
        return [float(group.get(LR_SUM) or 0.0) for group in self._optimizer.param_groups]

    def _count_from_zero(self) -> None:
        for group in self._optimizer.param_groups:
            group[TRAVELLED], group[LR_SUM] = group.get(LR_SUM) or 1.0, 0.0

    @torch.no_grad()
    def synchronise(self) -> None:
        """Brings ranks together now, without a step, so that they have the same weights; every rank must call it."""
        groups = self._optimizer.param_groups
        rates = self._rates()
        if not any(rates):
            return
        apart = [(bucket, self._apart[index]) for index, bucket in enumerate(self.buckets) if index in self._apart]
        work = [(bucket, [tile for tile, flag in enumerate(flags) if flag], flags) for bucket, flags in apart]
        for bucket, tiles, flags in work:
            bucket.start(None, 1.0, flags, add=bucket.of_states("moved"), only_added=tiles, rates=rates)
            bucket.finish()
        self._count_from_zero()
        self._apart.clear()
        for bucket, tiles, _ in work:
            message, master = bucket.take(), bucket.master
            for run in master.runs:
                state, group = self._optimizer.state[run.param], groups[run.span.param_group]
                for tile, start, _ in master.tile_spans(run.span):
                    place = bucket.place_of(tile)
                    if place is None or tile not in tiles:
                        continue
                    part = slice(start - run.span.start, start - run.span.start + place.stop - place.start)
                    moved = message[place]
                    state["exp_avg"][part] = moved / float(group[TRAVELLED])
                    denominator = denominator_of(state["exp_avg_sq"][part], group, self.optimizer.variance_updates)
                    state["anchor"][part].addcdiv_(moved, denominator, value=-1)
                    state["moved"][part] = 0.0
                    run.param.data.view(-1)[part] = state["anchor"][part]
            master.publish()
            master.bucket.remember_values()


def exchange_for(
    optimizer: torch.optim.Optimizer, masters: list[MasterBucket], groups: Groups, ledger: Ledger
) -> MomentumExchange:
    """What sends the momenta of an optimizer of the 1-bit family; arguments as of :class:`MomentumExchange`."""
    kind = LocalSteps if isinstance(optimizer, ZeroOneAdam) else MomentumExchange
    return kind(optimizer, masters, groups, ledger)
