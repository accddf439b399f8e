"""Ranks that share layers must see the same batch and draw the same random numbers; here both are seen to.

Before every forward a fingerprint of all arguments (shapes, dtypes and every byte of every tensor) is compared over the
tensor ranks, in one exchange of a few numbers. A difference, be it in a mask only, is named on all of them before
anything has been computed from it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import DivergenceError
from deepspeed.logging import log_dist
from deepspeed.parallel.tensor.channel import Channel
from deepspeed.uncompiled import uncompiled

_NAMES = 24  # arguments that are told apart; further ones count together
_WORDS = 1 << 16  # 8-byte words that are weighted one by one; longer tensors repeat the weights


class BatchCheck:
    """Compares what a model is given.

    Args:
        channel: The ranks that share its layers.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        generator = torch.Generator().manual_seed(20)
        self._weights = torch.randint(1, 1 << 62, (_WORDS,), generator=generator).bitwise_or_(1)

    def attach(self, model: nn.Module) -> None:
        """Compares before every forward of ``model`` from now on."""
        model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @uncompiled
    def _before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = {name: self._print_of(value) for name, value in _leaves(args, kwargs)}
        names = list(found)
        mine = torch.zeros(2 + _NAMES, dtype=torch.int64)
        mine[0], mine[1] = len(names), zlib.crc32(repr(names).encode())
        for number, value in enumerate(found.values()):
            mine[2 + min(number, _NAMES - 1)] += value
        told = self._channel.transport.gather_small(mine, channel="step", label="the comparison of the batch")
        if bool((told == told[0]).all()):
            return
        first = next(column for column in range(mine.numel()) if bool((told[:, column] != told[0, column]).any()))
        other = next(row for row in range(len(told)) if told[row, first] != told[0, first])
        ranks = self._channel.transport.ranks
        what = "arguments" if first < 2 else repr(names[first - 2])
        raise DivergenceError(
            f"the ranks {ranks[0]} and {ranks[other]} share the layers of the model but were given different batches: "
            f"{what} differ{'' if first < 2 else 's'} (this rank has {_shown(args, kwargs)}). All tensor-parallel "
            "ranks need the same batch: load it by the data-parallel rank (engine.get_data_parallel_rank(), the loader "
            "of initialize(training_data=...) does), and draw masks from equal random states"
        )

    def _print_of(self, value: torch.Tensor) -> int:
        """A number that differs with the shape, the dtype and, all but surely, with any byte."""
        kind = zlib.crc32(f"{tuple(value.shape)}{value.dtype}".encode())
        data = value.detach().contiguous().view(-1)
        data = data.view(torch.uint8) if data.dtype is not torch.bool else data.to(torch.uint8)
        whole = data.numel() // 8 * 8
        rest = int.from_bytes(bytes(data[whole:].tolist()), "little")
        total = 0
        if whole:
            words = data[:whole].clone().view(torch.int64) if data.data_ptr() % 8 else data[:whole].view(torch.int64)
            weights = self._weights.to(value.device)
            for number, part in enumerate(words.split(_WORDS)):
                total += int((part * weights[: part.numel()]).sum()) * (2 * number + 1)
        return ((total ^ rest * 0x9E3779B97F4A7C15) + kind) % (1 << 62)


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


def _shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in _leaves(args, kwargs)) or "no tensor"


def same_random_states(channel: Channel) -> None:
    """Gives the tensor ranks the random state of their first: dropout on what is whole must drop the same elements.

    Code that works on cut activations takes its numbers from ``checkpointing.get_cuda_rng_tracker()``.
    """
    device = get_accelerator()
    states = {"host": torch.get_rng_state()}
    if device.device_name() != "cpu":
        states["device"] = device.get_rng_state()
    told = torch.tensor([zlib.crc32(state.numpy().tobytes()) for state in states.values()])
    rows = channel.transport.gather_small(told, channel="call", label="the comparison of random states")
    if bool((rows == rows[0]).all()):
        return
    log_dist("tensor parallelism: the ranks that share layers go on with the random state of the first of them")
    for kind, state in states.items():
        where = device.current_device_name() if channel.transport.needs_one_order else "cpu"
        moved = state.to(where)
        channel.transport.broadcast(moved, 0, label=f"the random state of the {kind}")
        if kind == "host":
            torch.set_rng_state(moved.cpu())
        else:
            device.set_rng_state(moved.cpu())
