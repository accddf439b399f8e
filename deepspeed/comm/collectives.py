"""Collectives and point-to-point operations: torch's, with the communication log and the watchdog around them.

Every function takes the arguments of its namesake in :mod:`torch.distributed` and the keywords ``prof``, ``log_name``
and ``debug`` of :func:`deepspeed.comm.base.recorder.recorded`. All ranks of ``group`` (None: all ranks) must call a
collective, in the same order. ``src`` and ``dst`` are global ranks. With ``async_op=True`` the result is a handle with
``wait()``; otherwise None. Waits on the host are supervised (:mod:`deepspeed.comm.watch.watchdog`): a rank that does
something else, or whose program ends, is named on all that wait for it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as torch_dist

from deepspeed.comm.base.ranks import Ranks
from deepspeed.comm.base.recorder import recorded
from deepspeed.comm.base.torch_groups import drop_collected, is_collecting
from deepspeed.comm.job.job import Job
from deepspeed.comm.job.supervised import between, blocking, collective, recv_from_any

# Torch 2.13 renames the two flat collectives and warns at each use of the old names; older releases have only those.
all_gather_flat: Any = getattr(torch_dist, "all_gather_single", None) or torch_dist.all_gather_into_tensor
reduce_scatter_flat: Any = getattr(torch_dist, "reduce_scatter_single", None) or torch_dist.reduce_scatter_tensor

Group = Any  # a torch ProcessGroup, or None for all ranks
Handle = Any  # a torch Work, or None if the operation is complete


class _UnsupportedOp(enum.Enum):
    """A reduction that no backend performs; a placeholder in tables of operations."""

    UNUSED = "unused"


class ReduceOp:
    """Reductions. The members are torch's own, so either may be passed to either library's functions."""

    SUM: Any = torch_dist.ReduceOp.SUM
    PRODUCT: Any = torch_dist.ReduceOp.PRODUCT
    MIN: Any = torch_dist.ReduceOp.MIN
    MAX: Any = torch_dist.ReduceOp.MAX
    BAND: Any = torch_dist.ReduceOp.BAND
    BOR: Any = torch_dist.ReduceOp.BOR
    BXOR: Any = torch_dist.ReduceOp.BXOR
    AVG: Any = torch_dist.ReduceOp.AVG
    UNUSED: Any = _UnsupportedOp.UNUSED


def _ranks() -> Ranks:
    return Job.adopt().ranks


def _operations() -> Any:
    """Returns the module with the collectives: ``torch.distributed``, or a fake job's substitute."""
    return _ranks().operations


def _ours(name: str, ours: Any) -> Any:
    """Returns ``ours``, or under a fake job its substitute for this name of ``torch.distributed``."""
    return ours if _operations() is torch_dist else getattr(_operations(), name)


class _CopyingWork:
    """An operation in flight on other memory than the caller's; ``wait`` also copies its results to the caller's."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._copies = copies  # pairs of a tensor of the caller and what it receives, in the same shape

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Waits and copies; may be called again."""
        arrived: bool = self._work.wait() if timeout is None else self._work.wait(timeout)
        with torch.no_grad():
            for target, result in self._copies:
                target.copy_(result)
        self._copies = []
        return arrived

    def is_completed(self) -> bool:
        """Returns whether waiting would return at once."""
        return bool(self._work.is_completed())


def _started(start: Callable[..., Any], copies: list[tuple[torch.Tensor, torch.Tensor]], async_op: bool) -> Handle:
    """Starts an operation that :class:`_CopyingWork` completes; without ``async_op``, waits for it."""
    work = start(async_op=True)
    if work is None:  # this rank is not in the group
        return None
    handle = _CopyingWork(work, copies)
    if async_op:
        return handle
    handle.wait()
    return None


