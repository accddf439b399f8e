"""What a Transformers model lets its tokens see, as a sharded sequence can have it: without a mask of tokens by tokens.

The library builds masks from functions of positions. On a shard they would be evaluated at the shard's own positions,
so they are recognised instead, and those that are not are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.models.masks import UnknownMaskError, mask_kind


@dataclass(frozen=True)
class Visible:
    """What the attention layers get in the place of a mask.

    Attributes:
        is_causal: Tokens see none that come later.
        window: With ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all.
        padding: This rank's part of the padding mask, ``[batch, tokens]``, True for tokens; None where there is none.
        positions: Position ids of this rank's tokens, ``[batch or 1, tokens]``, where they say that documents are
            packed, for layers that are not given them; None: one document.
    """

    is_causal: bool = True
    window: int | None = None
    padding: torch.Tensor | None = None
    positions: torch.Tensor | None = None


def visible_by(mask_function: Callable[..., Any]) -> Visible:
    """Returns what one of the library's mask functions lets tokens see.

    Raises:
        DeepSpeedConfigError: It cannot be had on a part of a sequence.
    """
    try:
        kind = mask_kind(mask_function)
    except UnknownMaskError as error:
        raise DeepSpeedConfigError(
            f"sequence parallel: the model masks attention by {error}, which cannot be had on a part of "
            "a sequence; expected causal or full attention, a causal sliding window, packed documents or padding. "
            "Train this model without sequence_parallel_size"
        ) from None
    return Visible(kind.is_causal, kind.window)


def given_mask(attention_mask: Any, tokens: int) -> Visible | None:
    """What an attention layer was given for a mask; None where that leaves it to the layer.

    Args:
        attention_mask: What the model handed on.
        tokens: This rank's.

    Raises:
        DeepSpeedConfigError: It is a mask of tokens by tokens, or one of another length.
    """
    if attention_mask is None or isinstance(attention_mask, Visible):
        return attention_mask
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return replace(Visible(), padding=checked_padding(attention_mask, tokens))
    kind = f"a {attention_mask.dim()}-D tensor" if isinstance(attention_mask, torch.Tensor) else type(attention_mask)
    raise DeepSpeedConfigError(
        f"sequence parallel: attention_mask is {kind}, a mask of tokens by tokens, which is not cut along the "
        "sequence; leave it out for causal attention, give a padding mask of [batch, tokens], or position_ids "
        "that begin again with each packed document"
    )


def checked_padding(mask: torch.Tensor, tokens: int) -> torch.Tensor:
    """Returns the padding mask of this rank's tokens, ``[batch, tokens]``, as bool.

    Raises:
        DeepSpeedConfigError: It has another number of tokens.
    """
    if mask.size(1) != tokens:
        raise DeepSpeedConfigError(
            f"sequence parallel: attention_mask is of {mask.size(1)} tokens, but this rank has {tokens}; cut it as the "
            "other inputs are (UlyssesSPDataLoaderAdapter does)"
        )
    return mask.bool()
