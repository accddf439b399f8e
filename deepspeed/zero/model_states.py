"""The model states of one model on this rank: its parameters in buckets, and a master for every bucket that is trained.

Making them cuts the model into units and moves its parameters into flat buffers (:func:`first_values`).
``zero.runtime`` drives them.

A *unit* is what is gathered together: a repeated block, that is a child of a ``ModuleList`` or ``Sequential``.
Parameters outside every block belong to the unit of the module that owns them. A block that is larger than the
granularity and itself holds blocks is taken apart, unless it is marked as a leaf (``zero.gather.leaf_modules``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.transports.transport import TensorTransfer, Transport
from deepspeed.config.sections.zero import LeafModule
from deepspeed.errors import DeepSpeedConfigError, OffloadError
from deepspeed.zero.access.gathered import GatheredBlock
from deepspeed.zero.access.views import install_views
from deepspeed.zero.address import Address, ShardedParameter, address_of, full_numel, full_shape
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.construction.materialize import Materializer
from deepspeed.zero.construction.provisional import note_freed
from deepspeed.zero.gather.leaf_modules import get_z3_leaf_modules, z3_leaf_module
from deepspeed.zero.gather.schedule import GatherLimits
from deepspeed.zero.gradient.gradient_sum import GradientDestination
from deepspeed.zero.gradient.reduction_policy import ReductionPolicy
from deepspeed.zero.group import BucketGroup, Groups
from deepspeed.zero.placement import Placement, Tier
from deepspeed.zero.storage import Memory, MemoryTracker, broadcast_values
from deepspeed.zero.tiling.assemble import assemble, scatter
from deepspeed.zero.tiling.describe import describe
from deepspeed.zero.tiling.formula import MemoryFormula
from deepspeed.zero.tiling.layout import BucketLayout, Fragment, Limits, ModelLayout, UnitTile, model_layout
from deepspeed.zero.tiling.parts import logical_name_of, tile_of
from deepspeed.zero.update.masters import MasterBucket
from deepspeed.zero.update.updater import UpdateOptions

_CONTAINERS = (nn.ModuleList, nn.Sequential)


@dataclass
class Unit:
    """Parameters that are gathered together for the forward of one module."""

    name: str  # qualified name of the module; empty for the root
    module: nn.Module  # the module whose forward needs the parameters
    # qualified name to parameter, in model order; a tied parameter belongs to its first owner
    params: dict[str, nn.Parameter] = field(default_factory=dict)

    @property
    def is_flat(self) -> bool:
        """Returns whether all parameters are the module's own, none of a module below it."""
        own = {id(parameter) for parameter in self.module._parameters.values()}
        return all(id(parameter) in own for parameter in self.params.values())


def find_units(model: nn.Module, granularity: int) -> list[Unit]:
    """Cuts ``model`` into units, in model order; units without parameters are left out.

    Args:
        granularity: A block of at most this many elements is never split.
    """
    seen: set[int] = set()
    units = [_with_parameters(unit, seen) for unit in _walk(model, "", granularity, inside_container=False)]
    return [unit for unit in units if unit.params]


def _walk(module: nn.Module, name: str, granularity: int, *, inside_container: bool) -> Iterator[tuple[Unit, bool]]:
    """Yields units and whether each takes the parameters of its whole subtree."""
    if z3_leaf_module(module):
        yield Unit(name, module), True
        return
    children = (child for child in module.modules() if child is not module)
    blocks = (child for child in children if isinstance(child, _CONTAINERS) and _numel(child) > 0)
    if inside_container and (_numel(module) <= granularity or next(blocks, None) is None):
        yield Unit(name, module), True
        return
    if next(module.parameters(recurse=False), None) is not None:
        yield Unit(name, module), False
    is_container = isinstance(module, _CONTAINERS) or getattr(module, "holds_blocks", False)
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        yield from _walk(child, path, granularity, inside_container=is_container)


def _with_parameters(found: tuple[Unit, bool], seen: set[int]) -> Unit:
    unit, whole = found
    for name, parameter in unit.module.named_parameters(recurse=whole):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            unit.params[f"{unit.name}.{name}" if unit.name else name] = parameter
    return unit


def _numel(module: nn.Module) -> int:
    return sum(full_numel(parameter) for parameter in module.parameters())


