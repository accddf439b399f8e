"""``GatheredParameters``: makes parameters full inside a block.

Only requested parameters are sent: each owner sends its part of each parameter, all in one round. Where every parameter
of a bucket was requested, the bucket itself is gathered and stays FULL, so that forwards inside the block gather
nothing. Before anything moves, the ranks compare what they request; so ranks that request different things all raise.

Edits. With ``modifier_rank`` the values of that rank reach every shard and the fp32 masters when the block ends (a
master changes only where its 16-bit value did). Without, edits are dropped, with one warning.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch

from deepspeed.comm.transports.transport import TensorTransfer
from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.logging import warn_once
from deepspeed.zero.access.external import register_external_parameter
from deepspeed.zero.address import Address, Loan, ParameterBucket, State, address_of
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.calls import compare_calls
from deepspeed.zero.tiling.assemble import assemble, scatter
from deepspeed.zero.tiling.layout import Fragment
from deepspeed.zero.untouched import untouched

Entry = tuple[torch.nn.Parameter, Address]


class GatheredParameters:
    """Inside the block, the given parameters are full: they have their shape and their values.

    Every rank of the group must enter it, with the same parameters in any order. Parameters that are full already, that
    belong to no engine, buffers, duplicates and None are skipped; an empty collection does nothing. May be nested, and
    entered again: parameters stay full until the last block that holds them ends, and edits that a block with a
    ``modifier_rank`` published stay.

    Args:
        params: One parameter or any iterable of them (consumed at once).
        modifier_rank: Rank, among those that train the parameters, whose values every rank and the fp32 master take
            when the block ends; of parameters that a group of their own shares (``zero.tiling.describe``) every group
            takes those of its rank with the same place. None: edits are dropped, with a warning that names the
            parameter. At stages 0 to 2, where parameters are ordinary, None leaves them alone.
        fwd_module: Also registers the parameters as external to this module (see ``register_external_parameter``).
        enabled: False: do nothing.

    Raises:
        DivergenceError: Ranks request different parameters; raised on all of them.
    """

    def __init__(
        self,
        params: torch.Tensor | Iterable[torch.Tensor | None] | None,
        modifier_rank: int | None = None,
        fwd_module: torch.nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        self._opened: list[ExitStack] = []  # one for each time that it was entered and not left
        self._entries: list[Entry] = []
        self._modifier = modifier_rank
        if not enabled:
            return
        found = _unique(params)
        if fwd_module is not None:
            for parameter in found:
                if isinstance(parameter, torch.nn.Parameter):
                    register_external_parameter(fwd_module, parameter)
        self._entries = with_addresses(found)

    def __enter__(self) -> None:
        with untouched(), ExitStack() as opened:
            for block in [GatheredBlock(entries, self._modifier) for entries in by_group(self._entries)]:
                block.open()
                opened.push(block.exit)
            self._opened.append(opened.pop_all())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with untouched():  # closes every block, also if one of them raises: the other ranks do
            self._opened.pop().__exit__(kind, error, trace)


def _unique(params: Any) -> list[torch.Tensor]:
    if params is None:
        return []
    tensors = [params] if isinstance(params, torch.Tensor) else list(params)
    for tensor in tensors:
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise DeepSpeedConfigError(
                "GatheredParameters(params): expected a parameter or an iterable of parameters, found "
                f"{type(tensor).__name__} in it"
            )
    return list({id(tensor): tensor for tensor in tensors if tensor is not None}.values())


def with_addresses(tensors: Iterable[torch.Tensor]) -> list[Entry]:
    """Returns those of ``tensors`` (of any shape) whose values a bucket keeps, with their addresses."""
    found: list[Entry] = []
    for tensor in tensors:
        address = address_of(tensor)
        if address is not None:
            found.append((tensor, address))  # type: ignore[arg-type]
    return found


def by_group(entries: list[Entry]) -> list[list[Entry]]:
    """Entries by the ranks that share them, groups and entries in an order that is equal on all ranks."""
    groups: dict[int, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(id(entry[1].bucket.transport), []).append(entry)
    for members in groups.values():
        members.sort(key=lambda entry: (entry[1].bucket.layout.index, entry[1].tile))
    return sorted(groups.values(), key=_place_in_order)


def _place_in_order(entries: list[Entry]) -> tuple[int, str, tuple[int, ...]]:
    """Returns a sort key of groups that is the same on all ranks, also between groups of equal size.

    Groups of one name are distinguished by their ranks, whose order is the same on every rank.
    """
    transport = entries[0][1].bucket.transport
    return transport.owner, min(address.bucket.group.name for _, address in entries), transport.ranks


class GatheredBlock:
    """One ``GatheredParameters`` block on the parameters of one group.

    Args:
        entries: Parameters of one group and addresses, in the same order on all ranks; at least one.
        modifier: Rank whose values count, among all that train the parameters; or None.

    Raises:
        DeepSpeedConfigError: ``modifier`` is no rank of the group.
    """

    def __init__(self, entries: list[Entry], modifier: int | None) -> None:
        self._group = entries[0][1].bucket.group
        self._transport = self._group.gather
        self._modifier = modifier
        # Ordinary parameters (stages 0 to 2) take part only if a modifier rank is given.
        self._entries = [
            entry for entry in entries if entry[1].bucket.is_partitioned or (modifier is not None and entry[1].numel)
        ]
        self._loaned: list[Entry] = []
        self._present: list[Entry] = []
        self._pinned: list[Bucket] = []
        self._whole: list[Bucket] = []
        ranks = self._transport.peers.size
        if modifier is not None and not 0 <= modifier < ranks:
            raise DeepSpeedConfigError(
                f"GatheredParameters(modifier_rank={modifier}): the parameters' group has ranks 0 to {ranks - 1}; "
                "give one of them, or None"
            )

    # -- entering ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Makes the parameters full; every rank of the group must call it."""
        for owner in dict.fromkeys(address.bucket.owner for _, address in self._entries):
            if owner is not None:
                owner.drop_failed_backward()
        missing = [entry for entry in self._entries if _is_missing(entry)]
        if missing or (self._modifier is not None and self._entries):
            compare_calls(self._transport, self._words("entering"))
        by_bucket: dict[int, tuple[ParameterBucket, list[Entry]]] = {}
        for entry in self._entries:
            by_bucket.setdefault(id(entry[1].bucket), (entry[1].bucket, []))[1].append(entry)
        new_loans: list[Entry] = []
        for bucket, entries in by_bucket.values():
            new_loans += self._open_bucket(bucket, entries)
        self._start_loans(new_loans)
        for bucket, _ in by_bucket.values():
            if bucket.owner is not None:
                bucket.owner.open_blocks += 1

    def _open_bucket(self, bucket: ParameterBucket, entries: list[Entry]) -> list[Entry]:
        """Opens one bucket; returns the parameters whose parts must be sent."""
        missing = [entry for entry in entries if _is_missing(entry)]
        if isinstance(bucket, Bucket) and bucket.is_sharded:
            if bucket.state is State.GATHERING:  # a prefetch, which all ranks have started
                bucket.finish_gather()
            elif bucket.state is State.SHARDED and {
                index for index, tile in enumerate(bucket.layout.tiles) if tile.numel
            } <= {address.tile for _, address in missing}:
                bucket.start_gather(exactly=True)
                bucket.finish_gather()
                self._whole.append(bucket)
            if bucket.state is State.FULL:
                # writes of a forward around the block are kept; the block's own are handled at its end
                bucket.keep_writes()
                if bucket.is_decoded and self._modifier is not None:
                    bucket.restore_full()  # the values at the block's end become the parameters' values
                bucket.pin()
                self._pinned.append(bucket)
        new_loans: list[Entry] = []
        for parameter, address in entries:
            loan = bucket.loans.setdefault(address.tile, Loan(version=parameter._version))
            loan.depth += 1
            if loan.depth > 1:
                (self._present if loan.tensor is None else self._loaned).append((parameter, address))
            elif bucket.state is State.FULL:
                self._present.append((parameter, address))
                if self._modifier is None and bucket not in self._whole and _master_values(address) is None:
                    loan.backup = parameter.detach().clone()
            else:
                new_loans.append((parameter, address))
        return new_loans

    def _start_loans(self, entries: list[Entry]) -> None:
        """Gathers parameters into tensors of their own (loans)."""
        transfers: list[TensorTransfer] = []
        tensors = []
        for _, address in entries:
            bucket = address.bucket
            # Allocated in its shape: a view would hold its base, as if the program still held a view.
            tensor = torch.empty(address.shape, dtype=bucket.dtype, device=bucket.device)
            tensors.append(tensor)
            fragment = bucket.fragment(address.tile)
            mine = None if fragment is None else bucket.shard[fragment.in_slice]
            transfers += assemble(bucket.layout, address.tile, self._transport.rank, mine, tensor.view(-1))
        if entries:
            self._transport.move(transfers, label=f"the values of {_label(entries)}")
        for (parameter, address), tensor in zip(entries, tensors, strict=True):
            loan = address.bucket.loans[address.tile]
            loan.tensor = tensor
            address.bucket.start_loan(address.tile, parameter, tensor)
            self._loaned.append((parameter, address))

    def _words(self, what: str) -> str:
        # Bucket states are compared too: a rank whose bucket is FULL would take another path than the others.
        states = "".join(entry[1].bucket.state.value[0] for entry in self._entries)
        names = [(entry[1].name, entry[1].shape) for entry in self._entries]
        shown = ", ".join(name for name, _ in names[:3]) + (", ..." if len(names) > 3 else "")
        return (
            f"{what} GatheredParameters of {len(names)} parameter(s) ({shown}), modifier_rank={self._modifier} "
            f"[{checksum(names):08x} {checksum(states):08x}]"
        )

    # -- leaving -----------------------------------------------------------------------------------------------------

    def exit(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Calls :meth:`close`, as the ``__exit__`` of a context."""
        self.close(error)

    def close(self, error: BaseException | None) -> None:
        """Publishes or drops edits and frees the memory. With a modifier rank, every rank must call it."""
        failed = False
        try:
            if self._modifier is not None and self._entries:
                misfit = self._misfit()
                reports = compare_calls(self._transport, self._words("leaving"), [int(error is not None), misfit + 1])
                failed = any(flag or number for flag, number in reports)
                if failed and error is None:
                    self._raise_for(reports)
                if not failed:
                    self._publish()
            elif error is None:
                self._warn_of_edits()
        finally:
            self.give_back(restore=self._modifier is None or failed)

    def _misfit(self) -> int:
        """Returns the index of the first parameter whose data the block replaced by another shape; -1 for none."""
        for index, (parameter, address) in enumerate(self._entries):
            if tuple(parameter.shape) != address.shape:
                return index
        return -1

    def _raise_for(self, reports: list[list[int]]) -> None:
        for rank, (flag, number) in enumerate(reports):
            if flag:
                raise CallOrderError(
                    f"GatheredParameters: rank {rank} left the block with an exception; edits were dropped on all "
                    "ranks. Correct the error of that rank"
                )
            if number:
                parameter, address = self._entries[number - 1]
                raise CallOrderError(
                    f"GatheredParameters: on rank {rank} {address.name!r} left the block with another shape than "
                    f"{address.shape}; edits were dropped on all ranks. A parameter that has been sharded keeps its "
                    "shape: make a new Parameter and assign it to the module instead"
                )

    def give_back(self, *, restore: bool) -> None:
        """Ends the loans without communication; with ``restore``, undoes edits of parameters that stay full."""
        for parameter, address in self._present:
            loan = self._end_loan(address)
            if loan is not None and restore:
                self._restore(parameter, address, loan)
            if loan is not None and isinstance(address.bucket, Bucket) and address.bucket.is_sharded:
                address.bucket.remember_value(address.tile)
        for parameter, address in self._loaned:
            if self._end_loan(address) is not None:
                address.bucket.end_loan(address.tile, parameter)
        for bucket in self._pinned:
            bucket.unpin()
            if restore and bucket in self._whole and bucket.state is State.FULL:  # others still use it
                open_edits = {tile: bucket.view(tile).clone() for tile in bucket.loans}  # of blocks that are open still
                bucket.restore_full()
                for tile, values in open_edits.items():
                    bucket.view(tile).copy_(values)
        for opened in {id(entry[1].bucket): entry[1].bucket for entry in self._entries}.values():
            if opened.owner is not None:
                opened.owner.open_blocks -= 1
        self._present, self._loaned, self._pinned, self._whole = [], [], [], []

    def _restore(self, parameter: torch.nn.Parameter, address: Address, loan: Loan) -> None:
        """Drops edits of a parameter that stays where it is."""
        values = loan.backup if loan.backup is not None else _master_values(address)
        if values is None or address.bucket in self._whole:
            return
        if isinstance(address.bucket, Bucket):
            parameter.data = address.bucket.view(address.tile)  # the block may have assigned another tensor
        with torch.no_grad():
            parameter.data.copy_(values)
        if isinstance(address.bucket, Bucket):
            address.bucket.remember_value(address.tile)

    def _end_loan(self, address: Address) -> Loan | None:
        """Counts a context out; returns the loan if it was the last one."""
        loan = address.bucket.loans[address.tile]
        loan.depth -= 1
        return address.bucket.loans.pop(address.tile) if loan.depth == 0 else None

    def _warn_of_edits(self) -> None:
        for parameter, address in [*self._present, *self._loaned]:
            loan = address.bucket.loans[address.tile]
            if loan.depth == 1 and _was_edited(parameter, address, loan):
                warn_once(
                    f"gathered-edit:{address.name}",
                    f"GatheredParameters: {address.name!r} was changed inside the block, but modifier_rank is None, so "
                    "the change is dropped; name the rank whose values shall count (modifier_rank=0)",
                    ranks=[-1],
                )

    # -- publishing --------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Sends the modifier's values to every rank that keeps them: all ranks, or the owner of each part."""
        assert self._modifier is not None
        transfers: list[TensorTransfer] = []
        arriving: list[tuple[ParameterBucket, Fragment, torch.Tensor]] = []
        for parameter, address in [*self._present, *self._loaned]:
            _back_in_place(parameter, address)
        copy, modifier = self._group.place_of(self._modifier)
        replicas = self._group.combine
        if replicas is not None and not self._group.spans_stages and self._transport.rank == modifier:
            # the modifier's values go to the rank of the same number in each other group that shares them
            edited = [parameter.data.view(-1) for parameter, _ in [*self._present, *self._loaned]]
            copies = [TensorTransfer(copy, None, values) for values in edited]
            replicas.move(copies, label=f"the changes of {_label(self._entries)}")
        for parameter, address in [*self._present, *self._loaned]:
            bucket, values = address.bucket, parameter.data.view(-1)
            if self._stays_full(address):
                transfers.append(TensorTransfer(modifier, None, values))
                continue
            fragment = bucket.fragment(address.tile)
            place = None if fragment is None else values[fragment.in_tile]
            if fragment is not None and place is not None:
                arriving.append((bucket, fragment, place))
            transfers += scatter(bucket.layout, address.tile, self._transport.rank, modifier, values, place)
        if self._present or self._loaned:  # every rank takes part, even if it has nothing to send or receive
            self._transport.move(transfers, label=f"the changes of {_label(self._entries)}")
        for bucket, fragment, values in arriving:
            bucket.keep_fragment(fragment, values)
        for parameter, address in [*self._present, *self._loaned]:
            if self._stays_full(address):
                keep_full(address, parameter.data)
            elif isinstance(address.bucket, Bucket):
                address.bucket.note_written()

    def _stays_full(self, address: Address) -> bool:
        """Returns whether every rank continues to use the full values after this block."""
        bucket, loan = address.bucket, address.bucket.loans[address.tile]
        if loan.depth > 1 or not bucket.is_sharded:
            return True
        if loan.tensor is not None:
            return bucket.state is State.FULL
        assert isinstance(bucket, Bucket)
        return bucket.users > 1 or bucket.is_kept


def checksum(values: Sequence[Any]) -> int:
    """Returns a number that is equal on all ranks for equal values."""
    return zlib.crc32(repr(values).encode())


def _label(entries: list[Entry]) -> str:
    first = entries[0][1].name
    return first if len(entries) == 1 else f"{first} and {len(entries) - 1} more"


def _is_missing(entry: Entry) -> bool:
    """Returns whether this rank lacks the values now."""
    bucket, tile = entry[1].bucket, entry[1].tile
    loan = bucket.loans.get(tile)
    return bucket.state is not State.FULL and (loan is None or loan.tensor is None)


def _back_in_place(parameter: torch.nn.Parameter, address: Address) -> None:
    """Copies values that the block assigned (``parameter.data = ...``) back into the parameter's own memory."""
    bucket, loan = address.bucket, address.bucket.loans[address.tile]
    place = loan.tensor
    if place is None and isinstance(bucket, Bucket):
        place = bucket.view(address.tile)
    if place is not None and place.data_ptr() != parameter.data_ptr():
        place.copy_(parameter.data)
        parameter.data = place


def _master_values(address: Address) -> torch.Tensor | None:
    """Returns the fp32 master's values of a resident parameter; None unless a separate master is whole on this rank."""
    bucket = address.bucket
    master = bucket.owner.master_of(bucket) if bucket.owner is not None and not bucket.is_sharded else None
    if master is None or master.out is None or master.layout.num_slices > 1:
        return None
    return master.whole_tile(address.tile).to(bucket.dtype)


def _was_edited(parameter: torch.nn.Parameter, address: Address, loan: Loan) -> bool:
    """Returns whether this rank can detect that the values differ from those at the block's start."""
    if parameter._version != loan.version:
        return True
    values = loan.backup if loan.backup is not None else _master_values(address)
    if values is not None:
        return not _same_bits(parameter.data, values.to(parameter.device))
    fragment = address.bucket.fragment(address.tile) if address.bucket.is_sharded else None
    if fragment is None:
        return False
    mine = parameter.data.reshape(-1)[fragment.in_tile]
    return not _same_bits(mine, address.bucket.as_gathered(fragment).to(mine.device))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape:
        return False
    return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))


