"""What keeps the values of parameters while they are sharded, and the address of each parameter in it.

A *bucket* is an engine's bucket (``zero.bucket``) or a provisional one, made by ``zero.Init`` before there is an engine
(``zero.construction.provisional``). Every parameter in a bucket has an *address*: the bucket and the tile.
Code that reads, gathers or moves a parameter starts from there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from deepspeed.comm.transports.transport import Transport
from deepspeed.zero.group import BucketGroup
from deepspeed.zero.tiling.layout import BucketLayout, Fragment


class State(Enum):
    """Holds the addresses of the values of a bucket's parameters; see ``zero.bucket``."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"


Gatherer = Callable[[torch.nn.Parameter, Sequence[torch.Tensor]], bool]
"""Gets a sharded parameter and all that the operation needs with it."""


@dataclass
class Loan:
    """A parameter that ``GatheredParameters`` keeps full.

    Attributes:
        depth: Contexts that requested it and are open.
        tensor: Its values in storage of their own, or None where the parameter was full anyway.
        backup: The values to go back to when the context discards edits; None where nothing needs it.
        version: The parameter's version counter when the first context was entered.
    """

    depth: int = 0
    tensor: torch.Tensor | None = None
    backup: torch.Tensor | None = None
    version: int = 0


class BucketBase:
    """Keeps the values of the tiles of one layout.

    Attributes:
        layout: Where each parameter lies.
        dtype: Of the parameters.
        device: Where they compute.
        group: The ranks that share them.
        is_sharded: Whether a rank keeps only its slice between uses.
        is_partitioned: Whether the placement shards parameters, so that the ecosystem's ``ds_*`` attributes exist;
            small parameters and those of a group of one may be resident all the same.
        state: Where the values are.
        shard: This rank's slice, 1-D; for a resident bucket a view of all values.
        loans: Parameters that ``GatheredParameters`` keeps full, by tile.
        pins: Contexts that keep the whole bucket full.
        gatherer: Makes a parameter full if that is allowed now, and returns whether it did; None: never.
    """

    layout: BucketLayout
    dtype: torch.dtype
    device: torch.device
    is_sharded: bool
    is_partitioned: bool
    state: State
    shard: torch.Tensor

    def __init__(self, group: BucketGroup) -> None:
        self.group = group
        self.loans: dict[int, Loan] = {}
        self.pins = 0
        self.gatherer: Gatherer | None = None
        self._owner: Any = None  # weak from when it trains no more

    @property
    def owner(self) -> Any:
        """The ZeRO runtime that trains the parameters, or has done so and is still there; else None."""
        return self._owner() if isinstance(self._owner, weakref.ref) else self._owner

    @property
    def is_trained(self) -> bool:
        """Returns whether a runtime has the parameters now."""
        return self._owner is not None and not isinstance(self._owner, weakref.ref)

    def begin_training(self, owner: Any) -> None:
        """A runtime takes the parameters; they keep it alive."""
        self._owner = owner

    def end_training(self) -> None:
        """The runtime is done with the parameters, and lives as long as others keep it."""
        if self.is_trained:
            self._owner = weakref.ref(self._owner)

    @property
    def transport(self) -> Transport:
        """Carries the parameters."""
        return self.group.gather

    def fragment(self, tile: int) -> Fragment | None:
        """Returns what this rank's slice has of a tile, or None."""
        return self.layout.fragment(tile, self.transport.rank)

    def as_gathered(self, fragment: Fragment) -> torch.Tensor:
        """Returns what a gather has put in the place of this rank's fragment of a sharded parameter, 1-D."""
        return self.shard[fragment.in_slice]

    def keep_fragment(self, fragment: Fragment, values: torch.Tensor) -> None:
        """Writes this rank's fragment of a parameter into the shard and, where it differs, into the master.

        Args:
            fragment: Of this rank.
            values: 1-D, of that fragment.
        """
        master = self.owner.master_of(self) if self.owner is not None else None
        if master is not None:
            master.adopt(fragment.tile, values, fragment.tile_start)
        self.shard[fragment.in_slice].copy_(values)

    def start_loan(self, tile: int, parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
        """Makes one parameter full with values in a tensor of its own, in the parameter's shape."""
        raise NotImplementedError

    def take_back(self, tile: int, parameter: torch.nn.Parameter) -> None:
        """Undoes :meth:`start_loan`; the values of the loaned tensor are dropped."""
        raise NotImplementedError

    def copy_parameter(self, tile: int, parameter: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        """``copy.deepcopy`` of a sharded parameter: one with the same values, in a bucket of no engine."""
        raise NotImplementedError


_ADDRESS = "_ds_address"
_numbers = itertools.count()


class Address:
    """Describes where a parameter's values are kept.

    Attributes:
        bucket: The bucket.
        tile: Index of the parameter in it.
        number: Unique in this process; stays with the parameter when it moves (``ds_id``).
        active_modules: For programs that clear ``ds_active_sub_modules``; nothing here needs it.
    """

    __slots__ = ("active_modules", "bucket", "number", "tile")

    def __init__(self, bucket: BucketBase, tile: int, number: int) -> None:
        self.bucket = bucket
        self.tile = tile
        self.number = number
        self.active_modules: set[Any] = set()

    def __reduce__(self) -> Any:
        return _nowhere, ()  # a parameter that was saved or copied has left its bucket

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __repr__(self) -> str:
        return f"parameter {self.name!r} of full shape {self.shape}"

    @property
    def name(self) -> str:
        """Qualified name of the parameter."""
        return self.bucket.layout.tiles[self.tile].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the full parameter."""
        return self.bucket.layout.tiles[self.tile].shape

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.bucket.layout.tiles[self.tile].numel


def _nowhere() -> None:
    return None


def address_of(parameter: torch.Tensor) -> Address | None:
    """Returns the address of a parameter (any shape, sharded or not), or None where it belongs to no bucket."""
    return parameter.__dict__.get(_ADDRESS)


def is_zero_param(parameter: object) -> bool:
    """Returns whether ``parameter`` is partitioned (ZeRO stage 3), so that its ``ds_*`` attributes exist."""
    address = address_of(parameter) if isinstance(parameter, torch.Tensor) else None
    return address is not None and address.bucket.is_partitioned


def set_address(parameter: torch.Tensor, bucket: BucketBase, tile: int) -> Address:
    """Gives a parameter (any shape, sharded or not) its next address; its number stays the same."""
    old = address_of(parameter)
    address = Address(bucket, tile, next(_numbers) if old is None else old.number)
    parameter.__dict__[_ADDRESS] = address
    return address


def forget_address(parameter: torch.Tensor) -> None:
    """Takes a parameter out of its bucket; it keeps values of its own. It must be full, in its own shape."""
    parameter.__dict__.pop(_ADDRESS, None)


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Returns the shape of a parameter, sharded or not."""
    address = address_of(parameter)
    return tuple(parameter.shape) if address is None else address.shape


def full_numel(parameter: torch.Tensor) -> int:
    """Returns the elements of a parameter in its full shape, sharded or not."""
    address = address_of(parameter)
    return parameter.numel() if address is None else address.numel
