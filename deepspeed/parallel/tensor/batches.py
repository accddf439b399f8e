"""Checks that ranks that share layers get the same batch, and makes them draw the same random numbers.

Before every forward a fingerprint of all arguments (shapes, dtypes and every byte of every tensor) is compared over the
tensor ranks, in one exchange of a few numbers. A difference, even in a mask only, is raised on all of them: on the host
before anything has been computed from the batch, on a device one forward later, so that the host does not wait for
the comparison.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.transports.channel import Channel
from deepspeed.comm.transports.native import NativeTransport
from deepspeed.errors import DivergenceError
from deepspeed.logging import log_dist
from deepspeed.uncompiled import uncompiled

_HEAD = 2  # the number of arguments, and a checksum of their names
_NAMES = 24  # arguments that are distinguished; further ones count together
_MOST_BEHIND = 8  # forwards that the device may be behind before the host waits for it
_LABEL = "the comparison of the batch"


@dataclass(frozen=True)
class _ForwardRecord:
    rows: torch.Tensor  # the numbers of each rank, on the host
    names: list[str]  # the names of the arguments
    shown: str  # the arguments as text for messages
    event: Any = None  # complete when ``rows`` are valid; None: they are valid already


class BatchCheck:
    """Compares the arguments of a model between the ranks that share its layers.

    Where transfers block the host, a difference is raised before anything has been computed from the batch. Where they
    run on a stream, fingerprints stay on the device and those of one forward are compared in the next, so that the
    host does not wait.
    """

    def __init__(self, channel: Channel, *, cuts_between_stages: bool = False) -> None:
        self._channel = channel
        # Pipeline stages send each other parts of sequences, which differ between ranks.
        self._cuts_between_stages = cuts_between_stages
        self._prints = Fingerprints()
        self._coming: deque[_ForwardRecord] = deque()

    def attach(self, model: nn.Module) -> None:
        """Compares before every forward of ``model`` from now on."""
        model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @uncompiled
    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._cuts_between_stages and model.active_chunk != 0:
            return
        tensors = dict(_leaves(args, kwargs))
        names, shown = list(tensors), ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
        prints = [self._prints.of(value) for value in tensors.values()]
        transport = self._channel.transport
        if not isinstance(transport, NativeTransport) or not transport.runs_on_stream:
            mine = _vector(names, [(number, int(value)) for number, value in enumerate(prints)])
            rows = transport.gather_small(mine, channel="step", label=_LABEL)
            self._judge(_ForwardRecord(rows, names, shown))
            return
        while self._coming and (self._coming[0].event.query() or len(self._coming) >= _MOST_BEHIND):
            oldest = self._coming.popleft()
            oldest.event.synchronize()
            self._judge(oldest)
        self._coming.append(self._started(transport.device, names, shown, prints))

    def _started(
        self, device: torch.device, names: list[str], shown: str, prints: list[torch.Tensor]
    ) -> _ForwardRecord:
        accelerator = get_accelerator()
        on_host = [(number, int(value)) for number, value in enumerate(prints) if value.device.type == "cpu"]
        mine = accelerator.pin_memory(_vector(names, on_host)).to(device, non_blocking=True)
        for number, value in enumerate(prints):
            if value.device.type != "cpu":
                mine.select(0, _place(number)).add_(value)
        gathered = torch.stack(self._channel.gather(mine, [mine.numel()] * self._channel.size, _LABEL))
        rows = accelerator.pin_empty(tuple(gathered.shape), dtype=gathered.dtype)
        rows.copy_(gathered, non_blocking=True)
        event = accelerator.Event()
        event.record()
        return _ForwardRecord(rows, names, shown, event)

    def _judge(self, compared: _ForwardRecord) -> None:
        rows = compared.rows.tolist()
        if all(row == rows[0] for row in rows):
            return
        first = next(place for place in range(len(rows[0])) if any(row[place] != rows[0][place] for row in rows))
        other = next(number for number, row in enumerate(rows) if row[first] != rows[0][first])
        transport = self._channel.transport
        what = "arguments" if first < _HEAD else repr(compared.names[first - _HEAD])
        text = (
            f"the ranks {transport.ranks[0]} and {transport.ranks[other]} share the layers of the model but were given "
            f"different batches: {what} differ{'' if first < _HEAD else 's'} (this rank has "
            f"{compared.shown or 'no tensor'}{'' if compared.event is None else ', in an earlier forward'}). All "
            "tensor-parallel ranks need the same batch: load it by the data-parallel rank "
            "(engine.get_data_parallel_rank(), the loader of initialize(training_data=...) does), and draw masks from "
            "equal random states"
        )
        if compared.event is not None and transport.watch is not None:
            transport.watch.post_failure(text)  # other ranks may compare later, and wait for this rank until then
        raise DivergenceError(text)


def _place(number: int) -> int:
    """Returns the index of an argument's fingerprint in the vector that is sent."""
    return _HEAD + min(number, _NAMES - 1)


