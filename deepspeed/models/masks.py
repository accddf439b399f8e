"""Recognizes and makes the attention masks of Transformers models.

The library composes masks from functions of a query position and a key position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_COVERED_ELSEWHERE = ("packed_sequence_mask_function", "padding_mask_function")
"""Mask functions of Transformers that repeat what the position ids and the padding mask state."""


@dataclass(frozen=True)
class MaskKind:
    """Describes which tokens a mask function makes visible."""

    is_causal: bool = True  # tokens see none that come later
    window: int | None = None  # with ``is_causal``: tokens see themselves and the ``window - 1`` before them; None: all


class UnknownMaskError(ValueError):
    """A mask function is not recognized; the message is the name of the function that made it."""


def mask_kind(mask_function: Callable[..., Any]) -> MaskKind:
    """Returns which tokens one of the library's mask functions makes visible.

    Raises:
        UnknownMaskError: It is not causal, full or a causal window, and not composed of these.
    """
    kind = _kind(mask_function)
    if kind.window is not None and not kind.is_causal:
        raise UnknownMaskError("sliding_window_overlay")
    return kind


def _kind(mask_function: Callable[..., Any]) -> MaskKind:
    if is_plain_mask(mask_function):
        from transformers.masking_utils import causal_mask_function

        return MaskKind(is_causal=mask_function is causal_mask_function)
    maker, _, inner = getattr(mask_function, "__qualname__", "").partition(".<locals>.")
    known = inspect.getclosurevars(mask_function).nonlocals if inner else {}
    if maker == "and_masks":
        found = [_kind(part) for part in known["mask_functions"] if _maker_of(part) not in _COVERED_ELSEWHERE]
        windows = [part.window for part in found if part.window is not None]
        return MaskKind(any(part.is_causal for part in found), min(windows, default=None))
    if maker == "remap_positions_for_packed_sequence":
        return _kind(known["mask_function"])
    if maker == "sliding_window_overlay":  # hides tokens long before, but none that come later
        return MaskKind(is_causal=False, window=int(known["sliding_window"]))
    raise UnknownMaskError(maker or str(mask_function))


def _maker_of(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", "").partition(".<locals>.")[0])


def is_plain_mask(mask_function: Any) -> bool:
    """Returns whether a mask function is causal or full, without anything else."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    return mask_function in (bidirectional_mask_function, causal_mask_function)


def is_bidirectional_mask(mask_function: Any) -> bool:
    """Returns whether a mask function hides nothing."""
    from transformers.masking_utils import bidirectional_mask_function

    return mask_function is bidirectional_mask_function


def whole_mask(*, attention_mask: torch.Tensor | None, mask_function: Any, **kwargs: Any) -> torch.Tensor | None:
    """Returns the full mask, ``[batch, 1 or heads, queries, keys]`` of bool, True where the key is visible."""
    from transformers.masking_utils import sdpa_mask

    kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return sdpa_mask(attention_mask=attention_mask, mask_function=mask_function, **kwargs)


def mask_of_implementation(name: str, **kwargs: Any) -> Any:
    """Returns the mask in the form that the attention implementation ``name`` takes."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    return ALL_MASK_ATTENTION_FUNCTIONS[name](**kwargs)
