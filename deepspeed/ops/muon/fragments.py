"""Muon's matrix step when matrices are cut anywhere over the ranks.

Momentum is elementwise and stays where the fragments are. The update of each matrix is gathered to its owner,
orthogonalized there, and the fragments are sent back: two exchanges per round.

Every rank knows how all tensors are cut (``SharedTensor``), so each computes the same owners and the same transfers
without communication. Ranks are given by position: the order of their parts in the buffers.

A matrix goes to the rank that holds most of it, unless that rank would get more than its fair share of elements; then
it goes to the least loaded rank. Matrices are handled in rounds, which bounds the buffers. The cost of planning grows
with the number of matrices and the logarithm of the number of ranks, besides one number per rank and round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deepspeed.ops.exchange import exchange_device, exchange_parts
from deepspeed.ops.fragments import FragmentTable, SharedTensor, TensorFragment

#: Elements per rank and round: bounds each of the two exchange buffers at 256 MiB of fp32.
ROUND_NUMEL_PER_RANK = 1 << 26

_FP32 = 4  # bytes of an element that is sent


@dataclass(frozen=True)
class _FragmentOfRun:
    """A fragment of a matrix in a flat run of this rank."""

    run: Tensor
    fragment: TensorFragment


class _ExchangeRound:
    def __init__(self, planned: MuonRound, table: FragmentTable) -> None:
        def by_rank(fragment: MatrixFragment) -> tuple[int, int]:
            return table.ranks[fragment.peer], fragment.tensor.index

        # fragments that this rank sends, in the order of the send buffer
        self.sent = sorted(planned.sent_by(table.position), key=by_rank)
        # fragments of the matrices that it orthogonalizes, in the order of the receive buffer
        self.received = sorted(planned.received_by(table.position), key=by_rank)
        self.send_numels = self._numels(self.sent, table)  # numbers of elements for each rank
        self.receive_numels = self._numels(self.received, table)  # numbers of elements from each rank

    @staticmethod
    def _numels(fragments: list[MatrixFragment], table: FragmentTable) -> list[int]:
        numels = [0] * len(table.ranks)
        for fragment in fragments:
            numels[table.ranks[fragment.peer]] += fragment.numel
        return numels


class FragmentExchange:
    """Gathers whole matrices from the ranks that hold their fragments, and returns fragments to these ranks.

    Each matrix of a stack has its own owner. The matrices of a stack that a rank owns are orthogonalized in one batch.

    Every rank of the table's group must construct it with the same matrices; that needs no communication.

    Attributes:
        heaviest_rank: The global rank (or the rank in the group, if the table has no global ranks) that needs most
            memory for a step; None without matrices.
        heaviest_numels: Elements of its largest matrix, and of all its matrices in that round.
        num_matrices: Matrices on all ranks together.
        is_exchanged: Whether there are other ranks.
        sent_bytes: Bytes that this rank sends to others in a step: fp32, to the owners and back.
        all_sent_bytes: Bytes that all ranks send in a step.

    Args:
        runs: The 1-D runs of the matrix groups.
        stacks: Indices of the matrix groups whose tensors are stacks of matrices.

    Raises:
        ValueError: On every rank: a tensor is not a matrix. On this rank: the runs do not hold the fragments that the
            table lists for its position.
    """

    def __init__(
        self, table: FragmentTable, runs: list[Tensor], groups: Collection[int], stacks: Collection[int] = ()
    ) -> None:
        self._axis = table.axis
        self._device = exchange_device(runs, table.axis)
        matrices: list[SharedTensor] = []
        self._stack_of: dict[int, int] = {}
        by_tensor: dict[int, list[SharedTensor]] = {}
        for tensor in table.shared:
            if tensor.param_group in groups:
                is_stack = tensor.param_group in stacks
                found = _matrices_of(tensor, len(matrices), is_stack=is_stack)
                by_tensor[tensor.index] = found
                matrices += found
                if is_stack:
                    self._stack_of.update((matrix.index, tensor.index) for matrix in found)
        self._locations = {
            part.index: _FragmentOfRun(run, part)
            for run in runs
            for fragment in table.of(run)
            if fragment.numel
            for part in _matrix_fragments(fragment, by_tensor.get(fragment.index, []))
        }
        planned = plan_rounds(matrices, len(table.ranks), ROUND_NUMEL_PER_RANK * len(table.ranks))
        self._rounds = [_ExchangeRound(members, table) for members in planned]
        heaviest, self.heaviest_numels = heaviest_position(planned)
        self.heaviest_rank = None if heaviest is None else (table.job_ranks or table.ranks)[heaviest]
        self.num_matrices, self.is_exchanged = len(matrices), table.axis is not None
        pairs = [pair for members in planned for pair in members.owners]
        self.sent_bytes = _FP32 * sum(_sent_numel(tensor, owner, table.position) for tensor, owner in pairs)
        self.all_sent_bytes = 2 * _FP32 * sum(tensor.numel - tensor.numel_at(owner) for tensor, owner in pairs)
        self._check_locations()

    def _check_locations(self) -> None:
        planned = {
            fragment.tensor.index: (fragment.start, fragment.stop)
            for exchange_round in self._rounds
            for fragment in exchange_round.sent
        }
        present = {
            index: (location.fragment.tensor_start, location.fragment.tensor_stop)
            for index, location in self._locations.items()
        }
        wrong = sorted(index for index in planned.keys() | present.keys() if planned.get(index) != present.get(index))
        if wrong:
            raise ValueError(
                f"Muon: matrix {wrong[0]}: expected its elements {planned.get(wrong[0])} of the fragment table in the "
                f"runs of the matrix groups, found {present.get(wrong[0])}; call attach_segments again after the runs "
                "have changed"
            )

    def step(
        self,
        update_of: Callable[[Tensor, slice], Tensor],
        orthogonalize: Callable[..., Tensor],
        apply: Callable[[Tensor, slice, Tensor, tuple[int, ...]], None],
    ) -> None:
        """Runs one step of all matrices. Every rank must call it.

        Args:
            update_of: ``(run, elements) -> `` fp32 update of those elements, before orthogonalizing.
            orthogonalize: Function from a matrix in its full shape to the orthogonalized one; with ``is_stack=True``,
                from a 3-D stack to a stack.
            apply: ``(run, elements, orthogonalized update, full shape)``: changes the weights.
        """
        for exchange_round in self._rounds:
            self._run(exchange_round, update_of, orthogonalize, apply)

    def _run(self, exchange_round: _ExchangeRound, update_of: Any, orthogonalize: Any, apply: Any) -> None:
        fragments = torch.empty(sum(exchange_round.send_numels), dtype=torch.float32, device=self._device)
        for fragment, view in zip(exchange_round.sent, _views(fragments, exchange_round.sent), strict=True):
            location = self._locations[fragment.tensor.index]
            view.copy_(update_of(location.run, slice(location.fragment.start, location.fragment.stop)))

        matrices = fragments if self._axis is None else fragments.new_empty(sum(exchange_round.receive_numels))
        self._exchange(matrices, fragments, (exchange_round.receive_numels, exchange_round.send_numels))
        self._orthogonalize_all(
            list(zip(exchange_round.received, _views(matrices, exchange_round.received), strict=True)), orthogonalize
        )
        self._exchange(fragments, matrices, (exchange_round.send_numels, exchange_round.receive_numels))

        for fragment, view in zip(exchange_round.sent, _views(fragments, exchange_round.sent), strict=True):
            location = self._locations[fragment.tensor.index]
            apply(location.run, slice(location.fragment.start, location.fragment.stop), view, fragment.tensor.shape)

    def _exchange(self, incoming: Tensor, outgoing: Tensor, numels: tuple[list[int], list[int]]) -> None:
        if self._axis is not None:
            exchange_parts(incoming, outgoing, numels, self._axis, "the matrices of Muon")

    def _orthogonalize_all(
        self, fragments: list[tuple[MatrixFragment, Tensor]], orthogonalize: Callable[..., Tensor]
    ) -> None:
        by_matrix: dict[int, list[tuple[MatrixFragment, Tensor]]] = {}
        for fragment, view in fragments:
            by_matrix.setdefault(fragment.tensor.index, []).append((fragment, view))
        stacks: dict[int, list[list[tuple[MatrixFragment, Tensor]]]] = {}
        for index, parts in by_matrix.items():
            parts.sort(key=lambda part: part[0].start)
            if index in self._stack_of:
                stacks.setdefault(self._stack_of[index], []).append(parts)
            else:
                _write_back(parts, orthogonalize(_joined(parts)))
        for members in stacks.values():
            found = orthogonalize(torch.stack([_joined(parts) for parts in members]), is_stack=True)
            for parts, matrix in zip(members, found, strict=True):
                _write_back(parts, matrix)


def _sent_numel(tensor: SharedTensor, owner: int, position: int) -> int:
    """Returns the elements that a rank sends for a matrix: its part; or, as the owner, the parts of the others."""
    own = tensor.numel_at(position)
    return tensor.numel - own if owner == position else own


def _matrices_of(tensor: SharedTensor, first: int, *, is_stack: bool) -> list[SharedTensor]:
    if not is_stack:
        return [replace(tensor, index=first)]
    shape = tensor.shape[-2:]
    numel = shape[0] * shape[1]
    return [
        replace(tensor, index=first + number, shape=shape, start=tensor.start + number * numel)
        for number in range(tensor.numel // numel)
    ]


def _matrix_fragments(fragment: TensorFragment, matrices: list[SharedTensor]) -> Iterator[TensorFragment]:
    """Yields the parts of a non-empty fragment of a tensor, cut at the boundaries of its matrices."""
    numel = matrices[0].numel if matrices else 0
    for number in range(fragment.tensor_start // numel, -(-fragment.tensor_stop // numel)) if numel else ():
        first, last = max(fragment.tensor_start, number * numel), min(fragment.tensor_stop, (number + 1) * numel)
        start = fragment.start + first - fragment.tensor_start
        matrix = matrices[number]
        yield replace(
            fragment,
            index=matrix.index,
            start=start,
            stop=start + last - first,
            tensor_start=first - number * numel,
            shape=matrix.shape,
        )


def _joined(parts: list[tuple[MatrixFragment, Tensor]]) -> Tensor:
    return torch.cat([view for _, view in parts]).view(parts[0][0].tensor.shape)


def _write_back(parts: list[tuple[MatrixFragment, Tensor]], matrix: Tensor) -> None:
    flat = matrix.reshape(-1)
    for fragment, view in parts:
        view.copy_(flat[fragment.start : fragment.stop])


def _views(buffer: Tensor, fragments: list[MatrixFragment]) -> tuple[Tensor, ...]:
    return buffer.split([fragment.numel for fragment in fragments]) if fragments else ()


@dataclass(frozen=True)
class MatrixFragment:
    """Elements ``[start, stop)`` of the flattened ``tensor``, which the rank at position ``peer`` sends or receives."""

    tensor: SharedTensor
    start: int
    stop: int
    peer: int

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class MuonRound:
    """Matrices handled together."""

    # each matrix with the position of the rank that orthogonalizes it, in the order of their numbers
    owners: tuple[tuple[SharedTensor, int], ...]

    def owned_by(self, position: int) -> list[SharedTensor]:
        """Returns the matrices that a rank orthogonalizes."""
        return [tensor for tensor, owner in self.owners if owner == position]

    def sent_by(self, position: int) -> list[MatrixFragment]:
        """Returns the part of each matrix that a rank holds; ``peer`` is the owner."""
        return [
            MatrixFragment(tensor, *tensor.held_by(position), owner)
            for tensor, owner in self.owners
            if tensor.numel_at(position)
        ]

    def received_by(self, position: int) -> list[MatrixFragment]:
        """Returns the parts of the matrices that a rank orthogonalizes; ``peer`` is the rank that has the part."""
        return [
            MatrixFragment(tensor, *tensor.held_by(peer), peer)
            for tensor in self.owned_by(position)
            for peer in tensor.positions()
            if tensor.numel_at(peer)
        ]


def plan_rounds(tensors: Iterable[SharedTensor], world_size: int, round_numel: int) -> list[MuonRound]:
    """Assigns matrices to rounds of ``round_numel`` elements (or one matrix) and owners, alike on all ranks.

    Raises:
        ValueError: A tensor has fewer than 2 dimensions.
    """
    members = list(tensors)
    for tensor in members:
        if len(tensor.shape) < 2:
            raise ValueError(
                f"Muon orthogonalizes matrices, but {tensor.name} has shape {tensor.shape}; put it in a group with "
                "use_muon=False"
            )
    return [_with_owners(together, world_size) for together in _rounds_of(members, round_numel)]


def heaviest_position(rounds: Iterable[MuonRound]) -> tuple[int | None, tuple[int, int]]:
    """Returns the owner of the largest matrix; among several, the one with the most elements in that round.

    Returns:
        Its position, None without matrices; and the elements of that matrix and of all its matrices in the round.
    """
    heaviest = (0, 0, 0)
    for planned in rounds:
        largest: dict[int, int] = defaultdict(int)
        total: dict[int, int] = defaultdict(int)
        for tensor, owner in planned.owners:
            largest[owner] = max(largest[owner], tensor.numel)
            total[owner] += tensor.numel
        heaviest = max(heaviest, *((largest[owner], total[owner], -owner) for owner in total))
    return -heaviest[2] if heaviest[0] else None, heaviest[:2]


def _rounds_of(tensors: list[SharedTensor], round_numel: int) -> list[list[SharedTensor]]:
    """Assigns matrices to rounds, the largest first, so that sizes in a round are similar and balance well."""
    rounds: list[list[SharedTensor]] = []
    filled = 0
    for tensor in sorted(tensors, key=lambda tensor: (-tensor.numel, tensor.index)):
        if not rounds or filled + tensor.numel > round_numel:
            rounds.append([])
            filled = 0
        rounds[-1].append(tensor)
        filled += tensor.numel
    return rounds


def _with_owners(members: list[SharedTensor], world_size: int) -> MuonRound:
    """Returns the round of ``members`` with their owners.

    The owner is the rank with the largest part, unless it would get more than its fair share; then the least loaded.
    """
    loads = _SegmentTree(world_size)
    fair = sum(tensor.numel for tensor in members) / world_size
    owners = []
    for tensor in members:
        held_at = tensor.positions()
        # Of the ranks that have a part: the first, the last, and the least loaded in between, whose parts are equal.
        # Then the least loaded of all ranks.
        candidates = []
        for positions in (held_at[:1], held_at[1:-1], held_at[-1:], range(world_size)):
            if positions:
                load, position = loads.least(positions)
                candidates.append((load, -tensor.numel_at(position), position))
        load, _, owner = min(candidates, key=lambda candidate: (candidate[1], candidate[0], candidate[2]))
        if load and load + tensor.numel > fair:
            _, _, owner = min(candidates)
        loads.add(owner, tensor.numel)
        owners.append((tensor, owner))
    return MuonRound(tuple(sorted(owners, key=lambda entry: entry[0].index)))


class _SegmentTree:
    """The load of each position, in elements, initially 0; finds the minimum of a range in logarithmic time.

    A binary tree in a list: leaves are positions, and a node is the minimum of its two children. Load and position are
    encoded in one number, so among equal loads the first position is the minimum.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * size + list(range(size))
        for node in range(size - 1, 0, -1):
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])

    def add(self, position: int, numel: int) -> None:
        """Adds to the load of one position."""
        node = self._size + position
        self._tree[node] += numel * self._size
        while node > 1:
            node //= 2
            self._tree[node] = min(self._tree[2 * node], self._tree[2 * node + 1])

    def least(self, positions: range) -> tuple[int, int]:
        """Returns load and position of the least loaded of consecutive positions; among equals the first."""
        first, last = self._size + positions[0], self._size + positions[-1] + 1
        least = self._tree[first]
        while first < last:
            if first % 2:
                least = min(least, self._tree[first])
                first += 1
            if last % 2:
                last -= 1
                least = min(least, self._tree[last])
            first, last = first // 2, last // 2
        return divmod(least, self._size)
