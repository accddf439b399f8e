"""Random layerwise token dropping: a layer sees some tokens, the others pass it unchanged (arXiv:2211.11586)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.dropping.positions import Positions, is_for_all_samples, mapped
from deepspeed.give_base import give_base

_CACHE_POSITION = "cache_position"  # of Transformers: where in a cache the tokens go, one after the other


@dataclass
class TokenDrop:
    """What the dropping layers of one model share.

    Attributes:
        kept: Tokens that they see; None: all.
        mask_name: Name of the mask among a layer's arguments; None: every argument with ``mask`` in its name.
        sequence_first: Hidden states are [positions, samples, ...].
    """

    kept: int | None = None
    mask_name: str | None = None
    sequence_first: bool = False


class RandomLayerTokenDrop(nn.Module):
    """In front of the class of a layer: in training it sees only a random part of the tokens, in their order.

    ``RandomLayerTokenDrop(layer)`` changes the layer in place and gives it back, so names of parameters stay as they
    are. Masks lose the same rows and columns, and so do position numbers and rotary tables; where such a table has no
    axis of samples, all samples of the batch keep the same positions. Positions come from torch's generator of the
    device, of each rank its own, so activation checkpointing sees the same ones again.

    Args:
        layer: Takes hidden states first (or by ``hidden_states``), and answers with hidden states of that shape, alone
            or first in a tuple.
    """

    _token_drop: TokenDrop | None

    def __new__(cls, layer: nn.Module | None = None) -> Any:
        """The layer itself."""
        if layer is None:  # a copy is being made
            return super().__new__(cls)
        return give_base(layer, cls)

    def __init__(self, layer: nn.Module) -> None:
        if "_token_drop" not in self.__dict__:
            self._token_drop = None

    def init_config(self, config: Mapping[str, Any], scheduler: Any, random_ltd_layer_id: int) -> None:
        """Lets the layer drop tokens by a schedule of one's own, without an engine.

        Args:
            config: Of ``random_ltd``: ``model_mask_name`` and ``hidden_state_order`` are read.
            scheduler: Asked with ``get_current_seq()`` at each call.
            random_ltd_layer_id: Accepted for programs of old.
        """
        self._token_drop = _AskedSchedule(scheduler, config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's answer for all tokens."""
        drop = self._token_drop
        if drop is None or drop.kept is None or not self.training:
            return super().__call__(*args, **kwargs)
        names = list(inspect.signature(self.forward).parameters)
        named = {**dict(zip(names, args, strict=False)), **kwargs}
        first = names[0] if args else "hidden_states"
        hidden = named.get(first)
        if not isinstance(hidden, torch.Tensor) or hidden.dim() < 2:
            raise ValueError(
                f"random-LTD: {type(self).__name__} was called without hidden states as its first argument or by the "
                "keyword hidden_states"
            )
        batch, length = (hidden.shape[1], hidden.shape[0]) if drop.sequence_first else hidden.shape[:2]
        if drop.kept >= length:
            return super().__call__(*args, **kwargs)
        positions = Positions.draw(
            batch,
            length,
            drop.kept,
            hidden.device,
            is_shared=_has_shared_table(drop, named, first, batch, length),
            sequence_first=drop.sequence_first,
        )
        cut = {name: _cut(drop, name, value, positions) for name, value in named.items() if name != first}
        cut[first] = positions.of_hidden(hidden)
        rest = args[len(names) :]  # of a forward that takes *args
        answer = super().__call__(
            *(cut[name] for name in names[: len(args)]), *rest, **{name: cut[name] for name in kwargs}
        )
        if isinstance(answer, torch.Tensor):
            return positions.put_back(hidden, answer)
        return (positions.put_back(hidden, answer[0]), *answer[1:])


class _AskedSchedule(TokenDrop):
    """Asks a schedule of the program's own at each call."""

    def __init__(self, scheduler: Any, config: Mapping[str, Any]) -> None:
        self._scheduler = scheduler
        self.mask_name = config.get("model_mask_name")
        self.sequence_first = config.get("hidden_state_order") == "seq_batch_dim"

    @property
    def kept(self) -> int | None:  # type: ignore[override]
        return self._scheduler.get_current_seq()


def _is_mask(drop: TokenDrop, name: str) -> bool:
    return name == drop.mask_name if drop.mask_name is not None else "mask" in name


def _has_shared_table(drop: TokenDrop, named: Mapping[str, Any], first: str, batch: int, length: int) -> bool:
    found = []

    def look(table: torch.Tensor) -> None:
        found.append(is_for_all_samples(table, length, batch, sequence_first=drop.sequence_first))

    for name, value in named.items():
        if name not in (first, _CACHE_POSITION) and not _is_mask(drop, name):
            mapped(value, look)
    return any(found)


def _cut(drop: TokenDrop, name: str, value: Any, positions: Positions) -> Any:
    if name == _CACHE_POSITION:
        return mapped(value, lambda numbers: numbers[: positions.kept.shape[1]])
    if not _is_mask(drop, name):
        return mapped(value, positions.of_table)
    if value is not None and not isinstance(value, (torch.Tensor, tuple, list)):
        raise ValueError(
            f"random-LTD: the mask {name} is a {type(value).__name__}, which cannot be cut to the tokens kept; "
            "use an attention implementation whose masks are tensors"
        )
    return mapped(value, positions.of_mask)
