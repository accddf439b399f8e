"""Cuts a batch of each rank along the sequence, and exchanges descriptions and parts of the batches."""

from __future__ import annotations

import functools
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job.axis import Axis
from deepspeed.comm.job.job import axis_of
from deepspeed.comm.transports.objects import gather_objects
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist_once
from deepspeed.parallel.sequence.loss import IGNORED

_OF_TOWERS = (
    "pixel_values",
    "pixel_values_videos",
    "pixel_attention_mask",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "image_sizes",
)
"""Entries of a batch without one value per token: every rank gets them whole."""


@dataclass
class BatchDescription:
    """The description of a rank's next batch, sent to the other ranks."""

    ended: bool = False  # its loader has no more batches
    problem: str = ""  # why the batch cannot be cut
    # ``(batch, padded tokens)`` by name of the tensors
    shapes: dict[str, tuple[int, int]] = field(default_factory=dict)
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)  # dtype by name of the tensors
    # entries that are not tensors, and inputs of towers, in host memory
    others: dict[str, Any] = field(default_factory=dict)
    has_images: bool = False  # it has inputs of towers, so the model computes position ids
    adds_positions: bool = False  # its ``position_ids`` were added, not given by the loader
    digest: int = 0  # digest of the tokens, to detect ranks with the same samples
    padded: int = 0  # tokens that padding has added


def exchange_batches(
    tensors: dict[str, torch.Tensor], descriptions: list[BatchDescription], axis: Axis, device: torch.device
) -> list[dict[str, Any]]:
    """Returns this rank's tokens of every rank's batch, in rank order. Every rank of the axis must call it.

    ``tensors`` are this rank's batch as :func:`describe_batch` made it, by name: ``[batch, padded tokens]``. Transfers
    read and write on ``device``; batches come on the host.
    """
    # By name: the order of entries may differ between ranks.
    found = {name: _exchanged(tensors[name], name, descriptions, axis, device) for name in sorted(tensors)}
    return [{**one.others, **{name: found[name][rank] for name in tensors}} for rank, one in enumerate(descriptions)]