@dataclass(frozen=True)
class RuntimeOptions:
    """Holds the settings of the ZeRO runtime, from the configuration."""

    placement: Placement  # the ZeRO row
    layout: Limits  # sizes that decide which parameters share a bucket
    gathers: GatherLimits  # sizes that decide when buckets are gathered and freed
    reduction: ReductionPolicy | None  # how gradients are combined; None where nothing is trained
    granularity: int  # a block of at most this many elements is never split into smaller units
    compute_dtype: Callable[[str, torch.Tensor], torch.dtype]  # dtype of a parameter, by name and parameter
    whole_tensors: bool  # the optimizer needs parameters in their shape (allowed where nothing is sharded)
    device: torch.device  # where the model computes
    param_memories: Mapping[Tier, Memory]  # where compute shards are kept, for every tier in use
    master_memories: Mapping[Tier, Memory]  # where masters and optimizer states are kept, for every tier in use
    # makes what brings the reduced gradients of one bucket to their tier
    destination: Callable[[Tier, MemoryTracker], GradientDestination]
    agreement: str = "adapt"  # what happens if ranks gather different parameters (``zero_optimization.agreement``)
    # for every per-element optimizer state, as far as it is known beforehand, its bytes per fp32 element
    state_itemsizes: tuple[int, ...] = ()
    leaves: LeafModule | None = None  # the modules that are gathered as one unit; None: those that are marked already
    update: UpdateOptions | None = None  # how masters are updated; None where nothing is trained

    @property
    def host_is_device(self) -> bool:
        """Returns whether the model computes in host memory."""
        return get_accelerator().shares_host_memory(self.device)


