"""Cuts the batches of a data loader along the sequence."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from deepspeed import comm
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once
from deepspeed.parallel.sequence.loss import IGNORED
from deepspeed.parallel.sequence.wire import wire_of

_CLASS = "UlyssesSPDataLoaderAdapter"


@dataclass
class _Told:
    """What a rank tells the others of its next batch.

    Attributes:
        ended: Its loader has none.
        problem: Why the batch cannot be cut.
        shapes: ``(batch, padded tokens)`` by name of the tensors.
        dtypes: Likewise.
        others: Entries that are no tensors.
        digest: Of the tokens, to see whether ranks have different ones.
        padded: Tokens that padding has added.
    """

    ended: bool = False
    problem: str = ""
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    digest: int = 0
    padded: int = 0


class UlyssesSPDataLoaderAdapter:
    """Gives the ranks that share sequences their parts of every rank's batches, one after another.

    Every rank's loader must bring samples of its own. From one batch of each of the n ranks come n batches, which all
    ranks of the group get in turn, each its tokens of them: ``len`` is n times that of the loader. A length that n does
    not divide is padded, with labels that do not count. ``labels`` become ``shift_labels``: the next token's, found
    before cutting; ``position_ids`` are added where there are none. Where one loader ends, all end.

    Attributes that it has not are the loader's.

    Args:
        dl: The loader of this rank; its batches are dicts with ``input_ids`` and further ``[batch, tokens]`` tensors.
        sp_rank: This rank's place among those that share a sequence.
        sp_group: Their torch process group.
        sp_world_size: Their number.
        device: Where the group's transfers read and write; batches come on the host.

    Raises:
        DeepSpeedConfigError: (while iterating, on all ranks of the group) A batch cannot be cut.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl = dl
        self.sp_rank = sp_rank
        self.sp_group = sp_group
        self.sp_world_size = sp_world_size
        self.device = torch.device(device)
        self._batches: Iterator[Any] | None = None
        self._waiting: deque[dict[str, Any]] = deque()
        self._compared = False

    def __len__(self) -> int:
        assert isinstance(self.dl, Sized)
        return len(self.dl) * self.sp_world_size

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next batch, this rank's tokens. Every rank of the group must call it."""
        if not self._waiting:
            self._refill()
        return self._waiting.popleft()

    def _refill(self) -> None:
        if self._batches is None:
            self._batches = iter(self.dl)
        batch = next(self._batches, None)
        mine, tensors = (_Told(ended=True), {}) if batch is None else _prepared(batch, self.sp_world_size)
        told: list[Any] = [None] * self.sp_world_size
        comm.all_gather_object(told, mine, group=self.sp_group)
        if any(one.ended for one in told):
            self._batches = None
            left = [str(rank) for rank, one in enumerate(told) if not one.ended]
            if left:
                log_dist_once(
                    f"{_CLASS}: the loaders of the ranks {', '.join(left)} (of those that share a sequence) have more "
                    "batches than the others'; they are left out, so that all ranks end together"
                )
            raise StopIteration
        _check(told)
        self._say(told)
        parts = {name: self._exchanged(tensors[name], name, told) for name in mine.shapes}
        for rank, one in enumerate(told):
            self._waiting.append({**one.others, **{name: parts[name][rank] for name in mine.shapes}})

    def _exchanged(self, tensor: torch.Tensor, name: str, told: list[_Told]) -> list[torch.Tensor]:
        """This rank's tokens of every rank's tensor."""
        wire = wire_of(self.sp_group, self.device)
        home = tensor.device
        tensor = tensor.to(self.device)
        pieces = [piece.reshape(-1) for piece in tensor.chunk(self.sp_world_size, dim=1)]
        shapes = [(rows, tokens // self.sp_world_size) for rows, tokens in (one.shapes[name] for one in told)]
        received = [rows * tokens for rows, tokens in shapes]
        out = tensor.new_empty(sum(received))
        sent = [piece.numel() for piece in pieces]
        wire.all_to_all(torch.cat(pieces), sent, out, received, label=f"{name} of a batch (sequence parallel)").wait()
        return [part.view(shape).to(home) for part, shape in zip(out.split(received), shapes, strict=True)]

    def _say(self, told: list[_Told]) -> None:
        padded = next((one for one in told if one.padded), None)
        if padded is not None:
            log_dist_once(
                f"{_CLASS}: sequences whose length {self.sp_world_size} does not divide are padded at the end, with "
                f"labels that do not count (the first by {padded.padded} token(s))"
            )
        if not self._compared and self.sp_world_size > 1 and len({one.digest for one in told}) == 1:
            log_dist_once(
                f"{_CLASS}: all {self.sp_world_size} ranks that share sequences brought the same samples, so each is "
                f"trained on {self.sp_world_size} times; give every rank's loader samples of its own (a "
                "DistributedSampler over all ranks)",
                level=30,
            )
        self._compared = True


def _prepared(batch: Any, ranks: int) -> tuple[_Told, dict[str, torch.Tensor]]:
    """What is told of a batch, and its tensors: labels shifted, positions added, padded, on the host."""
    problem = _why_not(batch)
    if problem:
        return _Told(problem=problem), {}
    batch = dict(batch)
    tokens = batch["input_ids"]
    rows, length = tokens.shape
    if batch.get("position_ids") is None:
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    if "labels" in batch:
        batch["shift_labels"] = functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
    extra = -length % ranks
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if extra:
        tensors = {name: _padded(name, value, extra) for name, value in tensors.items()}
    told = _Told(
        shapes=dict.fromkeys(tensors, (rows, length + extra)),
        dtypes={name: value.dtype for name, value in tensors.items()},
        others={name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)},
        digest=zlib.crc32(tensors["input_ids"].contiguous().view(torch.uint8).numpy().tobytes()),
        padded=extra,
    )
    return told, tensors


def _padded(name: str, value: torch.Tensor, extra: int) -> torch.Tensor:
    if name == "position_ids":  # so that they belong to the last document, which does not see them
        more = value[:, -1:] + torch.arange(1, extra + 1)
        return torch.cat((value, more.to(value.dtype)), dim=1)
    return functional.pad(value, (0, extra), value=IGNORED if name == "shift_labels" else 0)


def _why_not(batch: Any) -> str:
    if not hasattr(batch, "keys") or not isinstance(batch.get("input_ids"), torch.Tensor):
        return f"expected a dict with input_ids, found {type(batch).__name__}"
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and (value.dim() != 2 or value.shape != shape):
            return (
                f"expected tensors of [batch, tokens] like input_ids {tuple(shape)}, found {name} "
                f"{tuple(value.shape)}; take other entries out of the batch"
            )
    return ""


def _check(told: list[_Told]) -> None:
    """Raises, on all ranks alike, where some batch cannot be cut."""
    for rank, one in enumerate(told):
        if one.problem:
            raise DeepSpeedConfigError(
                f"{_CLASS}: the batch of rank {rank} (of those that share a sequence): {one.problem}"
            )
        if one.dtypes != told[0].dtypes:
            raise DeepSpeedConfigError(
                f"{_CLASS}: the ranks' batches have different entries: {_entries(told[0])} on the first rank, "
                f"{_entries(one)} on rank {rank}; give all the same"
            )


def _entries(one: _Told) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in one.dtypes.items())
