"""Cuts a batch of each rank along the sequence: how ranks describe their batches, and how the parts are exchanged."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.exchange import transport_of
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
"""Entries of a batch that are not one value per token: every rank gets all of them."""


@dataclass
class BatchDescription:
    """The description of a rank's next batch, sent to the other ranks.

    Attributes:
        ended: Its loader has none.
        problem: Why the batch cannot be cut.
        shapes: ``(batch, padded tokens)`` by name of the tensors.
        dtypes: Dtype by name of the tensors.
        others: Entries that are no tensors, and those of towers, in host memory.
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


def exchange_batches(
    tensors: dict[str, torch.Tensor], descriptions: list[BatchDescription], group: Any, device: torch.device
) -> list[dict[str, Any]]:
    """Returns this rank's tokens of every rank's batch, in rank order. Every rank of the group must call it.

    Args:
        tensors: This rank's batch as :func:`describe_batch` made it, by name: ``[batch, padded tokens]``.
        descriptions: Every rank's.
        group: Torch process group of the ranks that share a sequence.
        device: Where the group's transfers read and write; batches come on the host.
    """
    # By name: ranks may have put the same entries into their batches in another order.
    found = {name: _exchanged(tensors[name], name, descriptions, group, device) for name in sorted(tensors)}
    return [{**one.others, **{name: found[name][rank] for name in tensors}} for rank, one in enumerate(descriptions)]


def _exchanged(
    tensor: torch.Tensor, name: str, descriptions: list[BatchDescription], group: Any, device: torch.device
) -> list[torch.Tensor]:
    ranks = len(descriptions)
    original, tensor = tensor.device, tensor.to(device)
    pieces = [piece.reshape(-1) for piece in tensor.chunk(ranks, dim=1)]
    shapes = [(rows, tokens // ranks) for rows, tokens in (one.shapes[name] for one in descriptions)]
    received = [rows * tokens for rows, tokens in shapes]
    out = tensor.new_empty(sum(received))
    sent = [piece.numel() for piece in pieces]
    transport, label = transport_of(group, device), f"{name} of a batch (sequence parallel)"
    transport.all_to_all(torch.cat(pieces), sent, out, received, label=label).wait()
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
    if batch.get("position_ids") is None and not of_towers:  # with images the model numbers positions
        batch["position_ids"] = torch.arange(length, device=tokens.device).expand(rows, -1)
    if "labels" in batch:
        batch["shift_labels"] = functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
    extra = -length % ranks
    tensors = {name: value.cpu() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    if extra:
        tensors = {name: _padded(name, value, extra) for name, value in tensors.items()}
    description = BatchDescription(
        shapes=dict.fromkeys(tensors, (rows, length + extra)),
        dtypes={name: value.dtype for name, value in tensors.items()},
        others={**of_towers, **{name: value for name, value in batch.items() if name not in tensors}},
        digest=zlib.crc32(tensors["input_ids"].contiguous().view(torch.uint8).numpy().tobytes()),
        padded=extra,
    )
    return description, tensors


def _padded(name: str, value: torch.Tensor, extra: int) -> torch.Tensor:
    if name == "position_ids":  # a document of their own, which no other token sees, at places that every model has
        return torch.cat((value, torch.arange(extra, dtype=value.dtype).expand(value.size(0), -1)), dim=1)
    return functional.pad(value, (0, extra), value=IGNORED if name == "shift_labels" else 0)


def _why_not(batch: Any) -> str:
    if not hasattr(batch, "keys") or not isinstance(batch.get("input_ids"), torch.Tensor):
        return f"expected a dict with input_ids, found {type(batch).__name__}"
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
