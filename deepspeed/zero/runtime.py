"""The ZeRO runtime of one model: builds it, opens and ends backwards, and refuses calls out of order.

:func:`build_runtime` builds it; ``zero.model_states`` places the states.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.comm.job import backward_comm
from deepspeed.comm.transports.transport import LocalTransport
from deepspeed.errors import CallOrderError, require_state
from deepspeed.logging import log_dist, warn_once
from deepspeed.torch_private import is_inside_backward
from deepspeed.zero.address import address_of, full_shape
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.calls import agree_to_go_on
from deepspeed.zero.gather.agreement import Agreement
from deepspeed.zero.gather.hooks import ForwardHooks
from deepspeed.zero.gather.leaf_modules import get_z3_leaf_modules, mark_configured_leaves
from deepspeed.zero.gather.schedule import GatherSchedule
from deepspeed.zero.gradient.gradient_bucket import GradientBucket
from deepspeed.zero.gradient.gradients import GradientReducer
from deepspeed.zero.gradient.program_gradients import GradientUnit
from deepspeed.zero.group import Groups
from deepspeed.zero.guards import UntrainedGradients, guard_parts, guard_state_dicts
from deepspeed.zero.model_states import ModelStates, RuntimeOptions
from deepspeed.zero.passes import ModelPhase, Pass, PassTracker
from deepspeed.zero.placement import BucketPlacement
from deepspeed.zero.tiling.layout import ModelLayout
from deepspeed.zero.update.masters import MasterBucket, group_indices, move_to_runs
from deepspeed.zero.update.run_gradients import MasterRunGradients
from deepspeed.zero.update.updater import Updater


@dataclass(frozen=True)
class ModelChunk:
    """A part of the model that runs separately, such as a chunk of a pipeline."""

    reaches: frozenset[torch.nn.Parameter]  # parameters that a backward of it may reach
    # those of them that no later backward of this update reaches: their gradients are reduced now
    closes: frozenset[torch.nn.Parameter] = frozenset()
    # parameters in ``reaches`` that are not in ``closes`` are reduced after this backward too; False: they stay a local
    # sum until a backward closes them
    reduces_each: bool = False


@dataclass(frozen=True)
class MicroBatch:
    """One backward of an update.

    The engine counts calls of ``step``; a schedule that runs forwards and backwards in an order of its own sets it.
    """

    # Number of the micro-batch in its update, from 0. Several backwards may belong to one: those of the parts of a
    # model that is run part by part.
    index: int
    is_first: bool  # no backward of this update came before
    is_last: bool  # the update follows this backward
    part: ModelChunk | None = None  # the part of the model that the backward belongs to; None: all of it


class ZeroRuntime:
    """Manages the sharded states of one model. Made by :func:`build_runtime`."""

    def __init__(
        self,
        model: nn.Module,
        options: RuntimeOptions,
        groups: Groups,
        states: ModelStates,
        *,
        agreement: Agreement,
        schedule: GatherSchedule,
        hooks: ForwardHooks,
        reducer: GradientReducer | None,
        updater: Updater | None,
        passes: PassTracker,
    ) -> None:
        self.model = model
        self.placement = options.placement  # the ZeRO row
        self.device = options.device  # where the model computes
        self.host_is_device = options.host_is_device
        self.groups = groups  # the ranks that share parameters, and those that decide together
        self.states = states  # the model states: parameters in buckets, and masters
        self.buckets = states.buckets  # in model order
        self.masters = states.masters  # one per trainable bucket, in the same order as ``reducer.buckets``
        self.memory_tracker = states.memory_tracker  # counts the bytes that are allocated
        self.param_names = states.param_names
        self.agreement = agreement  # the ranks' agreement on the order of gathers
        self.schedule = schedule  # when buckets are gathered
        self.hooks = hooks  # the hooks that run before and after modules
        self.reducer = reducer  # the gradients; None where nothing is trained
        self.passes = passes  # the forward or backward that the model is in
        # the parameter objects that are trained, to restore those that a program replaces
        self.originals = OriginalParameters(model)
        self.handles: list[RemovableHandle] = []  # hooks on the model that are removed with this runtime
        self.updater = updater  # updates the masters; None where nothing is trained
        self.offloaded: set[str] = set()  # kinds of states that ``offload_states`` has moved to the host
        self.open_blocks = 0  # ``GatheredParameters`` blocks that hold parameters of this model
        self.is_destroyed = False  # whether its engine was destroyed
        self.is_retired = False  # whether another engine has taken the model over
        self._late: list[int] = []  # positions of buckets trained only since a parameter of theirs was unfrozen
        self._is_alone = all(isinstance(group.reduce, LocalTransport) for group in groups)
        self._gathers = [group.gather for group in groups if not isinstance(group.gather, LocalTransport)]
        self._untrained = UntrainedGradients()
        for bucket in self.buckets:
            bucket.begin_training(self)
        self._drop_untrained_gradients()

    @property
    def layout(self) -> ModelLayout:
        """Where every parameter lives."""
        return self.states.layout

    @property
    def placed(self) -> tuple[BucketPlacement, ...]:
        """Where the states of each bucket live, by index."""
        return self.states.placed

    @property
    def in_backward(self) -> bool:
        """Returns whether a backward of this model is open."""
        return self.passes.in_backward

    def _drop_untrained_gradients(self) -> None:
        """Drops gradients of parameters that require them but belong to no param group; logs new ones."""
        names = self._untrained.drop_those_of(self.buckets)
        if names and self.reducer is not None:
            log_dist(
                f"{len(names)} parameter(s) require gradients but are in no param group of the optimizer, so they are "
                f"not trained: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            )

    # -- backward ----------------------------------------------------------------------------------------------------

    def begin_backward(
        self, micro_batch: MicroBatch, *, sync: bool, unit: GradientUnit | None = None, is_by_program: bool = False
    ) -> None:
        """Opens a backward: gradients are collected and sharded parameters gathered on demand until it ends."""
        require_state(not self.in_backward, self, "no open backward at the begin of one")
        self.take_unfrozen()
        now = self.passes.begin(ModelPhase.BACKWARD)
        now.is_by_program = is_by_program
        if self.reducer is not None:
            every = self.reducer.policy.every_micro_batch and not self._is_alone
            reaches, closes = self._positions(micro_batch)
            reduced = reaches if every and (micro_batch.part is None or micro_batch.part.reduces_each) else closes
            self.reducer.begin(
                now,
                reaches=reaches,
                reduces=frozenset(reduced if sync else ()),
                closes=frozenset(closes),
                unit=unit,
            )
        self._confirm(True)
        self.schedule.begin(now)

    def _positions(self, micro_batch: MicroBatch) -> tuple[Sequence[int], Sequence[int]]:
        """Returns the trained buckets that a backward may reach, and those that no later one of the update reaches."""
        part, everything = micro_batch.part, range(len(self.masters))
        if part is None:
            return everything, everything if micro_batch.is_last else ()
        params = [master.bucket.params for master in self.masters]
        reaches = [n for n in everything if any(p.requires_grad and p in part.reaches for p in params[n])]
        if not part.closes:  # the usual case
            return reaches, ()
        return reaches, [n for n in reaches if all(p in part.closes for p in params[n] if p.requires_grad)]

    def _confirm(self, confirms: bool) -> None:
        """Sets whether gathers also send the number of reductions that this rank has started in their group."""
        for gather in self._gathers:
            gather.confirms = confirms

    def take_unfrozen(self) -> None:
        """Starts to train parameters that were frozen at first and require gradients now. Every rank must call it.

        Parameters stay in place: their bucket gets a master and memory for gradients, and the optimizer gets its runs.
        """
        unfrozen = [b for b in self.buckets if not b.layout.trainable and any(p.requires_grad for p in b.params)]
        if self.reducer is None:
            return
        self.reducer.listen(self._late)  # further parameters of their buckets
        if not unfrozen:
            return
        self._drop_untrained_gradients()
        made = []
        for bucket in unfrozen:
            pairs = zip(bucket.params, bucket.layout.tiles, strict=True)
            if any(parameter.requires_grad and tile.param_group >= 0 for parameter, tile in pairs):
                made.append(self.states.train(bucket))
                self._late.append(len(self.reducer.buckets))
                self.reducer.add(bucket, self.states.destination(bucket))
        if made:
            assert self.updater is not None, "what has gradients has an updater"
            self.updater.add_masters(made)
            numel = sum(master.flat.numel() for master in made)
            log_dist(
                f"{len(made)} bucket(s) of parameters that were frozen are trained from now on: {numel:,} elements of "
                f"masters, gradients and optimizer state on this rank ({', '.join(m.bucket.label for m in made[:3])})"
            )

    def end_backward(self) -> Pass:
        """Finishes a backward: waits for its gathers and reductions, and frees gathered parameters; returns it."""
        require_state(self.in_backward, self, "an open backward")
        now = self.passes.current
        assert now is not None
        self.schedule.end(now)
        self._confirm(False)
        if self.reducer is not None:
            self.reducer.end(now)
        self.hooks.end_backward(now)
        self.passes.end()
        return now

    def drop_open_work(self, *, together: bool = True) -> bool:
        """Discards the open forward or backward after an exception; returns whether one was open.

        Args:
            together: Whether all ranks continue with this model; False: only this rank stops, without communication.

        Raises:
            CallOrderError: Another engine has taken the model over.
            DivergenceError: Other ranks did not fail, or not at the same point; raised there too.
        """
        if self.is_retired:
            raise CallOrderError(
                "this engine cannot be used any more: its model was given to another deepspeed.initialize, and the "
                "engine made there has it now; use that engine"
            )
        now = self.passes.current
        if now is None:
            return False
        is_mixed = self.reducer is not None and self.reducer.is_open and self.reducer.is_mixed
        # whether other ranks take part in transfers of the work that is left open
        gathers = any(bucket.is_sharded and bucket.group.size > 1 for bucket in self.buckets)
        reduces = self.reducer is not None and self.reducer.is_reducing
        is_agreed = self.groups.peers.size > 1 and (gathers or reduces)
        if together and is_agreed:
            is_mixed = agree_to_go_on(self.groups.peers, _describe(now), is_mixed)
        self.schedule.drop()
        self._confirm(False)
        if self.reducer is not None and self.reducer.is_open:
            self.reducer.drop(now, with_sums=is_mixed)
        self.hooks.abandon()
        self.passes.end()
        if together:
            log_dist(
                "the last forward or backward ended in an exception; its unfinished work was dropped",
                ranks=None if is_agreed or self.groups.peers.size == 1 else [-1],
                level=logging.WARNING,
            )
        return True

    @property
    def backward_is_running(self) -> bool:
        """Returns whether the caller is inside a backward, unlike ``in_backward`` after an exception in it."""
        return self.in_backward and is_inside_backward()

    def drop_failed_backward(self) -> None:
        """Discards a backward that an exception has left open. Every rank must do so, in any of its calls.

        Raises:
            DivergenceError: See :meth:`drop_open_work`.
        """
        if self.in_backward and not self.backward_is_running:
            self.drop_open_work()

    def leave_backward(self, call: str) -> None:
        """Does what :meth:`drop_failed_backward` does, before ``call``, which must lie between backwards.

        Raises:
            CallOrderError: It is made inside a backward.
            DivergenceError: See :meth:`drop_open_work`.
        """
        self.drop_failed_backward()
        if self.in_backward:
            raise CallOrderError(f"{call}: a backward is still running; call it after that has returned")

    # -- parameters --------------------------------------------------------------------------------------------------

    def leaf_parameters(self) -> set[nn.Parameter]:
        """Returns the parameters that are gathered together with a leaf module."""
        return {parameter for module in get_z3_leaf_modules(self.model) for parameter in module.parameters()}

    def master_of(self, bucket: Bucket) -> MasterBucket | None:
        """Returns the master weights of a bucket; None where it is not trained."""
        position = self.states.position_of(bucket)
        return None if position is None else self.masters[position]

    def gradients_of(self, bucket: Bucket) -> GradientBucket | None:
        """Returns the gradients of a bucket; None where it is not trained."""
        position = self.states.position_of(bucket)
        return None if position is None or self.reducer is None else self.reducer.buckets[position]

    def refuse_offloaded(self, call: str, *kinds: str) -> None:
        """Checks that the states that ``call`` works on are not on the host.

        Raises:
            CallOrderError: Some of these states are on the host.
        """
        if not self.offloaded:  # the usual case
            return
        missing = sorted(self.offloaded.intersection(kinds) if kinds else self.offloaded)
        if missing:
            raise CallOrderError(
                f"{call}: offload_states has moved {', '.join(missing)} to the host; call engine.reload_states(), or "
                "engine.wake() after engine.sleep(), first"
            )

    def refuse_open_blocks(self, call: str) -> None:
        """Checks that no ``GatheredParameters`` block is open, in which nothing else may change parameters.

        Raises:
            CallOrderError: Such a block is open.
        """
        if self.open_blocks:
            raise CallOrderError(
                f"{call}: called inside a GatheredParameters block on this model's parameters, whose end would undo "
                "the update or publish old values; leave the block first"
            )

    def free_gathered(self) -> None:
        """Reshards everything that is gathered, so that parameters may change."""
        self.hooks.free_all()

    def take_back_frozen(self) -> None:
        """Moves detached frozen parameters back into their buffers; the optimizer does so for trained ones."""
        for bucket in self.buckets:
            if not bucket.layout.trainable and bucket.take_back_changes():
                bucket.remember_values()

    def retire(self) -> None:
        """Releases the model to another engine; this runtime cannot be used any more."""
        if not self.is_retired:
            self.refuse_open_blocks("initialize")
            self.drop_open_work()
            self.free_gathered()
            self._release()
            self.groups.give_back()
            self.is_retired = True

    def destroy(self) -> None:
        """Removes every hook from the model and frees this runtime's memory; the parameters keep their values."""
        self.is_destroyed = True
        self._release()

    def _release(self) -> None:
        for bucket in self.buckets:
            # A tensor with a graph keeps its parameters alive, invisibly to the garbage collector. Through this
            # reference they would keep the engine alive for ever.
            bucket.end_training()
        self.hooks.close()
        for handle in (*self.handles, *self._untrained.handles):
            handle.remove()
        if self.reducer is not None:
            self.reducer.clear()
            self.reducer.remove()


