"""What a checkpointed block keeps, divided over the model-parallel ranks.

All ranks that hold parts of the same layers compute the same activations. So of each input that a block keeps for its
second run, every rank needs to keep only its part: the flattened tensor is cut into equal parts, and gathered again
when backward comes to the block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed import comm
from deepspeed.comm.job.mesh import TENSOR
from deepspeed.comm.transports.along import channel_along


@dataclass(frozen=True)
class ActivationShard:
    """One rank's part of a saved tensor.

    Attributes:
        values: 1-D; the parts of all ranks have equal lengths, the last ones may end in padding.
        shape: Of the whole tensor.
        device: Where the whole tensor is needed.
    """

    values: torch.Tensor
    shape: torch.Size
    device: torch.device


class Partition:
    """A pair of saved-tensor hooks.

    Every rank of the group must run the same blocks on equal inputs, and their backwards in the same order.

    Args:
        group: The model-parallel process group.
        on_host: Keep the parts in host memory.
    """

    def __init__(self, group: Any, *, on_host: bool) -> None:
        self._group = group
        self._rank = comm.get_rank(group)
        self._size = comm.get_world_size(group)
        self._on_host = on_host

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | ActivationShard:
        """Keeps this rank's part (1-D) of a floating activation of any shape; returns anything else whole.

        A parameter stays whole too: it is in memory anyway.
        """
        is_activation = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter)
        if not is_activation or tensor.layout is not torch.strided or tensor.numel() < self._size:
            return tensor
        length = -(-tensor.numel() // self._size)
        start = self._rank * length
        flat = tensor.detach().reshape(-1)[start : start + length]
        target = torch.device("cpu") if self._on_host else tensor.device
        values = torch.zeros(length, dtype=tensor.dtype, device=target, pin_memory=_may_pin(tensor, target))
        values[: flat.numel()].copy_(flat)
        return ActivationShard(values, tensor.shape, tensor.device)

    def unpack(self, packed: torch.Tensor | ActivationShard) -> torch.Tensor:
        """Returns the whole tensor in its own shape. Every rank of the group must call it for the same tensor."""
        if not isinstance(packed, ActivationShard):
            return packed
        mine = packed.values.to(packed.device)
        channel = channel_along(self._group, mine.device, TENSOR)
        whole = torch.cat(channel.gather(mine, [mine.numel()] * self._size, "a checkpointed activation"))
        return whole[: packed.shape.numel()].view(packed.shape)


def _may_pin(tensor: torch.Tensor, target: torch.device) -> bool:
    return tensor.device.type == "cuda" and target.type == "cpu"
