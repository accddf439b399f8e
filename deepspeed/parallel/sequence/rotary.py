"""Rotary embeddings whose frequencies depend on the length of a sequence: on a part they must know of the whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from deepspeed.give_base import give_base
from deepspeed.models.layers import rope_types_of
from deepspeed.parallel.sequence.context import registered
from deepspeed.uncompiled import uncompiled


def know_whole_sequences(model: nn.Module) -> None:
    """Makes a Transformers model's rotary embeddings choose their frequencies by whole sequences, in place.

    Those of the types "dynamic" and "longrope" look at the highest position that they are given. They are given that of
    the whole sequences beside those of this rank, and what comes of it is left out again.

    Args:
        model: A registered model.
    """
    for module in model.modules():
        if any("dynamic" in kind or kind == "longrope" for kind in rope_types_of(module)):
            give_base(module, _RotaryOfWholeSequences)


class _RotaryOfWholeSequences(nn.Module):
    """In front of the class of a rotary embedding: shows it the highest position of whole sequences, too."""

    @uncompiled
    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sharing = registered(self)
        if not sharing.is_on or position_ids.dim() != 2:
            return super().forward(x, position_ids, *args, **kwargs)
        whole = sharing.whole(position_ids)
        assert whole is not None
        highest = whole.amax().expand(position_ids.size(0), 1)
        made = super().forward(x, torch.cat((position_ids, highest), dim=1), *args, **kwargs)
        return tuple(part[:, :-1] for part in made) if isinstance(made, tuple) else made[:, :-1]
