"""Putting a model under ZeRO: from options and groups to a runtime that is ready to run."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from deepspeed.comm.watch import backward_comm
from deepspeed.comm.watch.agreement import Agreement
from deepspeed.zero.gather.announced import Announcement
from deepspeed.zero.gather.hooks import ForwardHooks
from deepspeed.zero.gather.schedule import GatherSchedule
from deepspeed.zero.gather.unit_buckets import buckets_of_leaves, gathering_modules
from deepspeed.zero.gather.units import find_units
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.group import Groups
from deepspeed.zero.guards import guard_parts, guard_state_dicts
from deepspeed.zero.holder import address_of
from deepspeed.zero.model_states import ModelStates
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.runtime_options import RuntimeOptions


def build_runtime(
    model: nn.Module, options: RuntimeOptions, groups: Groups, param_groups: Mapping[int, int]
) -> ZeroRuntime:
    """Moves the model's parameters into buckets and hooks them up. Every rank must call it, with the same model.

    Args:
        model: The model; its parameters are changed in place and take rank 0's values.
        options: Decisions of the configuration.
        groups: The ranks that share parameters, and those that decide together.
        param_groups: ``id(parameter)`` to index of its optimizer param group.
    """
    _retire_earlier_owners(model)
    units = find_units(model, options.granularity)
    states = ModelStates(model, units, options, groups, param_groups)
    sharded = states.sharded
    agreement = Agreement(groups.gathering, lambda index: f"the parameters {states.buckets[index].label}")
    leaves = buckets_of_leaves(model, sharded)
    schedule = GatherSchedule(sharded, agreement, options.gathers, leaves.values(), states.layout.units)
    announcement = Announcement()
    hooks = ForwardHooks(
        model,
        gathering_modules(model, units, states.layout.units, states.buckets, leaves),
        sharded,
        schedule,
        in_backward=lambda: announcement.is_open,
        on_outputs=announcement.watch,
    )
    announcement.on_entry = hooks.reach
    reducer = None
    if options.reduction is not None:
        reducer = _make_reducer(model, options.reduction, states, groups, schedule, hooks, announcement)
    runtime = ZeroRuntime(
        model,
        options,
        groups,
        states,
        agreement=agreement,
        schedule=schedule,
        hooks=hooks,
        reducer=reducer,
        announcement=announcement,
    )
    if options.placement.shard_params or states.sharded:
        runtime.handles += guard_state_dicts(model)
    runtime.handles += guard_parts(model)
    return runtime


def _retire_earlier_owners(model: nn.Module) -> None:
    """An engine that had the model before gives its parameters up."""
    addresses = [address for p in model.parameters() if (address := address_of(p)) is not None]
    for owner in {id(a.holder.owner): a.holder.owner for a in addresses if a.holder.owner is not None}.values():
        owner.retire()


def _make_reducer(
    model: nn.Module,
    policy: ReductionPolicy,
    states: ModelStates,
    groups: Groups,
    schedule: GatherSchedule,
    hooks: ForwardHooks,
    announcement: Announcement,
) -> GradientReducer:
    ear = backward_comm.Ear(model)
    return GradientReducer(
        [master.bucket for master in states.masters],
        policy,
        groups.peers,
        states.ledger,
        [states.landing(master.bucket) for master in states.masters],
        on_packed=hooks.gradients_arrived,
        on_stray=announcement.seen,
        may_block=lambda: schedule.expects_no_gather and not ear.may_hear(),
        needs_one_order=bool(states.sharded) and any(group.gather.needs_one_order for group in groups),
    )