class ModelStates:
    """Buckets and masters of one model. Every rank must make it, with the same model.

    Args:
        param_groups: ``id(parameter)`` to index of its optimizer param group.
    """

    def __init__(
        self,
        model: nn.Module,
        options: RuntimeOptions,
        groups: Groups,
        param_groups: Mapping[int, int],
    ) -> None:
        self.units = find_units(model, options.granularity)  # the units of the model
        self.memory_tracker = MemoryTracker()  # counts the memory
        self._model = model
        self._options = options
        self._groups = groups
        self._group_names = {
            parameter: groups.name_of(name, describe(name, parameter)) for name, parameter in model.named_parameters()
        }
        self._materializer = Materializer(model, options.device)
        self.layout = self._make_layout(param_groups)  # where every parameter lives
        self.placed = options.placement.of_buckets(self.layout)  # where the states of each bucket live, by index
        self._open_memories()
        # parameter to qualified name
        self.param_names = {parameter: name for unit in self.units for name, parameter in unit.params.items()}
        # one per bucket that is trained; those that were unfrozen later come last
        self.masters: list[MasterBucket] = []
        self._trained: dict[int, int] = {}  # index of a bucket to its position among the masters
        self.buckets: list[Bucket] = []  # in model order
        self._make_buckets()
        self._materializer.finish()

    def _make_layout(self, param_groups: Mapping[int, int]) -> ModelLayout:
        dtype_of = self._options.compute_dtype

        def entry(name: str, parameter: nn.Parameter) -> UnitTile:
            group = param_groups.get(id(parameter), -1)
            dtype = str(dtype_of(name, parameter)).removeprefix("torch.")
            tile = tile_of(name, full_shape(parameter), group, parameter)
            return UnitTile(tile, dtype, parameter.requires_grad and group >= 0, self._group_names[parameter])

        return model_layout(
            [[entry(name, parameter) for name, parameter in unit.params.items()] for unit in self.units],
            slice_layouts={group.name: group.slice_layout for group in self._groups},
            limits=self._options.layout,
        )

    def _open_memories(self) -> None:
        """Reserves space in each memory; a lack of space on any rank is an error on all."""
        options = self._options
        formula = MemoryFormula(self.layout, options.placement, host_is_device=options.host_is_device)
        failure: OffloadError | None = None
        try:
            for tier, memory in options.param_memories.items():
                memory.open(formula.compute_tensors(tier), self.memory_tracker)
            for tier, memory in options.master_memories.items():
                memory.open(formula.master_tensors(options.state_itemsizes, tier), self.memory_tracker)
        except OffloadError as error:
            failure = error
        failed = self._groups.job.gather_small(
            torch.tensor([failure is not None], dtype=torch.int64), channel="call", label="initialize"
        ).view(-1)
        if failure is not None:
            raise failure
        if bool(failed.any()):
            ranks = torch.nonzero(failed).view(-1).tolist()
            raise OffloadError(f"the files for offloaded states could not be made on rank(s) {ranks}; see their errors")

    def _make_buckets(self) -> None:
        by_name = {name: parameter for unit in self.units for name, parameter in unit.params.items()}
        for layout in self.layout.buckets:
            params = [by_name[tile.name] for tile in layout.tiles]
            placed = self.placed[layout.index]
            bucket = Bucket(
                layout,
                params,
                dtype=getattr(torch, layout.dtype),
                device=self._options.device,
                group=self._groups[layout.group],
                is_sharded=placed.is_sharded,
                memory_tracker=self.memory_tracker,
                memory=self._options.param_memories[placed.param_tier],
            )
            was_sharded = any(isinstance(parameter, ShardedParameter) for parameter in params)
            self._fill(bucket)
            self.buckets.append(bucket)
            if was_sharded and self._options.host_is_device:
                note_freed(layout.slice_numel * bucket.dtype.itemsize)

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
                same.move([TensorTransfer(0, None, original)], label=f"the first values of {bucket.label}")
            bucket.take_first_values(original)
            self._own(bucket)
            if layout.trainable:
                self._make_master(bucket, original)

    def _own(self, bucket: Bucket) -> None:
        """Gives the parameters of a bucket their addresses in it."""
        bucket.is_partitioned = self._options.placement.shard_params or bucket.is_sharded
        bucket.take_addresses()
        if bucket.is_partitioned:
            install_views()

    def _make_master(self, bucket: Bucket, original: torch.Tensor) -> MasterBucket:
        master = MasterBucket(
            bucket,
            is_sharded=self._options.placement.shard_master and bucket.group.size > 1,
            original=original,
            memory_tracker=self.memory_tracker,
            whole_tensors=self._options.whole_tensors,
            memory=self._options.master_memories[self.placed[bucket.index].master_tier],
            is_narrow=self._options.placement.narrow_masters,
        )
        self.masters.append(master)
        self._trained[bucket.index] = len(self.masters) - 1
        return master

    def train(self, bucket: Bucket) -> MasterBucket:
        """Gives a bucket that was frozen a master. Every rank must call it.

        Raises:
            DeepSpeedConfigError: Its dtype cannot be trained, or it is sharded where what is trained is not.
        """
        if bucket.is_sharded and not self._options.placement.shard_params:
            raise DeepSpeedConfigError(
                f"the frozen parameters of {bucket.label} are shared by ranks or kept in host memory, as LoRAConfig's "
                "base_weight_sharding or offload requested; below stage 3 they cannot be trained from now on. Set "
                "requires_grad to true before initialize, or use ZeRO stage 3"
            )
        if bucket.dtype.is_complex:
            raise DeepSpeedConfigError(
                f"the frozen parameters of {bucket.label} are {bucket.dtype} and cannot be trained from now on: "
                "expected a real dtype, in which gradients are combined and masters kept. Keep requires_grad false"
            )
        bucket.layout = replace(bucket.layout, trainable=True)
        buckets = tuple(b.layout for b in self.buckets)
        self.layout = replace(self.layout, buckets=buckets)
        self.placed = self._options.placement.of_unfrozen(self.layout, self.placed, bucket.index)
        with torch.no_grad(), torch.inference_mode(False):
            return self._make_master(bucket, bucket.shard if bucket.is_sharded else bucket.full.tensor)

    @property
    def sharded(self) -> list[Bucket]:
        """The buckets that are gathered for their uses."""
        return [bucket for bucket in self.buckets if bucket.is_sharded]

    def buckets_of_leaves(self) -> dict[nn.Module, list[Bucket]]:
        """Returns the leaf modules with every sharded bucket that they use, tied weights of other units included."""
        bucket_of = {parameter: bucket for bucket in self.sharded for parameter in bucket.params}
        found = {}
        for module in get_z3_leaf_modules(self._model):
            used = {bucket_of[parameter] for parameter in module.parameters() if parameter in bucket_of}
            found[module] = sorted(used, key=lambda bucket: bucket.index)
        return found

    def gathering_modules(self, leaves: Mapping[nn.Module, list[Bucket]]) -> list[tuple[nn.Module, list[Bucket]]]:
        """Returns modules with the buckets that their forward gathers.

        First those that gather only as outermost module.
        """
        found = dict(leaves)
        for unit, own in zip(self.units, self.layout.units, strict=True):
            found.setdefault(unit.module, [self.buckets[i] for i in own if self.buckets[i].is_sharded])
        return [*self._between_root_and_units(), *((module, needed) for module, needed in found.items() if needed)]

    def _between_root_and_units(self) -> list[tuple[nn.Module, list[Bucket]]]:
        """Returns modules between the root and the units, such as an encoder, which a program may call alone."""
        known = {unit.module for unit in self.units}
        for unit in self.units:
            if not unit.is_flat:
                known.update(unit.module.modules())
        params = {parameter for bucket in self.sharded for parameter in bucket.params}
        return [
            (module, [])
            for module in self._model.modules()
            if module not in known and any(parameter in params for parameter in module.parameters())
        ]

    def position_of(self, bucket: Bucket) -> int | None:
        """Returns the place of a bucket among those that are trained; None where it is not."""
        return self._trained.get(bucket.index)

    def destination(self, bucket: Bucket) -> GradientDestination:
        """Returns the destination of a bucket's reduced gradients."""
        return self._options.destination(self.placed[bucket.index].gradient_tier, self.memory_tracker)

    @property
    def staging_bytes(self) -> int:
        """Bytes of the staging buffers between files and memory."""
        memories = (*self._options.param_memories.values(), *self._options.master_memories.values())
        return sum(memory.staging_bytes for memory in memories)