def keep_full(address: Address, values: torch.Tensor) -> None:
    """Writes a parameter's values (its shape; equal on all ranks) to this rank's master, shard and full copies."""
    bucket, tile = address.bucket, address.tile
    flat = values.reshape(-1)
    master = bucket.owner.master_of(bucket) if bucket.owner is not None else None
    if master is not None:
        master.adopt(tile, flat, 0)
    if bucket.is_sharded:
        fragment = bucket.fragment(tile)
        if fragment is not None:
            bucket.shard[fragment.in_slice].copy_(flat[fragment.in_tile])
        if isinstance(bucket, Bucket):
            bucket.note_written()
    if isinstance(bucket, Bucket) and bucket.state is State.FULL:
        view = bucket.view(tile)
        if view.data_ptr() != values.data_ptr():
            view.copy_(values)
        bucket.remember_value(tile)
    loan = bucket.loans.get(tile)
    if loan is not None:
        for copy in (loan.tensor, loan.backup):
            if copy is not None and copy.data_ptr() != values.data_ptr():
                copy.copy_(values)


# -- gathering without a block ---------------------------------------------------------------------------------------


def gather_until_partition(params: Iterable[torch.Tensor]) -> None:
    """Makes parameters full, in their own shapes, until :func:`partition`: ``parameter.all_gather()``.

    Every rank must call it.
    """
    with untouched():
        for entries in by_group(with_addresses(_unique(params))):
            missing = [entry for entry in entries if _is_missing(entry)]
            if not missing:
                continue
            block = GatheredBlock(missing, None)
            compare_calls(block._transport, block._words("all_gather as"))
            for parameter, address in missing:
                address.bucket.loans[address.tile] = Loan(depth=1, version=parameter._version)
            block._start_loans(missing)


def partition(params: Iterable[torch.Tensor], *, keep_values: bool) -> None:
    """Shards parameters again that :func:`gather_until_partition` made full: ``parameter.partition()``.

    Args:
        params: Parameters of any shape; those that are not full for their own sake are skipped.
        keep_values: Each rank keeps its part of the values that it has now; otherwise edits are dropped.
    """
    with untouched():
        for parameter, address in with_addresses(_unique(params)):
            bucket = address.bucket
            loan = bucket.loans.get(address.tile)
            if loan is None or loan.tensor is None or loan.depth > 1:
                continue
            if keep_values:
                fragment = bucket.fragment(address.tile)
                if fragment is not None:
                    bucket.keep_fragment(fragment, parameter.data.reshape(-1)[fragment.in_tile])
                if isinstance(bucket, Bucket):
                    bucket.note_written()
            del bucket.loans[address.tile]
            bucket.end_loan(address.tile, parameter)  # type: ignore[arg-type]
