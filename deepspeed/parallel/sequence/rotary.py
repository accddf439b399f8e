"""Rotary embeddings whose frequencies depend on the length of a sequence: on a part they must know of the whole."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from deepspeed.parallel.sequence.sharing import SequenceSharing
from deepspeed.uncompiled import uncompiled


def know_whole_sequences(model: nn.Module, sharing: SequenceSharing) -> None:
    """Makes a Transformers model's rotary embeddings choose their frequencies by whole sequences, in place.

    Those of the types "dynamic" and "longrope" look at the highest position that they are given. They are given that of
    the whole sequences beside those of this rank, and what comes of it is left out again.

    Args:
        model: The model.
        sharing: How its sequences are shared.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                _extend(module, sharing)
                break


def _extend(module: Any, sharing: SequenceSharing) -> None:
    plain = module.forward

    @uncompiled
    @functools.wraps(plain)
    def forward(x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not sharing.is_on or position_ids.dim() != 2:
            return plain(x, position_ids, *args, **kwargs)
        whole = sharing.whole(position_ids)
        assert whole is not None
        highest = whole.amax().expand(position_ids.size(0), 1)
        made = plain(x, torch.cat((position_ids, highest), dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in made) if isinstance(made, tuple) else made[:, :-1]

    module.forward = forward
