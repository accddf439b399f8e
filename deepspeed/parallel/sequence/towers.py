"""Models with image inputs, where ranks share sequences: each rank computes whole towers, the decoder is cut.

The outputs of towers replace tokens of the text, and positions depend on where images are, so a model needs whole
sequences up to its decoder. Each rank gets its tokens, as in other models. They are gathered at the model's entry, and
vectors, positions and mask are cut again at the decoder's entry. Every rank computes the towers of all images; its
gradient for them comes from its own tokens only, as for embeddings.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job.job import axis_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.context import SequenceParallelContext, registered
from deepspeed.uncompiled import uncompiled

_PER_TOKEN = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")


def cut_at_decoder(entered: list[nn.Module], decoder: nn.Module) -> None:
    """Makes a registered model gather tokens at its entry and cut them at its decoder's entry, in place.

    ``entered`` are the modules that programs call with this rank's tokens; one may call another. The decoder computes
    only with vectors of tokens.
    """

    @uncompiled
    def end_whole(model: nn.Module, _args: Any, _result: Any) -> None:
        sharing = registered(model)
        if sharing.whole_for is model:
            sharing.whole_for = None

    for module in entered:
        module.register_forward_pre_hook(_gather, with_kwargs=True)
        module.register_forward_hook(end_whole, always_call=True)
    decoder.register_forward_pre_hook(_cut, with_kwargs=True)


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the arguments of a call by name; None if they do not fit the signature, so that ``forward`` raises."""
    try:
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return None
    more: dict[str, Any] = given.pop("kwargs", {})
    return {**given, **more}


@uncompiled
def _gather(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces this rank's tokens by whole sequences; a model nested in another passes them unchanged."""
    sharing = registered(model)
    if not sharing.is_on or sharing.whole_for is not None:
        return None
    given = _bound(model, args, kwargs)
    if given is None:
        return None
    kind = f"sequence parallel: {type(model).__name__}"
    if not isinstance(given.get("input_ids"), torch.Tensor):
        raise DeepSpeedConfigError(
            f"{kind}: expected input_ids, of which whole sequences are made for its towers, found "
            f"{', '.join(sorted(given)) or 'nothing'}. Give this rank's input_ids in the place of inputs_embeds"
        )
    if given.get("labels") is not None and given.get("shift_labels") is None:
        raise DeepSpeedConfigError(
            f"{kind} was called with labels and without shift_labels; it would shift them itself, and the label of "
            "this rank's last token is on the next rank. Give shift_labels, each token's next one "
            "(UlyssesSPDataLoaderAdapter does), and put the loss together by deepspeed.sequence.mean_loss"
        )
    part = given["input_ids"].shape
    for name in _PER_TOKEN:
        value = given.get(name)
        if value is None:
            continue
        if value.shape != part:
            raise DeepSpeedConfigError(
                f"{kind}: expected {name} of this rank's tokens, {tuple(part)}, found {tuple(value.shape)}. Give "
                "[batch, tokens]; positions of images are computed by the model where position_ids are left out"
            )
        given[name] = sharing.whole(value)
    sharing.whole_for = model
    return (), given


@uncompiled
def _cut(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cuts the decoder's arguments to this rank's tokens, if the model around it has gathered them."""
    sharing = registered(decoder)
    if sharing.whole_for is None:
        return None
    given = _bound(decoder, args, kwargs)
    if given is None:
        return None
    vectors = given.get("inputs_embeds")
    if vectors is None:
        vectors = given["input_ids"]
    rows, length = vectors.shape[:2]
    for name, value in given.items():
        if name in _OF_LOSS or value is None:
            continue
        if name in ("inputs_embeds", "input_ids"):
            given[name] = _part(value, 1, sharing)
        elif name == "position_ids" and isinstance(value, torch.Tensor) and value.size(-1) == length:
            given[name] = _part(value, value.dim() - 1, sharing)
        elif name == "attention_mask" and isinstance(value, torch.Tensor) and value.shape == (rows, length):
            given[name] = _part(value, 1, sharing)
        elif name == "attention_mask" or _is_per_token(value, rows, length):
            raise DeepSpeedConfigError(
                f"sequence parallel: {type(sharing.whole_for).__name__} calls its decoder {type(decoder).__name__} "
                f"with {name} of whole sequences, which cannot be cut to a rank's tokens; train this model with "
                "sequence_parallel_size 1"
            )
    if given.get("position_ids") is None:
        given["position_ids"] = _part(torch.arange(length, device=vectors.device)[None], 1, sharing)
    return (), given


def _is_per_token(value: Any, rows: int, length: int) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(item, torch.Tensor) for item in value)
    return isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[:2] == (rows, length)


def _part(whole: torch.Tensor, dim: int, sharing: SequenceParallelContext) -> torch.Tensor:
    """Returns this rank's tokens of a tensor with whole sequences along ``dim``."""
    axis = axis_of(sharing.group, SEQUENCE)
    return whole.chunk(axis.size, dim)[axis.place].contiguous()