def build_runtime(
    model: nn.Module, options: RuntimeOptions, groups: Groups, optimizer: torch.optim.Optimizer | None
) -> ZeroRuntime:
    """Moves the model's parameters into buckets and installs hooks. Every rank must call it, with the same model.

    The groups of the optimizer list this rank's runs of the masters afterwards, instead of the parameters.

    Args:
        model: The model; its parameters are changed in place and take rank 0's values.
        optimizer: The torch optimizer, or None. Its states become those of the runs.
    """
    if options.leaves is not None:
        mark_configured_leaves(model, options.leaves)  # may raise, so before an earlier engine loses the model
    addresses = [address for parameter in model.parameters() if (address := address_of(parameter)) is not None]
    for owner in {id(a.bucket.owner): a.bucket.owner for a in addresses if a.bucket.owner is not None}.values():
        owner.retire()  # an engine that had the model before
    states = ModelStates(model, options, groups, group_indices(optimizer))
    if optimizer is not None:
        move_to_runs(optimizer, states.masters)
    sharded = states.sharded
    agreement = Agreement(
        groups.gathering,
        [f"the parameters {bucket.label}" for bucket in states.buckets],
        name=type(model).__name__,
        serves=options.agreement == "serve",
        adapts=options.agreement == "adapt",
    )
    leaves = states.buckets_of_leaves()
    passes = PassTracker()
    schedule = GatherSchedule(sharded, passes, agreement, options.gathers, leaves.values(), states.layout.units)
    hooks = ForwardHooks(model, states.gathering_modules(leaves), sharded, schedule, passes)
    reducer = None
    if options.reduction is not None:
        reducer = GradientReducer(
            [master.bucket for master in states.masters],
            options.reduction,
            groups.peers,
            states.memory_tracker,
            [states.destination(master.bucket) for master in states.masters],
            passes=passes,
            agreement=agreement,
            layers=backward_comm.BackwardCommTracker(model),
            needs_one_order=bool(sharded) and any(group.gather.needs_one_order for group in groups),
            runs=MasterRunGradients(states.masters),
        )
    updater = None
    if optimizer is not None and reducer is not None and options.update is not None:
        updater = Updater(
            optimizer,
            states.masters,
            reducer,
            options.update,
            placement=options.placement,
            groups=groups,
            agreement=agreement,
            memory_tracker=states.memory_tracker,
        )
    runtime = ZeroRuntime(
        model,
        options,
        groups,
        states,
        agreement=agreement,
        schedule=schedule,
        hooks=hooks,
        reducer=reducer,
        updater=updater,
        passes=passes,
    )
    if options.placement.shard_params or states.sharded:
        runtime.handles += guard_state_dicts(model)
    runtime.handles += guard_parts(model)
    return runtime


