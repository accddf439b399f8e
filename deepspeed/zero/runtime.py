"""One model under ZeRO: buckets, schedule, hooks and gradients, built once and driven by the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.agreement import Agreement
from deepspeed.comm.transport import LocalTransport, Piece
from deepspeed.errors import CallOrderError, DeepSpeedConfigError, OffloadError, ShardedAccessError
from deepspeed.logging import log_dist, logger
from deepspeed.zero.access.views import install_views, mark_module
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.calls import agree_to_go_on
from deepspeed.zero.construction.filling import first_values
from deepspeed.zero.construction.materialize import Materializer
from deepspeed.zero.construction.provisional import note_freed
from deepspeed.zero.describe import describe
from deepspeed.zero.formula import MemoryFormula
from deepspeed.zero.gradient_bucket import GradientBucket
from deepspeed.zero.gradients import GradientReducer
from deepspeed.zero.group import Groups
from deepspeed.zero.holder import address_of, full_shape
from deepspeed.zero.hooks import ForwardHooks
from deepspeed.zero.landing import Landing
from deepspeed.zero.layout import Limits, ModelLayout, UnitTile, model_layout
from deepspeed.zero.leaf import get_z3_leaf_modules
from deepspeed.zero.masters import MasterBucket
from deepspeed.zero.micro_batch import MicroBatch
from deepspeed.zero.outputs import tensors_in
from deepspeed.zero.parts import tile_of
from deepspeed.zero.placement import Home, Placement
from deepspeed.zero.places import Places
from deepspeed.zero.reduction_policy import ReductionPolicy
from deepspeed.zero.schedule import GatherLimits, GatherSchedule
from deepspeed.zero.sharded_parameter import ShardedParameter, note_placeholders
from deepspeed.zero.storage import Ledger, Memory
from deepspeed.zero.units import Unit, find_units


@dataclass(frozen=True)
class RuntimeOptions:
    """What the configuration decides.

    Attributes:
        placement: The ZeRO row.
        layout: Sizes that decide which parameters share a bucket.
        gathers: Sizes that decide when buckets are gathered and freed.
        reduction: How gradients are combined; None where nothing is trained.
        granularity: Elements up to which a block is never taken apart into smaller units.
        compute_dtype: Dtype of a parameter, by name and parameter.
        whole_tensors: The optimizer needs parameters in their shape (allowed where nothing is sharded).
        device: Where the model computes.
        param_memories: Where compute shards are kept, for every home in use.
        master_memories: Where masters and optimizer states are kept, for every home in use.
        landing: Makes what brings the reduced gradients of one bucket to their home.
        state_itemsizes: For every per-element optimizer state, as far as it is known beforehand, its bytes per fp32
            element.
    """

    placement: Placement
    layout: Limits
    gathers: GatherLimits
    reduction: ReductionPolicy | None
    granularity: int
    compute_dtype: Callable[[str, torch.Tensor], torch.dtype]
    whole_tensors: bool
    device: torch.device
    param_memories: Mapping[Home, Memory]
    master_memories: Mapping[Home, Memory]
    landing: Callable[[Home, Ledger], Landing]
    state_itemsizes: tuple[int, ...] = ()


class ZeroRuntime:
    """Owns the sharded life of one model.

    Attributes:
        groups: The ranks that share parameters, and those that decide together.
        layout: Where every parameter lives.
        buckets: In model order.
        masters: One per trainable bucket, in the same order as ``reducer.buckets``.
        placed: Where the states of each bucket live, by index.
        ledger: Books of the memory.
        reducer: The gradients; None where nothing is trained.
        in_backward: Whether a backward of this model is running.
        optimizer: The ZeRO optimizer; set by the engine once it exists.
        places: The parameters as the model had them.
        away: Kinds of states that ``offload_states`` has moved to the host.
        open_blocks: ``GatheredParameters`` blocks that hold parameters of this model.
        is_retired: Whether another engine has taken the model over.
    """

    def __init__(
        self,
        model: nn.Module,
        options: RuntimeOptions,
        groups: Groups,
        param_groups: Mapping[int, int],
    ) -> None:
        """Moves the model's parameters into buckets. Every rank must call it, with the same model.

        Args:
            model: The model; its parameters are changed in place and take rank 0's values.
            options: Decisions of the configuration.
            groups: The ranks that share parameters, and those that decide together.
            param_groups: ``id(parameter)`` to index of its optimizer param group.
        """
        self.model = model
        self.placement = options.placement
        self.ledger = Ledger()
        self.in_backward = False
        self.optimizer: Any = None
        self.open_blocks = 0
        self.is_retired = False
        self.away: set[str] = set()
        self.groups = groups
        self._options = options
        self._group_names = {
            parameter: groups.name_of(name, describe(name, parameter)) for name, parameter in model.named_parameters()
        }
        self._retire_earlier_owners(model)
        self._materializer = Materializer(model, options.device)
        units = find_units(model, options.granularity)
        self.layout = self._make_layout(units, param_groups)
        self.placed = options.placement.of_buckets(self.layout)
        self._open_memories()
        self.param_names = {parameter: name for unit in units for name, parameter in unit.params.items()}
        self.masters: list[MasterBucket] = []
        self._trained: dict[int, int] = {}  # index of a bucket to its position among the masters
        self.buckets = self._make_buckets(units)
        self._materializer.finish()
        self._sharded = sharded = [bucket for bucket in self.buckets if bucket.is_sharded]
        self.agreement = Agreement(groups.gathering, self._describe_bucket)
        leaves = self._leaves()
        self.schedule = GatherSchedule(sharded, self.agreement, options.gathers, leaves.values())
        self.hooks = ForwardHooks(
            model,
            self._sharded_units(units, leaves),
            sharded,
            self.schedule,
            in_backward=lambda: self.in_backward,
            on_outputs=self.watch,
        )
        self.reducer: GradientReducer | None = None
        if options.reduction is not None:
            self.reducer = GradientReducer(
                [master.bucket for master in self.masters],
                options.reduction,
                groups.peers,
                self.ledger,
                [self._landing(master.bucket) for master in self.masters],
                on_packed=self.hooks.gradients_arrived,
                on_stray=self._stray_gradient,
                may_block=lambda: self.schedule.expects_no_gather,
                needs_one_order=bool(sharded) and any(group.gather.needs_one_order for group in groups),
            )
        self.on_stray_backward: Callable[[], None] | None = None
        self._without_owner: set[int] = set()
        self.places = Places(model)
        self._late: list[int] = []  # positions of buckets that are trained since one of their parameters was unfrozen
        self._handles = self._drop_gradients_without_owner()
        if self.placement.shard_params:
            for module in model.modules():
                mark_module(module)
            self._handles.append(model.register_state_dict_post_hook(_note_placeholders))
            # On every module, as loaders that gather module by module call each one's own part of load_state_dict.
            for module in model.modules():
                if next(module.parameters(recurse=False), None) is not None:
                    self._handles.append(module.register_load_state_dict_pre_hook(_refuse_loading))

    # -- construction ------------------------------------------------------------------------------------------------

    def _retire_earlier_owners(self, model: nn.Module) -> None:
        """An engine that had the model before gives its parameters up."""
        addresses = [address for p in model.parameters() if (address := address_of(p)) is not None]
        for owner in {id(a.holder.owner): a.holder.owner for a in addresses if a.holder.owner is not None}.values():
            owner.retire()

    def _make_layout(self, units: list[Unit], param_groups: Mapping[int, int]) -> ModelLayout:
        dtype_of = self._options.compute_dtype

        def entry(name: str, parameter: nn.Parameter) -> UnitTile:
            group = param_groups.get(id(parameter), -1)
            dtype = str(dtype_of(name, parameter)).removeprefix("torch.")
            tile = tile_of(name, full_shape(parameter), group, parameter)
            return UnitTile(tile, dtype, parameter.requires_grad and group >= 0, self._group_names[parameter])

        return model_layout(
            [[entry(name, parameter) for name, parameter in unit.params.items()] for unit in units],
            sharing={group.name: group.sharing for group in self.groups},
            limits=self._options.layout,
        )

    def _open_memories(self) -> None:
        """Tells each memory what it will hold; a lack of space on any rank is an error on all."""
        formula = MemoryFormula(self.layout, self.placement, host_is_device=self.host_is_device)
        failure: OffloadError | None = None
        try:
            for home, memory in self._options.param_memories.items():
                memory.open(formula.compute_tensors(home), self.ledger)
            for home, memory in self._options.master_memories.items():
                memory.open(formula.master_tensors(self._options.state_itemsizes, home), self.ledger)
        except OffloadError as error:
            failure = error
        failed = self.groups.job.gather_small(
            torch.tensor([failure is not None], dtype=torch.int64), channel="call", label="initialize"
        ).view(-1)
        if failure is not None:
            raise failure
        if bool(failed.any()):
            ranks = torch.nonzero(failed).view(-1).tolist()
            raise OffloadError(f"the files for offloaded states could not be made on rank(s) {ranks}; see their errors")

    def staging_bytes(self) -> int:
        """Host memory of the buffers between files and the rest."""
        memories = (*self._options.param_memories.values(), *self._options.master_memories.values())
        return sum(memory.staging_bytes for memory in memories)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self._options.device

    @property
    def host_is_device(self) -> bool:
        """Whether the model computes in host memory."""
        return get_accelerator().shares_host_memory(self.device)

    def _landing(self, bucket: Bucket) -> Landing:
        return self._options.landing(self.placed[bucket.index].gradient_home, self.ledger)

    def _make_buckets(self, units: list[Unit]) -> list[Bucket]:
        by_name = {name: parameter for unit in units for name, parameter in unit.params.items()}
        made = []
        for layout in self.layout.buckets:
            params = [by_name[tile.name] for tile in layout.tiles]
            placed = self.placed[layout.index]
            bucket = Bucket(
                layout,
                params,
                dtype=getattr(torch, layout.dtype),
                device=self._options.device,
                group=self.groups[layout.group],
                is_sharded=placed.is_sharded,
                ledger=self.ledger,
                memory=self._options.param_memories[placed.param_home],
            )
            was_sharded = any(isinstance(parameter, ShardedParameter) for parameter in params)
            self._fill(bucket)
            made.append(bucket)
            if was_sharded and self.host_is_device:
                note_freed(layout.slice_numel * bucket.dtype.itemsize)
        return made

    def _fill(self, bucket: Bucket) -> None:
        """Gives a new bucket its first values, and its master the values from before the cast."""
        layout = bucket.layout
        self._materializer.materialize(bucket.params)
        with torch.no_grad():
            original = first_values(
                layout,
                bucket.params,
                group=bucket.group,
                device=bucket.device,
                default_dtype=bucket.dtype,
                cut=bucket.is_sharded,
            )
            same = bucket.group.combine
            if same is not None:
                same.move([Piece(0, None, original)], label=f"the first values of {bucket.label}")
            bucket.take_first_values(original)
            self._own(bucket)
            if layout.trainable:
                self._make_master(bucket, original)

    def _make_master(self, bucket: Bucket, original: torch.Tensor) -> MasterBucket:
        master = MasterBucket(
            bucket,
            is_sharded=self.placement.shard_master and bucket.group.size > 1,
            original=original,
            ledger=self.ledger,
            whole_tensors=self._options.whole_tensors,
            memory=self._options.master_memories[self.placed[bucket.index].master_home],
        )
        self.masters.append(master)
        self._trained[bucket.index] = len(self.masters) - 1
        return master

    def _own(self, bucket: Bucket) -> None:
        """Parameters know from now on where their values are kept."""
        bucket.owner = self
        bucket.is_partitioned = self.placement.shard_params
        bucket.take_addresses()
        if bucket.is_partitioned:
            install_views()

    def _leaves(self) -> dict[nn.Module, list[Bucket]]:
        """The leaf modules with everything sharded that they use, tied weights of other units included."""
        holders = {parameter: bucket for bucket in self._sharded for parameter in bucket.params}
        found = {}
        for module in get_z3_leaf_modules(self.model):
            used = {holders[parameter] for parameter in module.parameters() if parameter in holders}
            found[module] = sorted(used, key=lambda bucket: bucket.index)
        return found

    def _sharded_units(
        self, units: list[Unit], leaves: dict[nn.Module, list[Bucket]]
    ) -> list[tuple[nn.Module, list[Bucket]]]:
        found = dict(leaves)
        for unit, indices in zip(units, self.layout.units, strict=True):
            found.setdefault(unit.module, [self.buckets[i] for i in indices if self.buckets[i].is_sharded])
        return [*self._holders_of_units(units), *((module, sharded) for module, sharded in found.items() if sharded)]

    def _holders_of_units(self, units: list[Unit]) -> list[tuple[nn.Module, list[Bucket]]]:
        """Modules between the root and the units: one called by itself (an encoder) is the outermost forward then."""
        known = {unit.module for unit in units}
        for unit in units:
            if not unit.is_flat:
                known.update(unit.module.modules())
        sharded = {parameter for bucket in self.buckets if bucket.is_sharded for parameter in bucket.params}
        return [
            (module, [])
            for module in self.model.modules()
            if module not in known and any(parameter in sharded for parameter in module.parameters())
        ]

    def _describe_bucket(self, index: int) -> str:
        return f"the parameters {self.buckets[index].label}"

    def _drop_gradients_without_owner(self) -> list[RemovableHandle]:
        """Parameters that require gradients and belong to no optimizer group: their gradients are of no use."""
        handles, names = [], []
        for bucket in self.buckets:
            for parameter, tile in zip(bucket.params, bucket.layout.tiles, strict=True):
                if tile.param_group < 0 and parameter.requires_grad and id(parameter) not in self._without_owner:
                    self._without_owner.add(id(parameter))
                    handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
                    names.append(tile.name)
        if names and self.reducer is not None:
            log_dist(
                f"{len(names)} parameter(s) require gradients but are in no param group of the optimizer, so they are "
                f"not trained: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            )
        return handles

    # -- backward ----------------------------------------------------------------------------------------------------

    def watch(self, outputs: Any, entry: int = 0) -> None:
        """Lets a backward through what a training forward returned announce itself, whoever starts it.

        Args:
            outputs: What it returned.
            entry: Number of the module among those that may be called by themselves; 0 is the model.
        """
        for tensor in tensors_in(outputs):
            if tensor.requires_grad and not tensor.is_leaf:  # on a parameter hooks would pile up, forward by forward
                tensor.register_hook(lambda _gradient: self._reached(entry))

    def _reached(self, entry: int) -> None:
        self._stray_gradient()
        if self.in_backward:
            self.hooks.reach(entry)

    def begin_backward(self, micro_batch: MicroBatch, *, sync: bool) -> None:
        """Opens a backward: gradients are collected and sharded parameters gathered on demand until it ends.

        Args:
            micro_batch: Where it stands in its update.
            sync: False inside ``no_sync``: nothing is reduced.
        """
        assert not self.in_backward
        self.take_unfrozen()
        self.in_backward = True
        if self.reducer is not None:
            alone = all(isinstance(group.reduce, LocalTransport) for group in self.groups)
            every = self.reducer.policy.every_micro_batch and not alone
            self.reducer.begin(reduce_now=sync and (micro_batch.is_last or every), is_last=micro_batch.is_last)
        self._confirm(True)
        self.schedule.begin("backward")

    def _confirm(self, confirms: bool) -> None:
        """Whether gathers carry along how many reductions of their group have been started."""
        for group in self.groups:
            group.gather.confirms = confirms

    def take_unfrozen(self) -> None:
        """Parameters that were frozen when the engine was made and require gradients now. Every rank must call it.

        Nothing moves: their bucket gets a master and room for gradients, and the optimizer gets its runs.
        """
        unfrozen = [b for b in self.buckets if not b.layout.trainable and any(p.requires_grad for p in b.params)]
        if self.reducer is None:
            return
        self.reducer.listen(self._late)  # further parameters of their buckets
        if not unfrozen:
            return
        self._handles += self._drop_gradients_without_owner()
        made = []
        for bucket in unfrozen:
            pairs = zip(bucket.params, bucket.layout.tiles, strict=True)
            if any(parameter.requires_grad and tile.param_group >= 0 for parameter, tile in pairs):
                made.append(self._train(bucket))
        if made:
            self.optimizer.add_masters(made)
            numel = sum(master.flat.numel() for master in made)
            log_dist(
                f"{len(made)} bucket(s) of parameters that were frozen are trained from now on: {numel:,} elements of "
                f"masters, gradients and optimizer state on this rank ({', '.join(m.bucket.label for m in made[:3])})"
            )

    def _train(self, bucket: Bucket) -> MasterBucket:
        assert self.reducer is not None
        if bucket.dtype.is_complex:
            raise DeepSpeedConfigError(
                f"the frozen parameters of {bucket.label} are {bucket.dtype} and cannot be trained from now on: "
                "expected a real dtype, in which gradients are combined and masters kept. Keep requires_grad false"
            )
        bucket.layout = replace(bucket.layout, trainable=True)
        buckets = tuple(b.layout for b in self.buckets)
        self.layout = replace(self.layout, buckets=buckets)
        self.placed = self.placement.of_unfrozen(self.layout, self.placed, bucket.index)
        with torch.no_grad(), torch.inference_mode(False):
            master = self._make_master(bucket, bucket.shard if bucket.is_sharded else bucket.full.tensor)
        self._late.append(len(self.reducer.buckets))
        self.reducer.add(bucket, self._landing(bucket))
        return master

    def end_backward(self) -> None:
        """Settles the backward: leftover gathers, leftover reductions; frees what it had gathered."""
        assert self.in_backward
        self.schedule.end()
        self._confirm(False)
        if self.reducer is not None:
            self.reducer.end()
        self.hooks.end_backward()
        self.in_backward = False

    def drop_open_work(self, *, together: bool = True) -> bool:
        """After an exception left a forward or backward open: throws away what is half done.

        Args:
            together: The ranks go on with this model; False: this one is leaving, and asks nobody.

        Returns:
            Whether there was anything.

        Raises:
            CallOrderError: Another engine has taken the model over.
            DivergenceError: Other ranks did not fail, or not at the same point; raised there too.
        """
        if self.is_retired:
            raise CallOrderError(
                "this engine cannot be used any more: its model was given to another deepspeed.initialize, and the "
                "engine made there has it now"
            )
        was_open = self.in_backward or self.schedule.in_segment or self.hooks.in_forward
        if was_open:
            is_mixed = self.reducer is not None and self.reducer.is_open and self.reducer.is_mixed
            if together and self._peers_rely_on_open_work:
                is_mixed = agree_to_go_on(self.groups.peers, self._describe_open_work(), is_mixed)
            self.schedule.drop()
            self._confirm(False)
            if self.reducer is not None and self.reducer.is_open:
                self.reducer.drop(with_sums=is_mixed)
            self.in_backward = False
            self.hooks.abandon()
            if together:
                logger.warning("the last forward or backward ended in an exception; what it had half done was dropped")
        return was_open

    @property
    def backward_is_running(self) -> bool:
        """Whether this is inside a backward; one that an exception has ended is open until it is dropped."""
        return self.in_backward and torch._C._current_graph_task_id() != -1

    def drop_failed_backward(self) -> None:
        """Throws away what an exception has left of a backward; every rank must come to it, in whichever call.

        Raises:
            DivergenceError: See :meth:`drop_open_work`.
        """
        if self.in_backward and not self.backward_is_running:
            self.drop_open_work()

    def leave_backward(self, call: str) -> None:
        """Before ``call``, whose place is between backwards: as :meth:`drop_failed_backward`.

        Raises:
            CallOrderError: It is made inside a backward.
            DivergenceError: See :meth:`drop_open_work`.
        """
        self.drop_failed_backward()
        if self.in_backward:
            raise CallOrderError(f"{call}: a backward is still running; call it after that has returned")

    @property
    def _peers_rely_on_open_work(self) -> bool:
        """Whether what an exception left open has transfers that other ranks take part in."""
        gathers = any(bucket.group.size > 1 for bucket in self._sharded)
        reduces = self.reducer is not None and self.reducer.is_reducing
        return self.groups.peers.size > 1 and (gathers or reduces)

    def _describe_open_work(self) -> str:
        if not self.in_backward:
            return f"a forward, after {self.schedule.num_issued} gathers"
        sent = self.reducer.num_sent if self.reducer is not None else 0
        return f"a backward, after {self.schedule.num_issued} gathers and {sent} reductions"

    def _stray_gradient(self) -> None:
        """Something of a backward is there that nobody has opened, or that is open."""
        if self.on_stray_backward is not None:
            self.on_stray_backward()

    # -- parameters --------------------------------------------------------------------------------------------------

    def leaf_parameters(self) -> set[nn.Parameter]:
        """Parameters that are gathered together with a leaf module."""
        return {parameter for module in get_z3_leaf_modules(self.model) for parameter in module.parameters()}

    def master_of(self, bucket: Bucket) -> MasterBucket | None:
        """The master weights of a bucket; None where it is not trained."""
        position = self._trained.get(bucket.index)
        return None if position is None else self.masters[position]

    def gradients_of(self, bucket: Bucket) -> GradientBucket | None:
        """The gradients of a bucket; None where it is not trained."""
        position = self._trained.get(bucket.index)
        return None if position is None or self.reducer is None else self.reducer.buckets[position]

    def refuse_away(self, call: str, *kinds: str) -> None:
        """Raises while states that ``call`` works on are on the host.

        Args:
            call: For the message.
            *kinds: The kinds that it needs; none: all.
        """
        missing = sorted(self.away.intersection(kinds) if kinds else self.away)
        if missing:
            raise CallOrderError(
                f"{call}: offload_states has moved {', '.join(missing)} to the host; call engine.reload_states() first"
            )

    def refuse_open_blocks(self, call: str) -> None:
        """Raises inside ``GatheredParameters``, where parameters must not change otherwise."""
        if self.open_blocks:
            raise CallOrderError(
                f"{call}: called inside a GatheredParameters block on this model's parameters, whose end would undo "
                "the update or publish old values; leave the block first"
            )

    def free_gathered(self) -> None:
        """Reshards everything that is gathered, so that parameters may change."""
        self.hooks.free_all()

    def take_back_frozen(self) -> None:
        """Brings frozen parameters that something detached back into their buffers; trained ones the optimizer does."""
        for bucket in self.buckets:
            if not bucket.layout.trainable and bucket.take_back_changes():
                bucket.remember_values()

    def retire(self) -> None:
        """Another engine takes the model over: this one lets go of it and cannot be used any more."""
        if not self.is_retired:
            self.refuse_open_blocks("initialize")
            self.drop_open_work()
            self.free_gathered()
            self.destroy()
            self.is_retired = True

    def destroy(self) -> None:
        """Takes every hook from the model and gives its memory back; the parameters keep what they hold."""
        self.hooks.remove()
        for handle in self._handles:
            handle.remove()
        if self.reducer is not None:
            self.reducer.clear()
            self.reducer.remove()


def _note_placeholders(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """One line where a state dict is not what it looks like; a module that is nested in another says it too."""
    if any(isinstance(value, torch.Tensor) and value.shape == (0,) for value in state.values()):
        note_placeholders("state_dict()")


def _refuse_loading(module: nn.Module, state: dict[str, Any], prefix: str, *_others: Any) -> None:
    """Torch's own complaint would be that every shape differs."""
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, ShardedParameter) and prefix + name in state:
            raise ShardedAccessError(
                f"load_state_dict: {prefix + name!r} and others are sharded (ZeRO stage 3), so there is nothing to "
                "copy into. Use engine.load_checkpoint, or load on rank 0 inside "
                "`with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0)`"
            )


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
