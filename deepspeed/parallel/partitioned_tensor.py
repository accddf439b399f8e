"""Tensors that several ranks hold in equal parts, as programs with a pipeline of their own send activations."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from deepspeed import comm
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.partition import partition_uniform
from deepspeed.zero.tiling.parts import has_part


class PartitionedTensor:
    """This rank's part of a tensor that is equal on all ranks of a group: a run of its flattened elements.

    With ``partition_meta``, from :meth:`to_meta` on the rank that cut it, ``tensor`` is this rank's part, 1-D.

    Raises:
        DeepSpeedConfigError: ``partition_meta`` describes another group or part.
    """

    def __init__(self, tensor: torch.Tensor, group: Any, partition_meta: torch.Tensor | None = None) -> None:
        self.group = group
        self.num_parts, self.rank = comm.get_world_size(group), comm.get_rank(group)
        if partition_meta is None:
            self.orig_size, self.orig_device = list(tensor.shape), tensor.device
            self.partition = partition_uniform(tensor.numel(), self.num_parts)
            start, stop = self.partition[self.rank : self.rank + 2]
            self.local_data = tensor.detach().reshape(-1)[start:stop].clone()
            return
        numbers = [int(number) for number in partition_meta.tolist()]
        dims, rest = numbers[1 : numbers[0] + 1], numbers[numbers[0] + 1 :]
        self.orig_size, self.orig_device, self.local_data = dims, tensor.device, tensor
        found, self.partition = tuple(rest[:2]), rest[2:]
        own = (self.num_parts, self.rank)
        if found != own or tensor.shape != self.local_size():
            raise DeepSpeedConfigError(
                f"PartitionedTensor.from_meta: expected part {own[1]} of {own[0]}, as this rank has in the group, "
                f"found part {found[1]} of {found[0]} and {tensor.numel()} elements; send data() and to_meta() to the "
                "rank with the same place in a group of the same size"
            )

    @classmethod
    def from_meta(
        cls, meta: torch.Tensor, local_part: torch.Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """Returns the tensor whose part (:meth:`data`, 1-D) and description (:meth:`to_meta`) another rank has sent.

        ``group`` are the ranks that received the other parts; ``device`` is that of the full tensor, None: of the part.
        """
        made = cls(local_part, group, meta)
        made.orig_device = local_part.device if device is None else torch.device(device)
        return made

    def to_meta(self) -> torch.Tensor:
        """Returns the description, 1-D int64: dimensions, their sizes, parts, this part, bounds of the parts."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> torch.Tensor:
        """Returns this rank's part, 1-D."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Returns the shape of this rank's part."""
        return torch.Size([self.partition[self.rank + 1] - self.partition[self.rank]])

    def full_size(self) -> list[int]:
        """Returns the shape of the whole tensor."""
        return self.orig_size

    def full(self, device: Any = None) -> torch.Tensor:
        """Gathers the whole tensor, in its shape, to ``device`` (None: that of the tensor that was cut).

        Every rank of the group must call it.
        """
        sizes = [stop - start for start, stop in pairwise(self.partition)]
        padded = self.local_data.new_zeros(max(sizes))  # parts of unequal length: a backend's gather needs equal ones
        padded[: self.local_data.numel()] = self.local_data
        gathered = [torch.empty_like(padded) for _ in sizes]
        comm.all_gather(gathered, padded, group=self.group)
        flat = torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])
        return flat.view(self.orig_size).to(self.orig_device if device is None else device)


def all_gather_dp_groups(
    groups_flat: Sequence[torch.Tensor],
    partitioned_param_groups: Sequence[Sequence[torch.Tensor]],
    dp_process_group: Sequence[Any],
    start_alignment_factor: int | None = None,
    allgather_bucket_size: int | None = None,
) -> None:
    """Fills flat buffers (1-D, of each param group) of which each rank has updated its part. Every rank must call it.

    The parts of each buffer are by rank, views of equal length. The last two arguments have no effect: a buffer is
    gathered in one call, not in aligned pieces.
    """
    for flat, parts, group in zip(groups_flat, partitioned_param_groups, dp_process_group, strict=True):
        if len(parts) > 1:
            own = parts[comm.get_rank(group)].clone()
            comm.all_gather_into_tensor(flat.view(-1)[: len(parts) * own.numel()], own, group=group)


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Returns whether other ranks hold other parts of a parameter (any shape), by its marks."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False) or has_part(p))
