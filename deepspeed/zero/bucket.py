"""The bucket: one flat buffer of compute parameters and its life.

A sharded bucket goes ``SHARDED -> GATHERING -> FULL -> SHARDED``; ``GATHERING -> SHARDED`` when a gather is abandoned.
A resident bucket (stages below 3, persistent buckets, a group of one rank) is always ``FULL``.

============  ==========================================  =======================================
state         what the model's parameters hold            memory alive
============  ==========================================  =======================================
SHARDED       no values, class ShardedParameter           the shard
GATHERING     the same                                    the shard and the full buffer
FULL          views of the full buffer, plain Parameter   the shard and the full buffer
============  ==========================================  =======================================

Only the methods below change the state; each raises in any state but the one that it starts from. The full buffer is
one tensor object for the life of the bucket; ``FlatBuffer.free`` and ``allocate`` resize its storage to nothing and
back. So a gather fills the views. If a program still has a view at ``free``, the memory is left to it, and the buffer
gets other memory.

``mark_full`` makes the ``data`` of a parameter a view and gives it back its class. ``mark_sharded`` makes ``data`` a
placeholder and the class ``ShardedParameter`` (``zero.address``). An operation that reads such a parameter calls the
``gatherer`` of its bucket, which makes it full inside the engine's forward and backward; elsewhere the operation
raises. A parameter finds its bucket by its *address* (``set_address``): the bucket, and its number in there.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import compress
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from deepspeed.comm.codecs.coded import CodedTransport
from deepspeed.comm.transports.transport import DoneWork, Transport, Work, transfer_key
from deepspeed.errors import CallOrderError, require_state
from deepspeed.logging import log_dist, warn_once
from deepspeed.zero.address import Gatherer, Loan, State, mark_full, mark_sharded, remember_class, set_address
from deepspeed.zero.construction.provisional import copy_sharded
from deepspeed.zero.float8_gather import Float8Transport
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.placement import Tier
from deepspeed.zero.ranges import in_profile
from deepspeed.zero.storage import FlatBuffer, LoanedBuffer, Memory, MemoryTracker, StorageKind
from deepspeed.zero.tiling.layout import BucketLayout, Fragment

T = TypeVar("T")
_GATHER = 0


class Bucket:
    """The parameters of one ``BucketLayout`` on this rank."""

    def __init__(
        self,
        layout: BucketLayout,
        params: list[torch.nn.Parameter],
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: BucketGroup,
        is_sharded: bool,
        memory_tracker: MemoryTracker,
        memory: Memory,
    ) -> None:
        self.layout = layout  # where each parameter lies
        self.index = layout.index
        self.params = params  # the model's parameters, in layout order
        self.dtype = dtype
        self.device = device
        self.group = group
        self.memory = memory  # the memory of ``shard``
        self._memory_tracker = memory_tracker
        self.is_sharded = is_sharded  # whether the full buffer is freed between uses
        # Whether the placement shards parameters, so that the ecosystem's ``ds_*`` attributes exist; small parameters
        # and those of a group of one may be resident anyway.
        self.is_partitioned = is_sharded
        self.loans: dict[int, Loan] = {}  # parameters that ``GatheredParameters`` keeps full, by tile
        self.users = 0  # open forward scopes and pins that use the bucket
        self.pins = 0  # contexts that keep the whole bucket full
        self.live_handles = 0  # saved tensors of autograd that will need the bucket again
        self.gradients_in = False  # whether the running backward has delivered the gradient of every parameter
        self.is_kept = False  # whether it stays FULL after its forward, because its backward is near
        # makes a parameter full that an operation reads, if that is allowed now; set by ``ForwardHooks``
        self.gatherer: Gatherer | None = None
        # called with index, elements, former and new state; set by ``GatherSchedule``, which counts what is gathered
        self.on_change: Callable[[int, int, State, State], None] | None = None
        self._owner: Any = None  # a weak reference once it no longer trains
        # FULL with values that went through a codec: close to those of the shards, the same on all ranks
        self.is_decoded = False
        # For gathers that the model uses, with a codec if there is one; `transport` has the same ranks and no codec.
        self._compute_transport = group.parameter_transport(trainable=layout.trainable)
        self._work: Work | None = None
        self._read: Work = DoneWork()
        self._gathers = self._publishes = 0
        if is_sharded:
            memory_tracker.add(StorageKind.COMPUTE, memory.tier, layout.slice_numel * dtype.itemsize)
            self.shard = memory.empty(layout.slice_numel, dtype, f"the parameters {self.label}")
            memory_tracker.claim(self.shard)
        if is_sharded and memory.lends and self.transport.size == 1:
            self.full: FlatBuffer = LoanedBuffer(self.shard)
        else:
            self.full = FlatBuffer(
                layout.numel,
                dtype,
                device,
                kind=StorageKind.GATHERED if is_sharded else StorageKind.COMPUTE,
                memory_tracker=memory_tracker,
                allocate=not is_sharded,
            )
        self._views = self.full.views(layout.starts, [tile.shape for tile in layout.tiles])
        self._empties = [torch.empty(0, dtype=dtype, device=device) for _ in params] if is_sharded else []
        self._shapes = [_shape_only(tile.shape, dtype, device) for tile in layout.tiles if is_sharded]
        self._placeholders = self._empties
        if is_sharded:
            self.full.guard(self._views)
        else:
            self.shard = self.transport.my_slice(self.full.tensor)
        self.state = State.SHARDED if is_sharded else State.FULL
        self._classes = [remember_class(parameter) for parameter in params]
        self._fingerprints: list[tuple[int, int]] = []

    def __repr__(self) -> str:
        return f"<Bucket {self.index} {self.state.value} {self.layout.numel} x {self.layout.dtype}>"

    @property
    def owner(self) -> Any:
        """The ZeRO runtime that trains the parameters, or has done so and is still there; else None."""
        return self._owner() if isinstance(self._owner, weakref.ref) else self._owner

    @property
    def is_trained(self) -> bool:
        """Returns whether a runtime has the parameters now."""
        return self._owner is not None and not isinstance(self._owner, weakref.ref)

    def begin_training(self, owner: Any) -> None:
        """Called when a runtime takes the parameters, which keep it alive."""
        self._owner = owner

    def end_training(self) -> None:
        """Called when the runtime is done with the parameters; it lives on as long as others keep it."""
        if self.is_trained:
            self._owner = weakref.ref(self._owner)

    @property
    def transport(self) -> Transport:
        """Carries the parameters, without a codec."""
        return self.group.gather

    def fragment(self, tile: int) -> Fragment | None:
        """Returns the fragment of a tile that lies in this rank's slice, or None."""
        return self.layout.fragment(tile, self.transport.rank)

    @property
    def label(self) -> str:
        """Names the bucket in messages by its parameters."""
        names = [tile.name for tile in self.layout.tiles]
        return names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)} parameters)"

    @property
    def module_name(self) -> str:
        """Names the bucket in profiles by the module that has all of its parameters; by these, if that is the model."""
        paths = [tile.name.split(".")[:-1] for tile in self.layout.tiles]
        common = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
        return ".".join(level[0] for level in common) or self.label

    @property
    def share(self) -> tuple[int, int]:
        """First and last-plus-one element of what falls to this rank where every element falls to exactly one."""
        return self.layout.share_bounds(self.group.place, self.group.size * self.group.replicas)

    @property
    def shared_values(self) -> torch.Tensor:
        """The compute parameters in :attr:`share`, 1-D, as a view."""
        lower, upper = self.share
        base = self.layout.slice_bounds(self.transport.rank)[0] if self.is_sharded else 0
        values = self.shard if self.is_sharded else self.full.tensor
        return values[lower - base : upper - base]

    def take_first_values(self, values: torch.Tensor) -> None:
        """Copies the first values and makes the parameters views of the bucket.

        Args:
            values: 1-D: this rank's slice for a sharded bucket, else the whole buffer. Its padding must be zeros: norms
                and optimizers run over it.
        """
        with torch.no_grad():
            if self.is_sharded:
                self.memory.write(self.shard, values.to(self.dtype))
                self.memory.settle()
                for parameter, empty in zip(self.params, self._empties, strict=True):
                    mark_sharded(parameter, empty)
            else:
                self.full.tensor.copy_(values)
                for parameter, view, own_class in zip(self.params, self._views, self._classes, strict=True):
                    mark_full(parameter, view, own_class)
        self.remember_values()

    def take_addresses(self) -> None:
        """Gives the parameters addresses in this bucket."""
        for tile, parameter in enumerate(self.params):
            set_address(parameter, self, tile)

    def store_shard(self) -> None:
        """Copies this rank's slice of the full buffer into the shard (after the full values changed)."""
        require_state(self.state is State.FULL and not self.is_decoded, self, "FULL with exact values to store")
        if self.is_sharded:
            self.memory.write(self.shard, self.transport.my_slice(self.full.tensor))
            self.memory.settle()
            self.note_written()

    def note_written(self) -> None:
        """Called when all ranks have written to the shard, outside of an update."""
        if isinstance(self._compute_transport, Float8Transport):
            self._compute_transport.is_stale = True

    def gather_in_float8(self, tiles: Collection[int], target: torch.dtype) -> Float8Transport | None:
        """Makes gathers that the model uses send some weights in float8; returns None where nothing is gathered."""
        if not (self.is_sharded and tiles and self.transport.size > 1):
            return None
        made = Float8Transport(self._compute_transport, self.layout, tiles, target, lambda: self.shard)
        self._compute_transport = made
        return made

    def _next_key(self) -> int:
        self._gathers += 1
        return transfer_key(self.transport.owner, self.index, _GATHER, self._gathers)

    def announce(self) -> None:
        """Announces a gather."""
        if self.state is State.SHARDED:
            self.memory.announce(self.shard)

    def _change_state(self, state: State) -> None:
        if self.on_change is not None:
            self.on_change(self.index, self.layout.numel, self.state, state)
        self.state = state

    # -- transitions -------------------------------------------------------------------------------------------------

    @in_profile("gather")
    def start_gather(self, *, exactly: bool = False) -> None:
        """SHARDED -> GATHERING: allocates the full buffer and requests the other slices.

        Args:
            exactly: Gather without a codec, for callers other than the model.
        """
        require_state(self.state is State.SHARDED, self, "SHARDED at the start of a gather")
        self.full.allocate()
        key = self._next_key()
        with self.memory.ordered():
            self._read = self.memory.read(self.shard, self.transport.my_slice(self.full.tensor))
            transport = self.transport if exactly else self._compute_transport
            self._work = transport.all_gather(self.full.tensor, key=key, label=f"the gather of {self.label}")
        self.is_decoded = not transport.is_exact
        self._change_state(State.GATHERING)

    def _await_gather(self) -> None:
        require_state(self.state is State.GATHERING, self, "GATHERING at the end of a gather")
        self._read.wait()
        if self._work is not None:
            self._work.wait()
        self._work = None

    @in_profile("wait for gather")
    def finish_gather(self) -> None:
        """GATHERING -> FULL: waits, and gives the parameters their values."""
        self._await_gather()
        for parameter, view, own_class in self._without_loans(
            zip(self.params, self._views, self._classes, strict=True)
        ):
            mark_full(parameter, view, own_class)
        self._change_state(State.FULL)
        self.remember_values()

    @in_profile("gather")
    def repeat_gather(self) -> None:
        """FULL -> FULL: takes part in a gather that only other ranks need; the same values arrive."""
        require_state(self.state is State.FULL and self.is_sharded, self, "sharded and FULL to be gathered again")
        key, label = self._next_key(), f"the gather of {self.label}"
        if not isinstance(self._compute_transport, CodedTransport):
            self.transport.all_gather(self.full.tensor, key=key, label=label).wait()
            return
        self.keep_writes()
        self._compute_transport.gather_from(self.shard.to(self.device), self.full.tensor, key=key, label=label).wait()
        self.is_decoded = True

    @in_profile("gather")
    def restore_full(self) -> None:
        """FULL -> FULL: gathers the exact values of the shards again. Every rank must call it."""
        require_state(self.state is State.FULL and self.is_sharded, self, "sharded and FULL to be gathered again")
        with self.memory.ordered():
            self._read = self.memory.read(self.shard, self.transport.my_slice(self.full.tensor))
        self._read.wait()
        label = f"the gather of {self.label}"
        self.transport.all_gather(self.full.tensor, key=self._next_key(), label=label).wait()
        self.is_decoded = False

    def reshard(self) -> None:
        """FULL -> SHARDED: takes the values from the parameters and frees the full buffer."""
        require_state(self.state is State.FULL and self.is_sharded, self, "sharded and FULL to be resharded")
        self.keep_writes()
        for parameter, placeholder in self._without_loans(zip(self.params, self._placeholders, strict=True)):
            mark_sharded(parameter, placeholder)
        self.full.free()
        self.is_kept = False
        self._change_state(State.SHARDED)

    def abandon_gather(self) -> None:
        """GATHERING -> SHARDED: waits for the transfer, whose peers rely on it, and drops the result."""
        self._await_gather()
        self.full.free()
        self._change_state(State.SHARDED)

    def show_shapes(self, shown: bool) -> None:
        """Sets how sharded parameters look: empty, or with their shape (a NaN expanded over it, without memory).

        Inside a forward or backward they have their shape. Autograd compares a gradient with the shape that the
        parameter had when it entered the graph, and programs read shapes before they use the values; not every
        parameter is gathered there (an embedding's is not for its backward, one that goes to a custom autograd function
        not before its first use inside it).
        """
        self._placeholders = self._shapes if shown else self._empties
        if self.state is State.FULL:
            return
        with torch.DisableTorchFunctionSubclass():
            for parameter, placeholder in self._without_loans(zip(self.params, self._placeholders, strict=True)):
                parameter.data = placeholder

    # -- single parameters -------------------------------------------------------------------------------------------

    def _without_loans(self, entries: Iterable[T]) -> Iterable[T]:
        """Returns entries per parameter, without those of loaned parameters."""
        return entries if not self.loans else self._skip_loans(entries)

    def _skip_loans(self, entries: Iterable[T]) -> Iterator[T]:
        for tile, entry in enumerate(entries):
            loan = self.loans.get(tile)
            if loan is None or loan.tensor is None:
                yield entry

    def start_loan(self, tile: int, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Makes one parameter full with values in a tensor of its own, in the parameter's shape."""
        mark_full(parameter, tensor, self._classes[tile])

    def end_loan(self, tile: int, parameter: torch.nn.Parameter) -> None:
        """Undoes :meth:`start_loan`; the values of the loaned tensor are dropped."""
        if self.state is State.FULL:
            mark_full(parameter, self._views[tile], self._classes[tile])
            self.remember_value(tile)
        else:
            mark_sharded(parameter, self._placeholders[tile])

    copy_parameter = copy_sharded

    def view(self, tile: int) -> torch.Tensor:
        """Returns the view of a parameter in the full buffer, in its shape; only while FULL."""
        require_state(self.state is State.FULL, self, "FULL to have views")
        return self._views[tile]

    def tile_at(self, offset: int) -> int:
        """Returns the parameter that holds an element of the full buffer."""
        return bisect_right(self.layout.starts, offset) - 1

    def pin(self) -> None:
        """Keeps the bucket FULL until :meth:`unpin`."""
        require_state(self.state is State.FULL, self, "FULL to be pinned")
        self.pins += 1
        self.users += 1

    def unpin(self) -> None:
        """Undoes :meth:`pin`; frees the bucket if nothing else uses it."""
        self.pins -= 1
        self.users -= 1
        if self.users == 0 and not self.is_kept and self.is_sharded and self.state is State.FULL:
            self.reshard()

    def relocate(self, copy: Callable[[torch.Tensor], torch.Tensor], tier: Tier) -> None:
        """Moves the shard, 1-D, to other memory; the parameters of a resident bucket move with it."""
        if self.is_sharded:
            nbytes = self.shard.numel() * self.shard.element_size()
            self._memory_tracker.add(StorageKind.COMPUTE, Tier.DEVICE if tier is Tier.HOST else Tier.HOST, -nbytes)
            self._memory_tracker.add(StorageKind.COMPUTE, tier, nbytes)
            self.shard = copy(self.shard)
            return
        old, self.full = self.full, FlatBuffer.holding(copy(self.full.tensor), self.full, tier)
        self._views = self.full.views(self.layout.starts, [tile.shape for tile in self.layout.tiles])
        for parameter, view in zip(self.params, self._views, strict=True):
            parameter.data = view
        self.shard = self.transport.my_slice(self.full.tensor)
        self.remember_values()
        old.forget()

    # -- the update --------------------------------------------------------------------------------------------------

    @in_profile("publish")
    def start_publish(self) -> Work | None:
        """Requests slices that other ranks updated, where parameters stay FULL; returns None if none is sent.

        At stage 3 nothing is sent here: the next gather takes the new values from the shards.
        """
        label = f"the update of {self.label}"
        if self.is_sharded:
            require_state(self.state is State.SHARDED, self, "SHARDED, as parameters change only while sharded")
            if not self.group.is_spread or self.group.combine is None:
                return None
            return self.group.combine.all_gather(self.shard, key=self._next_publish_key(), label=label)
        if self.group.is_spread:
            return self.group.owners.all_gather(self.full.tensor, key=self._next_publish_key(), label=label)
        return self.transport.all_gather(self.full.tensor, key=self._next_key(), label=label)

    def _next_publish_key(self) -> int:
        """Returns the number of a transfer between groups, which may have gathered the bucket differently often."""
        self._publishes += 1
        return transfer_key(self.transport.owner, self.index, _GATHER, self._publishes)

    def note_update(self, updated: list[bool]) -> None:
        """Counts an update of parameters as a write, so that a backward through their former values is an error."""
        increment_version(list(compress(self.params, updated)))

    # -- writes by programs ------------------------------------------------------------------------------------------

    def remember_values(self) -> None:
        """Records address and version of every parameter that is full, so that a write by others is seen later."""
        if self.state is State.FULL:
            self._fingerprints = [(p.data_ptr(), p._version) for p in self.params]

    def changed_params(self) -> list[int]:
        """Returns the indices of full parameters that something wrote to or detached since :meth:`remember_values`.

        Writes through ``parameter.data`` are not seen, since torch counts no version there. Loaned parameters are left
        out.
        """
        if self.state is not State.FULL:
            return []
        return [
            index
            for index, (parameter, seen) in self._without_loans(
                enumerate(zip(self.params, self._fingerprints, strict=True))
            )
            if (parameter.data_ptr(), parameter._version) != seen
        ]

    def keep_writes(self) -> None:
        """FULL: copies what a forward wrote into its sharded parameters to the shard and the master.

        Each rank keeps its own part of its own values; nothing is communicated, as only some ranks may have written.
        """
        for tile in self.changed_params():
            parameter = self.params[tile]
            self._check_shape(tile)
            fragment = self.fragment(tile)
            if fragment is not None:
                values = parameter.data.reshape(-1)[fragment.in_tile]
                if self.is_decoded:  # elements that were not written keep their exact values
                    stored = self.shard[fragment.in_slice].to(values.device)
                    values = torch.where(values == self.as_gathered(fragment), stored, values)
                self.keep_fragment(fragment, values)
            self.remember_value(tile)
            warn_once(
                "written-in-forward",
                f"parameter {self.layout.tiles[tile].name!r} was written to inside a forward or backward. It is "
                "sharded (ZeRO stage 3): every rank keeps its part of what it wrote itself, so all ranks must write "
                "the same values (Embedding(max_norm=...) does so for rows that all of them look up)",
            )

    def keep_fragment(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes this rank's fragment of a parameter into the shard and, where it differs, into the master.

        Args:
            values: 1-D, of that fragment.
        """
        master = self.owner.master_of(self) if self.owner is not None else None
        if master is not None:
            master.adopt(fragment.tile, values, fragment.tile_start)
        self.shard[fragment.in_slice].copy_(values)

    def as_gathered(self, fragment: Fragment) -> torch.Tensor:
        """Returns this rank's fragment as it is in the gathered full buffer, 1-D."""
        if not self.is_decoded or not isinstance(self._compute_transport, CodedTransport):
            return self.shard[fragment.in_slice]
        return self._compute_transport.as_gathered(self.shard.to(self.device))[fragment.in_slice]

    def take_back_changes(self) -> list[int]:
        """Returns the indices of resident parameters that something wrote to.

        Those that were detached are back in the buffer.
        """
        changed = self.changed_params()
        for index in changed:
            # one line per group: groups have different parameters
            if self.reattach(index) and self.transport.rank == 0:
                log_dist(
                    f"parameter {self.layout.tiles[index].name!r} was taken out of its flat buffer (by .to(), .data = "
                    "or load_state_dict with assign); its values were copied back, at the cost of a copy",
                    ranks=[-1],
                    level=logging.WARNING,
                )
        return changed

    def remember_value(self, index: int) -> None:
        """Records address and version of one parameter if it is full, so that a write by others is seen later."""
        if self.state is State.FULL:
            parameter = self.params[index]
            self._fingerprints[index] = (parameter.data_ptr(), parameter._version)

    def reattach(self, index: int) -> bool:
        """Moves a detached resident parameter back into the buffer; returns whether it was detached."""
        parameter, view = self.params[index], self._views[index]
        self._check_shape(index)
        if parameter.data_ptr() == view.data_ptr():
            return False
        with torch.no_grad():
            view.copy_(parameter.data)
        parameter.data = view
        return True

    def _check_shape(self, index: int) -> None:
        shape, expected = tuple(self.params[index].shape), self.layout.tiles[index].shape
        if shape != expected:
            raise CallOrderError(
                f"parameter {self.layout.tiles[index].name!r} was given the shape {shape} after deepspeed.initialize; "
                f"expected {expected}, as its place in the flat buffer cannot change. Resize a model before "
                "initialize, or initialize it again"
            )


def _shape_only(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of ``shape`` over one NaN element, so that any use of its values shows."""
    element = torch.zeros(1, dtype=dtype, device=device)
    if dtype.is_floating_point or dtype.is_complex:
        element.fill_(float("nan"))
    return element.as_strided(shape, [0] * len(shape))