def _describe(now: Pass) -> str:
    if now.phase is not ModelPhase.BACKWARD:
        return f"a forward, after {len(now.issued)} gathers"
    reductions = 0 if now.reductions is None else now.reductions.cursor
    return f"a backward, after {len(now.issued)} gathers and {reductions} reductions"


class OriginalParameters:
    """The parameters of a model by module and name, as they were when the engine was made."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (f"{prefix}.{name}" if prefix else name, module, name, parameter)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def restore(self) -> None:
        """Copies values of replaced parameters, as from ``load_state_dict(assign=True)``, into the original objects.

        The new objects would not be trained: gradients, masters and hooks belong to the original parameters.
        """
        for path, module, name, parameter in self._places:
            present = module._parameters.get(name)
            if present is not parameter and isinstance(present, nn.Parameter):
                _restore(path, module, name, parameter, present)


def _restore(path: str, module: nn.Module, name: str, parameter: nn.Parameter, present: nn.Parameter) -> None:
    address = address_of(parameter)
    if address is None or address.bucket.is_sharded or present.shape != parameter.shape:
        warn_once(
            f"replaced:{path}",
            f"the parameter {path!r} was replaced by another one, of shape {tuple(present.shape)}, after "
            f"deepspeed.initialize; the engine continues training the former one, of shape {full_shape(parameter)}. "
            "Replace parameters before initialize, or write into them",
            ranks=[-1],
        )
        return
    with torch.no_grad():
        parameter.copy_(present)
    module._parameters[name] = parameter
    warn_once(
        f"taken back:{path}",
        f"the parameter {path!r} was replaced by another object (by load_state_dict with assign, or an assignment); "
        "its values were copied into the one that is trained, at the cost of a copy",
        ranks=[-1],
    )
