"""What checkpointed layers of a Transformers model keep for backward in host memory (ALST, arXiv 2506.13996).

The library's own checkpointing does the rest; only what it saves on the way is moved, and fetched when a layer is
computed again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.logging import log_dist
from deepspeed.models.anatomy import unwrapped
from deepspeed.models.checkpointing import checkpoint_layers, replace_checkpoint_functions
from deepspeed.parallel.sequence.host_chunks import HostChunks


def offload_checkpoints(model: nn.Module) -> None:
    """Checkpoints a Transformers model's layers, if it does not yet, and keeps what they save on the host; in place.

    Args:
        model: A ``PreTrainedModel``, or one wrapped by PEFT.

    Raises:
        DeepSpeedConfigError: The model knows no checkpointed layers.
    """
    inner = unwrapped(model)
    if not checkpoint_layers(inner):
        raise DeepSpeedConfigError(
            f"sequence_parallel.offload_checkpoints: {type(inner).__name__} is no Transformers model with checkpointed "
            "layers; call deepspeed.checkpointing.checkpoint with activation_checkpointing.cpu_checkpointing in the "
            "model's own code, or set it to false"
        )
    # At every pass, as a program may switch checkpointing on again, with functions of its own.
    model.register_forward_pre_hook(_keep_on_host)
    log_dist(f"sequence_parallel.offload_checkpoints: the inputs of {type(inner).__name__}'s layers wait on the host")


def _keep_on_host(model: nn.Module, _args: Any) -> None:
    replace_checkpoint_functions(model, lambda one: one if isinstance(one, _OnHost) else _OnHost(one))


class _OnHost:
    """A function that checkpoints, and whose saved tensors wait on the host."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self._copies: HostChunks | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            return self._function(*args, **kwargs)

    def _pack(self, tensor: torch.Tensor) -> tuple[HostChunks | None, torch.Tensor]:
        if tensor.device.type == "cpu":
            return None, tensor
        if self._copies is None:
            self._copies = HostChunks(tensor.device)
        return self._copies, self._copies.put(tensor)


def _unpack(packed: tuple[HostChunks | None, torch.Tensor]) -> torch.Tensor:
    copies, kept = packed
    return kept if copies is None else copies.fetch([kept]).take()[0]
