"""Transfers by a backend's own collectives: NCCL and similar, where the order of calls must be equal on all ranks."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from deepspeed.accelerator import get_accelerator
from deepspeed.axes import DATA
from deepspeed.comm.base.counters import traffic
from deepspeed.comm.base.recorder import timed
from deepspeed.comm.transports.transport import DoneWork, Reduction, TensorTransfer, Transport, Work, scaled_sum

_POLL = 50e-6  # seconds between two questions whether the device has finished


def pause(seconds: float) -> None:
    """Sleeps while the device works."""
    time.sleep(seconds)


class NativeWork:
    """One of torch's works: its wait is supervised, and what must follow it is done after it.

    ``finish`` is called after it; where the transport has a stream for that, at once, to queue what it does there.
    ``keep`` are tensors that must live until then.
    """

    def __init__(
        self, work: Any, transport: NativeTransport, ticket: tuple[str, int], label: str, finish: Any, keep: Any
    ) -> None:
        self._finished: Any = None  # event after ``finish``
        if finish is not None and transport.finishing_stream is not None:
            self._finished = transport.queue_after(work, finish)
            keep, finish = (keep, finish), None
        self._work = work
        self._transport = transport
        self._ticket = ticket
        self._label = label
        self._finish = finish
        self._keep = keep

    def will_arrive(self) -> bool:
        """Returns whether the transfer is over.

        Waiting earlier puts the current stream behind it, and later gathers too.
        """
        return self._work is None or self._work.is_completed()

    def poll(self, seconds: float) -> bool:
        """Polls the transfer on the host, like ``transport.poll``; no stream of the device waits for it."""

        def polling() -> None:
            until = time.monotonic() + seconds
            while not self.will_arrive() and time.monotonic() <= until:
                pause(_POLL)

        watch = self._transport.watch
        if watch is None:
            polling()
        elif not self.will_arrive():  # supervised: the others may depend on what comes next
            ranks, on_stream = self._transport.ranks, self._transport.runs_on_stream
            watch.wait(polling, *self._ticket, self._label, ranks, on_stream=on_stream, gives_up=True)
        return self.will_arrive()

    def wait(self) -> None:
        """Blocks (host or current stream) until the result is in place. Later calls return at once."""
        if self._work is None:
            return
        work, self._work = self._work, None
        self._transport.guard(work.wait, self._ticket, self._label)
        if self._finished is not None:
            self._transport.stream.wait_event(self._finished)
        if self._finish is not None:
            self._finish()
        self._keep = None


def _sum_parts(parts: torch.Tensor, out: torch.Tensor, how: Reduction) -> None:
    """Leaves the scaled sum of ``parts`` ``[ranks, numel]``, made in fp32 in one pass, in ``out``."""
    is_wide = out.dtype == torch.float32
    total = torch.sum(parts, 0, dtype=torch.float32, out=out if is_wide else None)
    scaled_sum([total], out, how.scale, how.visit)


class NativeTransport(Transport):
    """The backend's own collectives, on ``device``. Calls must be made in the same order on all ranks of the group."""

    name = "native"
    needs_one_order = True

    def __init__(self, group: Any, rank: int, size: int, device: torch.device, axis: str = DATA) -> None:
        super().__init__(group, rank, size, axis)
        self.device = self.small_device = device
        self.runs_on_stream = device.type != "cpu"

    @override
    def issue(self, channel: str, key: int | None = None) -> tuple[str, int]:
        self.started += 1
        return super().issue(channel, key)

    @override
    def guard(self, blocking: Callable[[], Any], ticket: tuple[str, int], label: str) -> None:
        super().guard(blocking, ticket, label)
        if self.runs_on_stream and self.watch is not None:
            reached = get_accelerator().Event()
            reached.record(self.stream)
            self.watch.follow(reached, *ticket, label, self.ranks)

    @property
    def stream(self) -> Any:
        """The current stream of the transport's device, which need not be the current device."""
        return get_accelerator().current_stream(self.device.index)

    @functools.cached_property
    def finishing_stream(self) -> Any:
        """Stream for what follows a reduction, so that the computation does not wait for it; None where there is none.

        With TORCH_NCCL_BLOCKING_WAIT a work blocks the host when it is waited for, which must not happen where it is
        issued.
        """
        accelerator = get_accelerator()
        is_other_device = self.device.type != accelerator.device_name()
        if is_other_device or accelerator.shares_host_memory(self.device):
            return None
        if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0").lower() not in ("", "0", "n", "no", "false"):
            return None
        return accelerator.Stream()

    def queue_after(self, work: Any, finish: Callable[[], None]) -> Any:
        """Queues ``finish`` after a work that was just issued, beside the current stream.

        Returns the event after it, for which the current stream must wait before it uses the result.
        """
        accelerator = get_accelerator()
        with accelerator.stream(self.finishing_stream):
            work.wait()
            finish()
            event = accelerator.Event()
            event.record(self.finishing_stream)
        return event

    def _work(
        self, work: Any, channel: str, key: int, label: str, finish: Callable[[], None] | None, keep: Any
    ) -> Work:
        return NativeWork(work, self, self.issue(channel, key), label, finish, keep)

    @override
    @timed("all_gather_into_tensor")
    def all_gather(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        nbytes = flat.numel() * flat.element_size()
        traffic.record_requested("all_gather", nbytes, self.axis)
        if flat.numel() == 0:
            return DoneWork()
        traffic.record_ran("all_gather_into_tensor", nbytes // self.size, self.axis)
        work = self.group._allgather_base(flat, self.my_slice(flat))
        return self._work(work, "gather", key, label, None, flat)

    @override
    @timed("reduce_scatter_tensor")
    def reduce_scatter(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        nbytes = flat.numel() * flat.element_size()
        traffic.record_requested("reduce_scatter", nbytes, self.axis)
        if flat.numel() == 0:
            return DoneWork()
        if self.sums_exactly and flat.element_size() < 4:
            traffic.record_ran("all_to_all_single", nbytes - nbytes // self.size, self.axis)
            received = torch.empty_like(flat)
            work = self.group.alltoall_base(received, flat, [], [])
            finish = functools.partial(_sum_parts, received.view(self.size, -1), out, how)
            return self._work(work, "reduce", how.key, how.label, finish, (flat, out))
        traffic.record_ran("reduce_scatter_tensor", nbytes, self.axis)
        target = out if out.dtype == flat.dtype else torch.empty_like(self.my_slice(flat))
        work = self.group._reduce_scatter_base(target, flat)
        finish = functools.partial(scaled_sum, [target], out, how.scale, how.visit)
        return self._work(work, "reduce", how.key, how.label, finish, (flat, out))

    @override
    @timed("all_reduce")
    def all_reduce(self, flat: torch.Tensor, out: torch.Tensor, how: Reduction) -> Work:
        nbytes = flat.numel() * flat.element_size()
        traffic.record_requested("all_reduce", 2 * nbytes, self.axis)
        if flat.numel() == 0:
            return DoneWork()
        traffic.record_ran("all_reduce", 2 * nbytes, self.axis)
        work = self.group.allreduce([flat])
        finish = functools.partial(scaled_sum, [flat], out, how.scale, how.visit)
        return self._work(work, "reduce", how.key, how.label, finish, (flat, out))

    @override
    @timed("all_to_all_single")
    def all_to_all(
        self, source: torch.Tensor, sent: Sequence[int], out: torch.Tensor, received: Sequence[int], *, label: str
    ) -> Work:
        nbytes = (sum(sent) - sent[self.rank]) * (source[:1].numel() if source.numel() else 0) * source.element_size()
        traffic.record_requested("all_to_all", nbytes, self.axis)
        traffic.record_ran("all_to_all_single", nbytes, self.axis)
        work = self.group.alltoall_base(out, source, list(received), list(sent))
        return self._work(work, "all_to_all", self.next_move(label), label, None, (source, out))

    @override
    @timed("all_to_all_single")
    def swap(self, flat: torch.Tensor, out: torch.Tensor, *, key: int, label: str) -> Work:
        nbytes = flat.numel() * flat.element_size()
        sent = nbytes - nbytes // self.size
        traffic.record_requested("swap", sent, self.axis)
        traffic.record_ran("all_to_all_single", sent, self.axis)
        work = self.group.alltoall_base(out, flat, [], [])
        return self._work(work, "reduce", key, label, None, (flat, out))

    @override
    def share(self, flat: torch.Tensor, *, key: int, label: str) -> Work:
        nbytes = flat.numel() * flat.element_size()
        traffic.record_requested("all_gather", nbytes, self.axis)
        traffic.record_ran("all_gather_into_tensor", nbytes // self.size, self.axis)
        work = self.group._allgather_base(flat, self.my_slice(flat))
        return self._work(work, "reduce", key, label, None, flat)

    @override
    def gather_small(self, tensor: torch.Tensor, *, channel: str, label: str) -> torch.Tensor:
        rows = torch.empty((self.size, tensor.numel()), dtype=tensor.dtype, device=self.device)
        gathered = torch.empty_like(rows, device="cpu")
        traffic.record_ran("all_gather_into_tensor", tensor.numel() * tensor.element_size(), self.axis)
        work = self.group._allgather_base(rows.view(-1), tensor.to(self.device, non_blocking=True))

        def wait_and_copy() -> None:
            work.wait()
            gathered.copy_(rows)  # on a device it is this that blocks, not the line above

        self.guard(wait_and_copy, self.issue(channel), label)
        return gathered

    @override
    def broadcast(self, tensor: torch.Tensor, source: int, *, label: str) -> None:
        self.record_broadcast(tensor, source)
        work = dist.broadcast(tensor, group_src=source, group=self.group, async_op=True)
        self.guard(work.wait, self.issue("broadcast"), label)

    @override
    def move(self, transfers: Sequence[TensorTransfer], *, label: str) -> None:
        ticket = self.issue("transfers")
        works: list[Any] = []
        between: list[Any] = []
        nbytes = 0
        for transfer in transfers:
            tensor = transfer.tensor
            if tensor is None or tensor.numel() == 0:
                continue
            if transfer.target is None:
                works.append(dist.broadcast(tensor, group_src=transfer.source, group=self.group, async_op=True))
            elif transfer.source == self.rank != transfer.target:
                between.append(dist.P2POp(dist.isend, tensor, group=self.group, group_peer=transfer.target))
            elif transfer.target == self.rank != transfer.source:
                between.append(dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=transfer.source))
            nbytes += tensor.numel() * tensor.element_size() if transfer.source == self.rank else 0
        traffic.record_requested("move", nbytes, self.axis)
        traffic.record_ran("broadcast or send", nbytes, self.axis, len(works) + len(between))
        if between:
            works += dist.batch_isend_irecv(between)
        for work in works:
            self.guard(work.wait, ticket, label)