def _vector(names: list[str], prints: list[tuple[int, int]]) -> torch.Tensor:
    """Returns the vector that a rank sends, ``[_HEAD + _NAMES]`` int64 on the host, with ``prints`` added in."""
    vector = torch.zeros(_HEAD + _NAMES, dtype=torch.int64)
    vector[0], vector[1] = len(names), zlib.crc32(repr(names).encode())
    for number, value in prints:
        vector[_place(number)] += value
    return vector


def _leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    stack = [(f"argument {number}", value) for number, value in enumerate(args)] + sorted(kwargs.items())
    while stack:
        name, value = stack.pop(0)
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and value.device.type != "meta":
                yield name, value
        elif isinstance(value, Mapping):
            stack = [(f"{name}[{key!r}]", item) for key, item in value.items()] + stack
        elif isinstance(value, (list, tuple)):
            stack = [(f"{name}[{number}]", item) for number, item in enumerate(value)] + stack


def same_random_states(channel: Channel) -> None:
    """Copies the first tensor rank's random state to the others: dropout of whole activations must be equal.

    Code that works on cut activations draws from ``checkpointing.get_cuda_rng_tracker()``.
    """
    device = get_accelerator()
    states = {"host": torch.get_rng_state()}
    if device.device_name() != "cpu":
        states["device"] = device.get_rng_state()
    checksums = torch.tensor([zlib.crc32(state.numpy().tobytes()) for state in states.values()])
    rows = channel.transport.gather_small(checksums, channel="call", label="the comparison of random states")
    if bool((rows == rows[0]).all()):
        return
    log_dist("tensor parallelism: the ranks that share layers continue with the random state of the first of them")
    for kind, state in states.items():
        where = device.current_device_name() if channel.transport.needs_one_order else "cpu"
        moved = state.to(where)
        channel.transport.broadcast(moved, 0, label=f"the random state of the {kind}")
        if kind == "host":
            torch.set_rng_state(moved.cpu())
        else:
            device.set_rng_state(moved.cpu())


WORDS = 1 << 16  # 8-byte words that are weighted one by one; longer tensors repeat the weights
_TAIL = -7046029254386353131  # odd, for the bytes behind the last whole word


class Fingerprints:
    """Makes fingerprints. Equal tensors have equal ones on every device; arithmetic is that of int64, which wraps."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(20)
        weights = torch.randint(1, 1 << 62, (WORDS,), generator=generator).bitwise_or_(1)
        self._weights = {weights.device: weights}

    def of(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a number that differs with the shape, the dtype and, all but surely, with any byte of ``value``.

        It is 0-dim int64 on the device of the strided tensor. The host waits for the device only at the first tensor on
        it.
        """
        data = value.detach().contiguous().view(-1)
        data = data.view(torch.uint8) if data.dtype is not torch.bool else data.to(torch.uint8)
        whole = data.numel() // 8 * 8
        tail = data.new_zeros(8)
        tail[: data.numel() - whole].copy_(data[whole:])
        total = tail.view(torch.int64)[0] * _TAIL
        if whole:
            words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
            if value.device not in self._weights:
                self._weights[value.device] = self._weights[torch.device("cpu")].to(value.device)
            weights = self._weights[value.device]
            for number, part in enumerate(words.split(WORDS)):
                total = total + (part * weights[: part.numel()]).sum() * (2 * number + 1)
        return total + zlib.crc32(f"{tuple(value.shape)}{value.dtype}".encode())
