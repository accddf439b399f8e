"""Reading and writing the fp32 master, the gradient and the optimizer state of single parameters, at every stage.

*Full* functions take and return tensors of the parameter's shape. Where the state is sharded they gather the slices of
all owners, so every rank of the group must call them; the ranks compare their calls first. A parameter that is cut
over tensor-parallel ranks is handled whole, and these ranks must call them too. If it is unknown which ranks hold the
other parts (a program's own layers), they take and return the part that this rank's model has.

*Local* functions take and return this rank's slice of the flattened parameter (all of it where the state is
replicated): 1-D, possibly empty.

Getters return copies, or None where there is nothing: for a parameter that is frozen or belongs to no engine, a
gradient before backward or after the update, a state before the first update. They keep working after
``engine.destroy()`` for as long as the program keeps the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

import torch

from deepspeed.errors import CallOrderError, DeepSpeedConfigError
from deepspeed.zero.access.gathered import keep_full
from deepspeed.zero.access.whole_buckets import DTYPES, bucket_source
from deepspeed.zero.address import Address, address_of
from deepspeed.zero.bucket import Bucket
from deepspeed.zero.calls import compare_calls
from deepspeed.zero.runtime import ZeroRuntime
from deepspeed.zero.tiling.assemble import assemble
from deepspeed.zero.tiling.parts import PartOwners, part_owners_of
from deepspeed.zero.untouched import untouched
from deepspeed.zero.update.masters import MasterBucket, MasterRun

_NOTHING, _ELEMENTS, _SCALAR, _UNKNOWN = range(4)


@dataclass(frozen=True)
class _TrainedParam:
    """A parameter that an engine trains."""

    address: Address
    runtime: ZeroRuntime
    master: MasterBucket
    owners: PartOwners | None = None

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the logical parameter."""
        return self.address.shape if self.owners is None else self.owners.mine.global_shape

    @property
    def bucket(self) -> Bucket:
        return self.master.bucket

    @property
    def is_whole(self) -> bool:
        """Returns whether this rank keeps all of the state."""
        return self.master.layout.num_slices == 1

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns a view of this rank's part in a tensor that is aligned with the master."""
        fragment = self.master.fragment(self.address.tile)
        return flat[:0] if fragment is None else flat[fragment.in_slice]

    def mine_of_full(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a whole value, 1-D."""
        fragment = self.master.fragment(self.address.tile)
        flat = self.tile_of_full(value).reshape(-1)
        return flat[:0] if fragment is None else flat[fragment.in_tile]

    def tile_of_full(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's tile of a whole value."""
        return value if self.owners is None else self.owners.tile_of(value, self.address.shape)

    def gradient(self) -> torch.Tensor | None:
        """Returns this rank's part of the reduced gradient, as a view; None before backward and after the update."""
        gradients = self.runtime.gradients_of(self.bucket)
        return None if gradients is None or gradients.result is None else self.mine(gradients.result)

    @property
    def loss_scale(self) -> float:
        """Factor on the gradient until the update."""
        return 1.0 if self.runtime.updater is None else self.runtime.updater.loss_scale

    def run(self) -> MasterRun | None:
        """Returns the master's run with this rank's part.

        There is at most one, since runs are never cut inside a tile.
        """
        fragment = self.master.fragment(self.address.tile)
        if fragment is None:
            return None
        return next((r for r in self.master.runs if r.interval.start <= fragment.slice_start < r.interval.stop), None)

    def states(self) -> dict[str, Any]:
        """Returns the optimizer state of that run."""
        run = self.run()
        if run is None or self.runtime.updater is None:
            return {}
        return self.runtime.updater.optimizer.state.get(run.param, {})

    def empty_state(self, key: str) -> torch.Tensor | None:
        """Returns this rank's part of a state where it has none of the parameter: empty, or the number itself.

        None if this rank has a part of the parameter, or no parameter here has such a state yet.
        """
        if self.master.fragment(self.address.tile) is not None or self.runtime.updater is None:
            return None
        states = self.runtime.updater.optimizer.state.values()
        value = next((state[key] for state in states if key in state), None)
        if value is None:
            return None
        other = torch.as_tensor(value)
        return other.new_empty(0) if other.dim() else other.clone()

    def state_view(self, value: torch.Tensor) -> torch.Tensor:
        """Returns this rank's part of a per-element state, as a view."""
        run, fragment = self.run(), self.master.fragment(self.address.tile)
        assert run is not None and fragment is not None
        start = fragment.slice_start - run.interval.start
        return value.view(-1)[start : start + fragment.numel]


def _trained(parameter: torch.Tensor) -> _TrainedParam | None:
    address = address_of(parameter)
    if address is None or not isinstance(address.bucket, Bucket) or address.bucket.owner is None:
        return None
    runtime = address.bucket.owner
    runtime.drop_failed_backward()
    if runtime.reducer is not None:
        runtime.reducer.program.apply()
    master = runtime.master_of(address.bucket)
    return None if master is None else _TrainedParam(address, runtime, master, part_owners_of(parameter))


def _need(parameter: torch.Tensor, call: str) -> _TrainedParam:
    found = _trained(parameter)
    if found is None:
        address = address_of(parameter)
        was_trained = address is not None and isinstance(address.bucket, Bucket) and address.bucket.owner is None
        why = (
            "its engine was destroyed, and is not kept any more"
            if was_trained
            else "it is frozen, in no param group, or its model was not given to initialize"
        )
        raise CallOrderError(f"{call}: this parameter (shape {tuple(parameter.shape)}) is trained by no engine: {why}")
    return found


def _agree(found: _TrainedParam, call: str, numbers: Sequence[int] = (), names: str | None = None) -> list[list[int]]:
    """Returns ``numbers`` of each rank that shares the parameter; compares the call with theirs."""
    if found.is_whole:
        return [list(numbers)]
    words = f"{call} of {found.address.name!r}" if names is None else f"{call} of {names}"
    rows = compare_calls(found.bucket.transport, words, numbers)
    members = found.runtime.groups.among_peers(found.bucket.group)
    return rows if members is None else [rows[member] for member in members]


def _whole(found: _TrainedParam, mine: torch.Tensor, label: str) -> torch.Tensor:
    """Returns the whole value of the logical parameter."""
    tile = _assemble(found, mine, label)
    return tile if found.owners is None else found.owners.whole(tile, f"{label} of {found.address.name}")


def _assemble(found: _TrainedParam, mine: torch.Tensor, label: str) -> torch.Tensor:
    """Returns the value of this rank's tile, gathered from all ranks' parts."""
    address, master = found.address, found.master
    if found.is_whole:
        return mine.to(found.bucket.device, copy=True).view(address.shape)
    flat = torch.empty(address.numel, dtype=mine.dtype, device=found.bucket.device)
    transfers = assemble(master.layout, address.tile, master.transport.rank, mine, flat)
    master.transport.move(transfers, label=f"{label} of {address.name}")
    return flat.view(address.shape)


def _at_least_fp32(narrow: torch.Tensor) -> torch.Tensor:
    """Returns 16-bit master weights or gradients (any shape) as fp32, which callers expect."""
    return narrow.to(torch.promote_types(narrow.dtype, torch.float32))


def _check_full(found: _TrainedParam, value: torch.Tensor, call: str) -> None:
    if tuple(value.shape) != found.full_shape:
        raise DeepSpeedConfigError(
            f"{call}: {found.address.name!r} has the full shape {found.full_shape}, the value has "
            f"{tuple(value.shape)}; pass the whole tensor on every rank"
        )


def _check_local(found: _TrainedParam, value: torch.Tensor, call: str) -> None:
    fragment = found.master.fragment(found.address.tile)
    numel = 0 if fragment is None else fragment.numel
    if value.numel() != numel:
        raise DeepSpeedConfigError(
            f"{call}: this rank's part of {found.address.name!r} has {numel} elements, the value has {value.numel()}; "
            "give a value of the size of the part"
        )


# -- master weights --------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns the fp32 master weight of a parameter, whole. Every rank must call it where masters are sharded."""
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        _carry_writes(found)
        _agree(found, "safe_get_full_fp32_param")
        return _whole(found, _at_least_fp32(found.mine(found.master.flat)), "the master weight")


@torch.no_grad()
def safe_set_full_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Writes the master weight of a parameter and the compute copy with it.

    Args:
        value: Whole, of any floating dtype, and the same on every rank of the group; every rank must call it.

    Raises:
        CallOrderError: No engine trains the parameter.
        DeepSpeedConfigError: ``value`` has another shape.
    """
    with untouched():
        found = _need(param, "safe_set_full_fp32_param")
        _check_full(found, value, "safe_set_full_fp32_param")
        _agree(found, "safe_set_full_fp32_param")
        keep_full(found.address, found.tile_of_full(value).to(found.bucket.device, found.bucket.dtype))
        mine = found.mine(found.master.flat)
        mine.copy_(found.mine_of_full(value))


@torch.no_grad()
def safe_get_local_fp32_param(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of the fp32 master weight."""
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        _carry_writes(found)
        return _at_least_fp32(found.mine(found.master.flat)).clone()


@torch.no_grad()
def safe_set_local_fp32_param(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Writes this rank's part of the master weight; ranks that keep the compute copy whole get it at the next update.

    Where other ranks compute with the values too (below stage 3, and where updates are divided among more ranks than
    share the parameters), every rank must call it.

    Args:
        value: As many elements as this rank's part has, in any shape and dtype.
    """
    with untouched():
        found = _need(param, "safe_set_local_fp32_param")
        _check_local(found, value, "safe_set_local_fp32_param")
        mine = found.mine(found.master.flat)
        mine.copy_(value.reshape(-1))
        bucket = found.bucket
        if bucket.is_sharded and bucket.state.value == "sharded" and not bucket.group.is_spread:
            fragment = bucket.fragment(found.address.tile)
            if fragment is not None:
                bucket.memory.await_reads()
                bucket.shard[fragment.in_slice].copy_(mine)
            return
        # All ranks compute with the whole value, so the parts are gathered.
        _agree(found, "safe_set_local_fp32_param")
        whole = _assemble(found, mine.to(bucket.dtype), "the changed master weight")
        keep_full(found.address, whole)
        mine.copy_(value.reshape(-1))


def _carry_writes(found: _TrainedParam) -> None:
    """Copies a program's writes to a resident parameter since the last update into its master."""
    bucket, tile = found.bucket, found.address.tile
    if not bucket.is_sharded and tile in bucket.changed_params():
        bucket.reattach(tile)
        found.master.refresh(tile)
        bucket.remember_value(tile)


# -- gradients -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns the reduced gradient of a parameter, whole, without the loss scale.

    Valid between the backward of the last micro-batch and the update. Every rank must call it where gradients are
    sharded. None where there is none: frozen, unused on all ranks, not reduced yet, or used up by the update.
    """
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        mine = found.gradient()
        if not _have_gradients([found], "safe_get_full_grad")[0] or mine is None:
            return None
        return _unscaled(_whole(found, mine, "the gradient"), found.loss_scale)


@torch.no_grad()
def safe_get_full_sensitivity(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns ``|master weight x reduced gradient|`` of every element, whole, without the loss scale; one gather.

    Valid and called as :func:`safe_get_full_grad`.
    """
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        _carry_writes(found)
        mine = found.gradient()
        if not _have_gradients([found], "safe_get_full_sensitivity")[0] or mine is None:
            return None
        product = (found.mine(found.master.flat).to(mine.device).float() * mine).abs_()
        return _unscaled(_whole(found, product, "weight times gradient"), found.loss_scale)


@torch.no_grad()
def safe_set_full_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces the reduced gradient of a parameter, whole and without the loss scale; the next update uses it.

    Args:
        value: In the full shape, and the same on every rank of the group; every rank must call it. Where gradients are
            not sharded the update compares which parameters the ranks have set, and raises ``DivergenceError`` if they
            differ.

    Raises:
        CallOrderError: There is no gradient to replace.
    """
    with untouched():
        found = _need(param, "safe_set_full_grad")
        _check_full(found, value, "safe_set_full_grad")
        _agree(found, "safe_set_full_grad")
        _write_gradient(found, found.mine_of_full(value), "safe_set_full_grad")


@torch.no_grad()
def safe_get_local_grad(param: torch.nn.Parameter) -> torch.Tensor | None:
    """Returns this rank's part of the reduced gradient, without the loss scale; see :func:`safe_get_full_grad`."""
    with untouched():
        found = _trained(param)
        mine = None if found is None else found.gradient()
        return None if found is None or mine is None else _unscaled(mine.clone(), found.loss_scale)


@torch.no_grad()
def safe_set_local_grad(param: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Replaces this rank's part of the reduced gradient, without the loss scale.

    Args:
        value: As many elements as this rank's part has, in any shape and dtype.
    """
    with untouched():
        found = _need(param, "safe_set_local_grad")
        _check_local(found, value, "safe_set_local_grad")
        _write_gradient(found, value.reshape(-1), "safe_set_local_grad")


def _have_gradients(members: Sequence[_TrainedParam], call: str) -> list[bool]:
    """Returns whether a backward has reached each parameter on any rank; the result is the same on all ranks.

    Ranks that keep whole gradients do not communicate, since some of them may not make the call. If this rank has not
    used the parameter, a nonzero sum shows that another rank has. A gradient that is exactly zero on all ranks that
    used it counts as none on the others; ``GradientBucket.writes`` keeps the ranks from diverging then.
    """
    first = members[0]
    gradients = first.runtime.gradients_of(first.bucket)
    is_used = [gradients is not None and gradients.used[found.address.tile] for found in members]
    if first.is_whole:
        parts = [found.gradient() for found in members]
        return [part is not None and (flag or bool(part.any())) for part, flag in zip(parts, is_used, strict=True)]
    rows = _agree(
        first, call, [int(flag) for flag in is_used], ", ".join(repr(found.address.name) for found in members)
    )
    return [any(column) for column in zip(*rows, strict=True)]


def _unscaled(gradient: torch.Tensor, loss_scale: float) -> torch.Tensor:
    """Returns a gradient, of any shape, without the loss scale, in fp32: in fp16 it could underflow."""
    gradient = _at_least_fp32(gradient)
    return gradient if loss_scale == 1.0 else gradient.div_(loss_scale)


def _write_gradient(found: _TrainedParam, value: torch.Tensor, call: str) -> None:
    mine = found.gradient()
    if mine is None:
        raise CallOrderError(
            f"{call}: {found.address.name!r} has no gradient now; gradients exist between the backward of the last "
            "micro-batch and the update"
        )
    # Scaled before it is rounded: without the loss scale it could underflow in fp16.
    mine.copy_(value if found.loss_scale == 1.0 else _at_least_fp32(value) * found.loss_scale)
    gradients = found.runtime.gradients_of(found.bucket)
    assert gradients is not None
    gradients.note_write(found.address.tile, by_all=found.is_whole)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.nn.Parameter],
    update_func: Callable[[torch.Tensor, torch.nn.Parameter], torch.Tensor],
) -> None:
    """Replaces the gradients of many parameters by ``update_func(full gradient, parameter)``.

    One collective per bucket instead of one per parameter, except for parameters that are cut over ranks. Every rank
    must call it with the same parameters; those without a gradient are skipped.

    Args:
        update_func: Gets the unscaled gradient in the full shape and the parameter, returns the new gradient of that
            shape, equal on every rank.
    """
    with untouched():
        by_bucket: dict[int, list[tuple[torch.nn.Parameter, _TrainedParam]]] = {}
        for param in param_list:
            found = _trained(param)
            if found is not None:
                # Ranks that cut layers unevenly have different buckets, so whole values are assembled in the caller's
                # order.
                key = id(found.bucket) if found.owners is None else id(param)
                by_bucket.setdefault(key, []).append((param, found))
        for members in by_bucket.values():
            _, first = members[0]
            if first.gradient() is None:
                continue
            have = _have_gradients([found for _, found in members], "safe_update_full_grad_vectorized")
            if not any(have):
                continue
            source = bucket_source(first.runtime, first.bucket, "grad")
            assert source is not None
            tiles = sorted(found.address.tile for _, found in members)
            whole = source.read(tiles)
            for param, found in compress(members, have):
                value = _unscaled(whole[found.address.tile], found.loss_scale)
                if found.owners is not None:
                    value = found.owners.whole(value, f"the gradient of {found.address.name}")
                new = update_func(value, param)
                _check_full(found, new, "safe_update_full_grad_vectorized")
                _write_gradient(found, found.mine_of_full(new), "safe_update_full_grad_vectorized")


# -- optimizer state -------------------------------------------------------------------------------------------------


@torch.no_grad()
def safe_get_full_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns one optimizer state of a parameter, whole (``exp_avg``), or the number that belongs to it (``step``).

    Every rank must call it where states are sharded. None before the first update.

    Raises:
        DeepSpeedConfigError: There are states, but none of that name.
    """
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        states = found.states()
        value = states.get(optim_state_key)
        kind, code, number = _describe(states, value)
        answers = _agree(found, f"safe_get_full_optimizer_state({optim_state_key!r})", (kind, code, number))
        kinds = [row[0] for row in answers]
        if _UNKNOWN in kinds:
            raise DeepSpeedConfigError(
                f"safe_get_full_optimizer_state: {found.address.name!r} has no state {optim_state_key!r}"
                + (f"; it has {', '.join(sorted(states))}" if states else "")
            )
        if _SCALAR in kinds:
            number = answers[kinds.index(_SCALAR)][2]
            return torch.frombuffer(bytearray(number.to_bytes(8, "little", signed=True)), dtype=torch.float64)[
                0
            ].float()
        if _ELEMENTS not in kinds:
            return None
        dtype = DTYPES[answers[kinds.index(_ELEMENTS)][1]]
        empty = torch.empty(0, dtype=dtype, device=found.bucket.device)
        mine = found.state_view(value) if isinstance(value, torch.Tensor) and kind == _ELEMENTS else empty
        return _whole(found, mine, f"the state {optim_state_key}")


def _describe(states: dict[str, Any], value: Any) -> tuple[int, int, int]:
    """Returns what this rank has of a state: kind, index of the dtype, bits of a scalar."""
    if not states:
        return _NOTHING, 0, 0
    if value is None:
        return _UNKNOWN, 0, 0
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return _ELEMENTS, DTYPES.index(value.dtype), 0
    bits = torch.tensor(float(value), dtype=torch.float64).view(torch.int64).item()
    return _SCALAR, 0, int(bits)


@torch.no_grad()
def safe_set_full_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes one optimizer state of a parameter.

    Args:
        value: In the full shape, and the same on every rank of the group; every rank must call it.

    Raises:
        CallOrderError: The optimizer has no such state yet; on every rank that shares the parameter.
    """
    with untouched():
        found = _need(param, "safe_set_full_optimizer_state")
        _check_full(found, value, "safe_set_full_optimizer_state")
        is_lacking = found.master.fragment(found.address.tile) is not None and not _has_elements(found, optim_state_key)
        if any(flag for (flag,) in _agree(found, f"safe_set_full_optimizer_state({optim_state_key!r})", [is_lacking])):
            raise _lacks_state(found, optim_state_key)
        _write_state(found, found.mine_of_full(value), optim_state_key)


@torch.no_grad()
def safe_get_local_optimizer_state(param: torch.nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Returns this rank's part of one optimizer state, 1-D: empty where it has nothing of the parameter.

    None before the first update.
    """
    with untouched():
        found = _trained(param)
        if found is None:
            return None
        value = found.states().get(optim_state_key)
        if value is None:
            return found.empty_state(optim_state_key)
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            return found.state_view(value).clone()
        return torch.as_tensor(value).clone()


@torch.no_grad()
def safe_set_local_optimizer_state(param: torch.nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Writes this rank's part of one optimizer state.

    Args:
        value: As many elements as this rank's part has, in any shape and dtype.
    """
    with untouched():
        found = _need(param, "safe_set_local_optimizer_state")
        _check_local(found, value, "safe_set_local_optimizer_state")
        _write_state(found, value.reshape(-1), optim_state_key)


def _has_elements(found: _TrainedParam, key: str) -> bool:
    value = found.states().get(key)
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _lacks_state(found: _TrainedParam, key: str) -> CallOrderError:
    return CallOrderError(
        f"safe_set_*_optimizer_state: {found.address.name!r} has no per-element state {key!r}; states exist after "
        f"the first update (now: {', '.join(sorted(found.states())) or 'none'})"
    )


def _write_state(found: _TrainedParam, value: torch.Tensor, key: str) -> None:
    if found.master.fragment(found.address.tile) is None:
        return
    if not _has_elements(found, key):
        raise _lacks_state(found, key)
    found.state_view(found.states()[key]).copy_(value)