def first_values(
    layout: BucketLayout,
    params: Sequence[torch.nn.Parameter],
    *,
    group: BucketGroup,
    device: torch.device,
    default_dtype: torch.dtype,
    cut: bool,
) -> torch.Tensor:
    """Returns the first values of an engine's bucket from their present places. Every rank of the group must call it.

    A parameter is either whole on every rank, and then rank 0's values count, or already sharded by ``zero.Init`` or
    an earlier engine. Only parts that change their owner are sent, all of a bucket in one round; no rank ever holds
    more of a sharded bucket than its slice.

    Returns:
        1-D, this rank's slice or the whole buffer, in the narrowest dtype that holds all values that the parameters
        have now (masters are made from it); padding is zero.

    Raises:
        DeepSpeedConfigError: ``zero.Init`` has sharded a parameter in another group.
    """
    dtypes = [p.dtype for p in params] or [default_dtype]
    # fp32 for a mix of fp16 and bf16, which cannot hold each other's values
    dtype = functools.reduce(torch.promote_types, dtypes)
    transport = group.gather
    flat = torch.zeros(layout.slice_numel if cut else layout.numel, dtype=dtype, device=device)
    round_ = _SliceRound(layout, flat, transport) if cut else _WholeRound(layout, flat, transport)
    for tile, parameter in enumerate(params):
        address = address_of(parameter)
        if address is not None and isinstance(parameter, ShardedParameter):
            if address.bucket.transport.ranks == transport.ranks:
                round_.from_parts(tile, address)
                continue
            if address.bucket.group.name != group.name:
                raise DeepSpeedConfigError(
                    f"{layout.tiles[tile].name!r} belongs to the group {group.name!r}, but zero.Init has "
                    f"sharded it over {address.bucket.group.name!r}, so that all groups have the same values "
                    "of it; build its module inside `with "
                    f"deepspeed.zero.tiling.describe.in_group({group.name!r})`"
                )
            block = GatheredBlock([(parameter, address)], None)  # it is sharded over other ranks than the engine's
            block.open()
            values = parameter.detach().clone().to(device)
            block.give_back(restore=False)
        else:
            values = parameter.detach().to(device)
        round_.from_rank_0(tile, values.to(dtype).reshape(-1))
    round_.run()
    return flat