def _exchanged(
    tensor: torch.Tensor, name: str, descriptions: list[BatchDescription], axis: Axis, device: torch.device
) -> list[torch.Tensor]:
    ranks = len(descriptions)
    original, tensor = tensor.device, tensor.to(device)
    parts = [part.reshape(-1) for part in tensor.chunk(ranks, dim=1)]
    shapes = [(rows, tokens // ranks) for rows, tokens in (one.shapes[name] for one in descriptions)]
    received = [rows * tokens for rows, tokens in shapes]
    out = tensor.new_empty(sum(received))
    sent = [part.numel() for part in parts]
    transport, label = axis.transport("layers", device=device), f"{name} of a batch (sequence parallel)"
    transport.all_to_all(torch.cat(parts), sent, out, received, label=label).wait()
    return [part.view(shape).to(original) for part, shape in zip(out.split(received), shapes, strict=True)]


def describe_batch(batch: Any, ranks: int) -> tuple[BatchDescription, dict[str, torch.Tensor]]:
    """Returns the description of a batch, and its tensors: labels shifted, positions added, padded, on the host."""
    problem = _why_not(batch)
    if problem:
        return BatchDescription(problem=problem), {}
    batch = dict(batch)
    tokens = batch["input_ids"]
    rows, length = tokens.shape
    of_towers = {name: batch.pop(name).cpu() for name in _OF_TOWERS if isinstance(batch.get(name), torch.Tensor)}
    has_images = bool(of_towers) or any(batch.get(name) is not None for name in _OF_TOWERS)
    adds_positions = batch.get("position_ids") is None and not has_images
    if adds_positions:
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    if batch.get("labels") is not None:
        batch["shift_labels"] = functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
    extra = -length % ranks
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if extra:
        tensors = {name: _padded(name, value, extra) for name, value in tensors.items()}
    description = BatchDescription(
        shapes=dict.fromkeys(tensors, (rows, length + extra)),
        dtypes={name: value.dtype for name, value in tensors.items()},
        others={**of_towers, **{name: value for name, value in batch.items() if name not in tensors}},
        has_images=has_images,
        adds_positions=adds_positions,
        digest=zlib.crc32(tensors["input_ids"].contiguous().view(torch.uint8).numpy().tobytes()),
        padded=extra,
    )
    return description, tensors


def _padded(name: str, value: torch.Tensor, extra: int) -> torch.Tensor:
    if name == "position_ids":  # padding is a separate document, at positions that every model supports
        return torch.cat((value, torch.arange(extra, dtype=value.dtype).expand(value.size(0), -1)), dim=1)
    return functional.pad(value, (0, extra), value=IGNORED if name == "shift_labels" else 0)


def _why_not(batch: Any) -> str:
    if not hasattr(batch, "keys") or not isinstance(batch.get("input_ids"), torch.Tensor):
        return f"expected a dict with input_ids, found {type(batch).__name__}"
    labels = batch.get("labels")
    if labels is not None and not isinstance(labels, torch.Tensor):
        return f"expected labels as a tensor, found {type(labels).__name__}; make one in the loader's collate_fn"
    shape = batch["input_ids"].shape
    for name, value in batch.items():
        if name in _OF_TOWERS:
            continue
        if isinstance(value, torch.Tensor) and (value.dim() != 2 or value.shape != shape):
            return (
                f"expected tensors of [batch, tokens] like input_ids {tuple(shape)}, found {name} "
                f"{tuple(value.shape)}; take other entries out of the batch"
            )
    return ""


def leave_out_added_positions(
    descriptions: list[BatchDescription], mine: BatchDescription, tensors: dict[str, torch.Tensor]
) -> None:
    """Takes added ``position_ids`` out of batches of text where another rank's batch has images, in place.

    Then the model computes all position ids, and the batches have the same entries. ``mine`` is this rank's description
    as it was sent, ``tensors`` its batch as :func:`describe_batch` made it, ``[batch, padded tokens]``.
    """
    if not any(one.has_images for one in descriptions):
        return
    for one in descriptions:
        if one.adds_positions:
            del one.shapes["position_ids"], one.dtypes["position_ids"]
    if "position_ids" in tensors and mine.adds_positions:
        del tensors["position_ids"]


def check(descriptions: list[BatchDescription], what: str) -> None:
    """Checks on every rank that the batches of all ranks can be cut.

    Raises:
        DeepSpeedConfigError: Names the rank whose batch cannot be cut or has other entries; on all ranks.
    """
    for rank, one in enumerate(descriptions):
        if one.problem:
            raise DeepSpeedConfigError(
                f"{what}: the batch of rank {rank} (of those that share a sequence): {one.problem}"
            )
        if one.dtypes != descriptions[0].dtypes:
            raise DeepSpeedConfigError(
                f"{what}: the ranks' batches have different entries: {_entries(descriptions[0])} on the first rank, "
                f"{_entries(one)} on rank {rank}; give all the same"
            )


def _entries(one: BatchDescription) -> str:
    return ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in one.dtypes.items())


_CLASS = "UlyssesSPDataLoaderAdapter"
_MODULE, _NAME = "accelerate.data_loader", "skip_first_batches"


class UlyssesSPDataLoaderAdapter:
    """Yields this rank's part of every rank's batches, one after another, for ranks that share sequences.

    Every rank's loader must yield different samples. One batch from each of n ranks gives n batches, of which each rank
    gets its tokens; so ``len`` is n times that of the loader. Lengths that are not divisible by n are padded, with
    ignored labels. ``labels`` become ``shift_labels``, each token's next label, found before cutting; ``position_ids``
    are added if missing. When one loader ends, all end.

    Other attributes are looked up on the loader.

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
        self._skips = 0  # batches to skip in each pass
        self._left_out = 0  # of these, batches to skip next
        _teach_accelerate(UlyssesSPDataLoaderAdapter)

    def __len__(self) -> int:
        assert isinstance(self.dl, Sized)
        return len(self.dl) * self.sp_world_size - self._skips

    def skipping(self, batches: int, skip: Callable[[Any, int], Any]) -> UlyssesSPDataLoaderAdapter:
        """Returns a loader without the first ``batches`` of this one's; ``skip`` is Accelerate's for other loaders."""
        whole, rest = divmod(batches, self.sp_world_size)
        made = UlyssesSPDataLoaderAdapter(
            skip(self.dl, whole), self.sp_rank, self.sp_group, self.sp_world_size, self.device
        )
        made._skips = rest
        return made

    def __getattr__(self, name: str) -> Any:
        if name == "dl":  # while it is copied or unpickled
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """Returns the next batch, this rank's tokens. Every rank of the group must call it."""
        while True:
            if not self._waiting:
                self._refill()
            batch = self._waiting.popleft()
            if not self._left_out:
                return batch
            self._left_out -= 1

    def _refill(self) -> None:
        if self._batches is None:
            self._batches = iter(self.dl)
            self._left_out = self._skips
        batch = next(self._batches, None)
        mine, tensors = (
            (BatchDescription(ended=True), {}) if batch is None else describe_batch(batch, self.sp_world_size)
        )
        axis = axis_of(self.sp_group, SEQUENCE)
        transport = axis.transport("layers", device=self.device)
        descriptions = gather_objects(transport, mine, label=f"the shapes of the next batches ({_CLASS})")
        if any(one.ended for one in descriptions):
            self._batches = None
            left = [str(rank) for rank, one in enumerate(descriptions) if not one.ended]
            if left:
                log_dist_once(
                    f"{_CLASS}: the loaders of the ranks {', '.join(left)} (of those that share a sequence) have more "
                    "batches than the others'; they are left out, so that all ranks end together"
                )
            raise StopIteration
        leave_out_added_positions(descriptions, mine, tensors)
        check(descriptions, _CLASS)
        self._warn(descriptions)
        self._waiting.extend(exchange_batches(tensors, descriptions, axis, self.device))

    def _warn(self, descriptions: list[BatchDescription]) -> None:
        padded = next((one for one in descriptions if one.padded), None)
        if padded is not None:
            log_dist_once(
                f"{_CLASS}: sequences whose length {self.sp_world_size} does not divide are padded at the end, with "
                f"labels that do not count (the first by {padded.padded} token(s))"
            )
        if not self._compared and self.sp_world_size > 1 and len({one.digest for one in descriptions}) == 1:
            log_dist_once(
                f"{_CLASS}: all {self.sp_world_size} ranks that share sequences brought the same samples, so each "
                f"sample is used {self.sp_world_size} times; give every rank's loader samples of its own (a "
                "DistributedSampler over all ranks)",
                level=30,
            )
        self._compared = True


def _teach_accelerate(cls: type) -> None:
    """Makes Accelerate skip batches of ``cls`` by its method ``skipping(batches, skip)``; repeated calls do nothing.

    Accelerate would rebuild the loader without this class: a Trainer that resumes in the middle of an epoch would give
    its model whole batches. So Accelerate's function is replaced wherever it was imported.
    """
    plain = getattr(sys.modules.get(_MODULE), _NAME, None)
    if plain is None or hasattr(plain, "_asks"):
        return

    @functools.wraps(plain)
    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, cls):
            return dataloader.skipping(num_batches, plain)  # type: ignore[attr-defined]
        return plain(dataloader, num_batches)

    skip_first_batches._asks = cls  # type: ignore[attr-defined]
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(_NAME) is plain:
            setattr(module, _NAME, skip_first_batches)