def _copying_back(tensor: torch.Tensor, place: torch.Tensor, start: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``start``, an operation on ``place``, such that ``tensor`` receives the result, of the same shape."""
    if place is tensor:
        return start
    target, result = tensor, place
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:  # expanded: torch writes only to tensors whose elements are in memory once
            target, result = target.narrow(dim, 0, 1), result.narrow(dim, 0, 1)
    return partial(_started, start, [(target, result)])


def _in_place(name: str, tensor: torch.Tensor, group: Group, async_op: bool, **options: Any) -> Handle:
    """Runs torch's collective ``name``, which writes its result into ``tensor`` (any shape)."""
    dense = _dense(tensor, group)
    start = _copying_back(tensor, dense, partial(getattr(_operations(), name), dense, group=group, **options))
    return collective(name, start, group, tensor, async_op)


def _dense(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Returns ``tensor`` (any shape), or a contiguous copy if it is on the host and not contiguous.

    There some operations of torch pass over memory as if it were contiguous: they would read and write what lies
    between the elements.
    """
    if not _is_on_host(tensor) or (tensor.is_contiguous() and not tensor.is_neg()):
        return tensor
    if torch.compiler.is_compiling() or is_collecting(group):
        return tensor
    return tensor.detach().resolve_neg().contiguous()


def _flat(output: torch.Tensor, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns both as 1-D, if they are on the host and ``output`` is contiguous; any shapes.

    Gloo compares shapes where other backends compare numbers of elements, and a tensor of shape () ends the process.
    """
    if torch.compiler.is_compiling() or not (_is_on_host(output) and _is_on_host(tensor) and output.is_contiguous()):
        return output, tensor
    return output.detach().view(-1), tensor.detach().reshape(-1)


def _on_flat(
    call: Callable[..., Any], output: torch.Tensor, tensor: torch.Tensor, group: Group, **options: Any
) -> Callable[..., Any]:
    """Returns the start of ``call``, a collective between ``output`` and ``tensor`` that may differ in shape."""
    place = _dense(output, group)
    return _copying_back(output, place, partial(call, *_flat(place, tensor), group=group, **options))


def _is_on_host(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.device.type == "cpu"


def _all_dense(tensors: list[torch.Tensor] | None, group: Group) -> list[torch.Tensor] | None:
    """Returns ``tensors`` with :func:`_dense` applied to each."""
    return [_dense(tensor, group) for tensor in tensors] if isinstance(tensors, list) else tensors


@recorded("tensor")
def broadcast(tensor: torch.Tensor, src: int, group: Group = None, async_op: bool = False) -> Handle:
    """Copies ``tensor`` of rank ``src`` into that of every rank; shape and dtype are the same on all of them."""
    return _in_place("broadcast", tensor, group, async_op, src=src)


@recorded("object_list")
def broadcast_object_list(
    object_list: list[Any], src: int, group: Group = None, device: torch.device | None = None
) -> None:
    """Replaces the items of ``object_list`` by those of rank ``src`` (pickled: only from ranks you trust)."""
    call = partial(_operations().broadcast_object_list, object_list, src=src, group=group, device=device)
    blocking("broadcast_object_list", call, group)


@recorded("tensor")
def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False) -> Handle:
    """Reduces ``tensor`` (any shape, equal on all ranks) over the ranks, in place, on every rank."""
    return _in_place("all_reduce", tensor, group, async_op, op=op)


@recorded("tensor")
def inference_all_reduce(
    tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Handle:
    """Reduces ``tensor`` (any shape) as :func:`all_reduce` does, under its own name in the log."""
    return _in_place("all_reduce", tensor, group, async_op, op=op)


@recorded("tensors")
def all_reduce_coalesced(
    tensors: list[torch.Tensor], op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Handle:
    """Reduces several tensors over the ranks, in place, as one operation where the backend can.

    Their shapes and dtypes are the same on all ranks.
    """

    def start(async_op: bool) -> Handle:
        with _ours("all_reduce_coalesced", _coalescing)(group, async_op) as manager:
            for tensor in tensors:
                torch_dist.all_reduce(tensor, op=op, group=group)
        return manager if async_op else None

    return collective("all_reduce_coalesced", start, group, tensors[0] if tensors else None, async_op)


@recorded("tensor")
def reduce(
    tensor: torch.Tensor, dst: int, op: Any = ReduceOp.SUM, group: Group = None, async_op: bool = False
) -> Handle:
    """Reduces ``tensor`` (any shape, equal on all ranks) over the ranks into ``tensor`` of rank ``dst``."""
    return _in_place("reduce", tensor, group, async_op, dst=dst, op=op)


@recorded("input_list")
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Reduces item *r* of ``input_list`` over the ranks into ``output`` of rank *r*, which has the same shape."""
    return _in_place("reduce_scatter", output, group, async_op, input_list=_all_dense(input_list, group), op=op)


@recorded("tensor")
def reduce_scatter_tensor(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Reduces ``tensor`` over the ranks and leaves its *r*-th equal part in ``output_tensor`` of rank *r*.

    ``tensor`` has the same shape and dtype on every rank, and as many elements as the outputs of all ranks together.
    """
    start = _on_flat(_ours("reduce_scatter_tensor", reduce_scatter_flat), output_tensor, tensor, group, op=op)
    return collective("reduce_scatter_tensor", start, group, tensor, async_op)


@recorded("tensor")
def reduce_scatter_fn(
    output_tensor: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Runs :func:`reduce_scatter_tensor`, on tensors of the same shapes, under its older name."""
    start = _on_flat(_ours("reduce_scatter_tensor", reduce_scatter_flat), output_tensor, tensor, group, op=op)
    return collective("reduce_scatter_tensor", start, group, tensor, async_op)


@recorded("tensor_list")
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Handle:
    """Leaves ``tensor`` of rank *r* in item *r* of ``tensor_list`` on every rank; all have the same shape and dtype."""
    return collective(
        "all_gather", partial(_operations().all_gather, tensor_list, tensor, group), group, tensor, async_op
    )


@recorded("output_tensor")
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Handle:
    """Leaves the tensors of all ranks, one after another, in ``output_tensor`` on every rank.

    ``tensor`` has the same shape and dtype on every rank, ``output_tensor`` as many elements as all of them together.
    """
    start = _on_flat(_ours("all_gather_into_tensor", all_gather_flat), output_tensor, tensor, group)
    return collective("all_gather_into_tensor", start, group, tensor, async_op)


@recorded("output_tensor")
def allgather_fn(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Group = None, async_op: bool = False
) -> Handle:
    """Runs :func:`all_gather_into_tensor`, on tensors of the same shapes, under its older name."""
    start = _on_flat(_ours("all_gather_into_tensor", all_gather_flat), output_tensor, input_tensor, group)
    return collective("all_gather_into_tensor", start, group, input_tensor, async_op)


@recorded("output_tensors")
def all_gather_coalesced(
    output_tensors: list[torch.Tensor], input_tensors: list[torch.Tensor], group: Group = None, async_op: bool = False
) -> Handle:
    """Runs several :func:`all_gather_into_tensor` as one operation where the backend can.

    Each output has the elements of its input once for each rank. Shapes are equal on all ranks.
    """

    def start(async_op: bool) -> Handle:
        with _ours("all_gather_coalesced", _coalescing)(group, async_op) as manager:
            for output, tensor in zip(output_tensors, input_tensors, strict=True):
                all_gather_flat(*_flat(output, tensor), group=group)
        return manager if async_op else None

    return collective("all_gather_coalesced", start, group, input_tensors[0] if input_tensors else None, async_op)


@contextmanager
def _coalescing(group: Group, async_op: bool) -> Iterator[Any]:
    """Groups collectives into one launch by torch; the handle it yields waits for all of them.

    After an error torch would collect later operations of the group too, and never start them.
    """
    is_within_another = is_collecting(group)
    try:
        with torch_dist.distributed_c10d._coalescing_manager(group=group, async_ops=async_op) as manager:
            yield manager
    except BaseException:
        if not is_within_another:
            drop_collected(group)
        raise


@recorded("object_list")
def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Leaves ``obj`` of rank *r* in item *r* of ``object_list`` on every rank (pickled: only from ranks you trust)."""
    blocking("all_gather_object", partial(_operations().all_gather_object, object_list, obj, group=group), group)


@recorded("tensor")
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Sends the *r*-th part of ``tensor`` to rank *r*; what arrives lies in ``output`` in order of the senders.

    Parts are along the first dimension: of equal size, or by the lists of split sizes.
    """
    place, exchange = _dense(output, group), _operations().all_to_all_single
    call = partial(exchange, place, tensor, output_split_sizes, input_split_sizes, group=group)
    start = _copying_back(output, place, call)
    return collective("all_to_all", start, group, tensor, async_op)


@recorded("input_tensor_list")
def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Sends item *r* of ``input_tensor_list`` to rank *r*; item *r* of ``output_tensor_list`` comes from rank *r*.

    Items may have any shape; an output has the shape that its sender gave the item.
    """
    is_member = group is not torch_dist.GroupMember.NON_GROUP_MEMBER and bool(input_tensor_list)
    by_parts = is_member and _ranks().backend_for(group, input_tensor_list[0].device) == "gloo"
    exchange = _ours("all_to_all", _all_to_all_by_flat_exchange if by_parts else torch_dist.all_to_all)
    start = partial(exchange, output_tensor_list, input_tensor_list, group=group)
    return collective("all_to_all", start, group, input_tensor_list[0] if input_tensor_list else None, async_op)


def _all_to_all_by_flat_exchange(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group, async_op: bool
) -> Handle:
    """Exchanges lists on gloo by its flat all-to-all, the only one it has before torch 2.13."""
    dtypes = {tensor.dtype for tensor in (*outputs, *inputs)}
    if len(dtypes) > 1:
        raise ValueError(
            f"all_to_all: expected one dtype for all outputs and inputs, found {', '.join(sorted(map(str, dtypes)))}. "
            "Convert them to one"
        )
    flat = outputs[0].new_empty(sum(output.numel() for output in outputs))
    start = partial(
        torch_dist.all_to_all_single,
        flat,
        torch.cat([tensor.reshape(-1) for tensor in inputs]),
        [output.numel() for output in outputs],
        [tensor.numel() for tensor in inputs],
        group=group,
    )
    parts = flat.split([output.numel() for output in outputs])
    return _started(
        start, [(output, part.view_as(output)) for output, part in zip(outputs, parts, strict=True)], async_op
    )


@recorded("tensor")
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Leaves ``tensor`` of rank *r* in item *r* of ``gather_list`` on rank ``dst``; the others pass no list.

    All tensors have the same shape and dtype.
    """
    start = partial(_operations().gather, tensor, gather_list=gather_list, dst=dst, group=group)
    return collective("gather", start, group, tensor, async_op)


@recorded("tensor")
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
) -> Handle:
    """Leaves item *r* of rank ``src``'s ``scatter_list`` in ``tensor`` of rank *r*; the others pass no list.

    All tensors have the same shape and dtype.
    """
    return _in_place("scatter", tensor, group, async_op, scatter_list=_all_dense(scatter_list, group), src=src)


@recorded("tensor")
def send(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> None:
    """Sends ``tensor`` (any shape) to rank ``dst`` and waits until it may be overwritten."""
    start = partial(_operations().isend, tensor, dst=dst, group=group, tag=tag)
    handle = between("send", start, group, tensor, dst, sends=True, tag=tag)
    if handle is not None:
        handle.wait()


@recorded("tensor")
def recv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> int:
    """Receives into ``tensor`` (the sender's shape and dtype) from rank ``src``, or from any rank if it is None.

    Returns the rank of the sender. ``tag`` must be that of the send.
    """
    if src is None:
        sender: list[int] = []
        recv_from_any(lambda: sender.append(_operations().recv(tensor, group=group, tag=tag)), group)
        return sender[0]
    start = partial(_operations().irecv, tensor, src=src, group=group, tag=tag)
    handle = between("recv", start, group, tensor, src, sends=False, tag=tag)
    if handle is None:
        return -1
    handle.wait()
    return src


@recorded("tensor")
def isend(tensor: torch.Tensor, dst: int, group: Group = None, tag: int = 0) -> Handle:
    """Starts to send ``tensor`` (any shape) to rank ``dst``; it may be overwritten after ``wait()`` of the result."""
    start = partial(_operations().isend, tensor, dst=dst, group=group, tag=tag)
    return between("isend", start, group, tensor, dst, sends=True, tag=tag)


@recorded("tensor")
def irecv(tensor: torch.Tensor, src: int | None = None, group: Group = None, tag: int = 0) -> Handle:
    """Starts to receive into ``tensor`` from rank ``src``, or from any rank if it is None.

    The tensor has the sender's shape and dtype; it may be read after ``wait()`` of the result.
    """
    start = partial(_operations().irecv, tensor, src=src, group=group, tag=tag)
    return start() if src is None else between("irecv", start, group, tensor, src, sends=False, tag=tag)


def batch_isend_irecv(p2p_op_list: list[torch_dist.P2POp]) -> list[Any]:
    """Starts several sends and receives together; returns one handle for each, or one for all (NCCL)."""
    works = torch_dist.batch_isend_irecv(p2p_op_list)
    if len(works) != len(p2p_op_list):
        return works

    def supervised(operation: torch_dist.P2POp, work: Handle) -> Handle:
        sends = operation.op is torch_dist.isend
        name, group = "isend" if sends else "irecv", operation.group
        return between(name, lambda: work, group, operation.tensor, operation.peer, sends=sends, tag=operation.tag)

    return [supervised(*pair) for pair in zip(p2p_op_list, works, strict=True)]


@recorded(None)
def barrier(group: Group = None, async_op: bool = False, device_ids: list[int] | None = None) -> Handle:
    """Waits until every rank of ``group`` has called it."""
    return collective("barrier", partial(_operations().barrier, group, device_ids=device_ids), group, None, async_op)


@recorded(None)
def monitored_barrier(group: Group = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
    """Does what :func:`barrier` does; raises after ``timeout`` (None: the group's), naming a rank that did not arrive.

    With ``wait_all_ranks`` all missing ranks are named, not only the first.

    Raises:
        RuntimeError: A rank did not come in time. Also on a backend other than gloo: torch has no such barrier there.
    """
    call = partial(_operations().monitored_barrier, group, timeout=timeout, wait_all_ranks=wait_all_ranks)
    blocking("monitored_barrier", call, group, patience=0.0)