class _Round:
    """Moves the values of one bucket into ``flat``: planned tile by tile, then moved in one round."""

    def __init__(self, layout: BucketLayout, flat: torch.Tensor, transport: Transport) -> None:
        self.layout = layout
        self.flat = flat
        self.transport = transport
        self.rank = transport.rank
        self.transfers: list[TensorTransfer] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # (place, values) to copy when the round is over

    def run(self) -> None:
        """Moves what was planned."""
        tiles = self.layout.tiles
        name = tiles[0].name if tiles else "an empty bucket"
        self.transport.move(self.transfers, label=f"the first values of {name}")
        for place, values in self.copies:
            if place.data_ptr() != values.data_ptr():
                place.copy_(values)

    def receive_buffer(self, place: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns where values of ``dtype`` are received that belong into ``place``: it, or a tensor of their dtype."""
        return place if dtype == place.dtype else torch.empty_like(place, dtype=dtype)


class _SliceRound(_Round):
    """``flat`` is this rank's slice."""

    def from_parts(self, tile: int, address: Address) -> None:
        """Moves the intervals that change their owner: sharded before, sharded after."""
        bucket, flat = address.bucket, self.flat
        for move in moves(bucket.layout.fragments_of(address.tile), self.layout.fragments_of(tile)):
            place = source = None
            if move.target == self.rank:
                place = flat[move.target_start : move.target_start + move.numel]
            if move.source == self.rank:
                source = bucket.shard[move.source_start : move.source_start + move.numel].to(flat.device)
            if move.source == move.target:
                if place is not None and source is not None:
                    self.copies.append((place, source))
                continue
            tensor = source
            if place is not None:
                tensor = self.receive_buffer(place, bucket.dtype)
                self.copies.append((place, tensor))
            self.transfers.append(TensorTransfer(move.source, move.target, tensor))

    def from_rank_0(self, tile: int, values: torch.Tensor) -> None:
        """Shards what was whole."""
        fragment = self.layout.fragment(tile, self.rank)
        place = None if fragment is None else self.flat[fragment.in_slice]
        if self.rank == 0 and fragment is not None and place is not None:
            self.copies.append((place, values[fragment.in_tile]))
        self.transfers += scatter(self.layout, tile, self.rank, 0, values, place)


class _WholeRound(_Round):
    """``flat`` is the whole buffer."""

    def _place(self, tile: int) -> torch.Tensor:
        start = self.layout.starts[tile]
        return self.flat[start : start + self.layout.tiles[tile].numel]

    def from_parts(self, tile: int, address: Address) -> None:
        """Puts together on every rank what was sharded."""
        bucket, place = address.bucket, self._place(tile)
        whole = self.receive_buffer(place, bucket.dtype)
        fragment = bucket.fragment(address.tile)
        mine = None if fragment is None else bucket.shard[fragment.in_slice]
        self.transfers += assemble(bucket.layout, address.tile, self.rank, mine, whole)
        self.copies.append((place, whole))

    def from_rank_0(self, tile: int, values: torch.Tensor) -> None:
        """Copies what was whole, and stays so, to every rank."""
        place = self._place(tile)
        if self.rank == 0:
            place.copy_(values)
        self.transfers.append(TensorTransfer(0, None, place))


@dataclass(frozen=True)
class Move:
    """An interval of a tile that is moved."""

    source: int  # the rank that has it
    source_start: int  # where it begins in that rank's slice
    target: int  # the rank that gets it; may be the source
    target_start: int  # where it begins in that rank's slice
    numel: int  # length in elements


def moves(old: Sequence[Fragment], new: Sequence[Fragment]) -> list[Move]:
    """Returns the moves that turn a tile's fragments ``old`` into the fragments ``new``."""
    found, first = [], 0
    for target in new:
        while first < len(old) and old[first].tile_stop <= target.tile_start:
            first += 1
        for source in old[first:]:
            start, stop = max(source.tile_start, target.tile_start), min(source.tile_stop, target.tile_stop)
            if start >= stop:
                break
            found.append(
                Move(
                    source=source.rank,
                    source_start=source.slice_start + start - source.tile_start,
                    target=target.rank,
                    target_start=target.slice_start + start - target.tile_start,
                    numel=stop - start,
                )
            )
    return found


def spread_buffers(model: nn.Module, groups: Groups) -> None:
    """Broadcasts buffers: those of an expert among the ranks that hold it, all others from rank 0 of the peers."""
    experts = [module for module in model.modules() if logical_name_of(module) is not None]
    inside = {id(module) for expert in experts for module in expert.modules()}
    others = [module for module in model.modules() if id(module) not in inside]
    shared = {id(buffer): buffer for module in others for buffer in module._buffers.values() if buffer is not None}
    for buffer in shared.values():
        broadcast_values(buffer, groups.peers, label="the buffers of rank 0")
    for expert in experts:
        names = {groups.name_of(name, describe(name, parameter)) for name, parameter in expert.named_parameters()}
        for buffer in expert.buffers():
            if id(buffer) not in shared and names:  # without parameters nothing says which ranks hold the expert
                broadcast_values(buffer, groups[min(names)].gather, label="the buffers of an expert")
