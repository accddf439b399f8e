"""Random layerwise token dropping: a layer processes some tokens, the others bypass it (arXiv:2211.11586).

The kept positions are selected in every argument that has an axis of positions: hidden states, masks, rotary tables.

Shapes: B samples, S positions, k of them kept, H heads, D features. ``kept`` is an int64 tensor [B, k], sorted along k.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from deepspeed.data.curriculum.scheduler import grown
from deepspeed.give_base import give_base

_CACHE_POSITION = "cache_position"  # argument of Transformers layers: consecutive positions in the KV cache


@dataclass
class TokenDrop:
    """State that the dropping layers of one model share."""

    kept: int | None = None  # number of tokens per sequence that the layers process; None: all
    # name of a layer's mask argument; None: every argument with ``mask`` in its name is a mask
    mask_name: str | None = None
    sequence_first: bool = False  # hidden states are [positions, samples, ...]


class RandomLayerTokenDrop(nn.Module):
    """Base class inserted before a layer's class: in training the layer processes a random subset of the tokens.

    ``RandomLayerTokenDrop(layer)`` changes the class of the layer in place and returns the layer. Parameter names do
    not change. Kept tokens stay in order. Masks, position ids and rotary tables are cut to the same positions. If such
    a table has no axis of samples, all samples of the batch keep the same positions. Each rank draws positions from
    torch's generator of its device; activation checkpointing restores that generator, so a recomputed forward draws
    the same ones.

    The layer's first argument (or keyword ``hidden_states``) is hidden states; it returns hidden states of that shape,
    alone or first in a tuple.
    """

    _token_drop: TokenDrop | None

    def __new__(cls, layer: nn.Module | None = None) -> Any:
        """Returns the layer itself."""
        if layer is None:  # a copy is being made
            return super().__new__(cls)
        return give_base(layer, cls)

    def __init__(self, layer: nn.Module) -> None:
        if "_token_drop" not in self.__dict__:
            self._token_drop = None

    def init_config(self, config: Mapping[str, Any], scheduler: Any, random_ltd_layer_id: int) -> None:
        """Enables token dropping without an engine; the scheduler's ``get_current_seq()`` is called at each forward.

        ``model_mask_name`` and ``hidden_state_order`` of ``config`` are read; ``random_ltd_layer_id`` is ignored.
        """
        self._token_drop = _ConfiguredSchedule(scheduler, config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the layer's result for all tokens.

        Raises:
            ValueError: Neither the first argument nor ``hidden_states`` is a tensor of at least two dimensions.
        """
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
                "keyword hidden_states; pass them"
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
        rest = args[len(names) :]  # only if the forward takes *args
        output = super().__call__(
            *(cut[name] for name in names[: len(args)]), *rest, **{name: cut[name] for name in kwargs}
        )
        if isinstance(output, torch.Tensor):
            return positions.put_back(hidden, output)
        return (positions.put_back(hidden, output[0]), *output[1:])


class _ConfiguredSchedule(TokenDrop):
    """A :class:`TokenDrop` whose ``kept`` is read from the program's own schedule."""

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

    def check(table: torch.Tensor) -> None:
        found.append(is_for_all_samples(table, length, batch, sequence_first=drop.sequence_first))

    for name, value in named.items():
        if name not in (first, _CACHE_POSITION) and not _is_mask(drop, name):
            mapped(value, check)
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


@dataclass(frozen=True)
class Positions:
    """The positions of each sample that a layer processes."""

    kept: torch.Tensor  # [B, k], int64, sorted along k
    length: int  # s, the number of positions
    is_shared: bool  # whether all samples keep the same positions
    sequence_first: bool  # hidden states are [S, B, ...] instead of [B, S, ...]

    @classmethod
    def draw(
        cls, batch: int, length: int, count: int, device: torch.device, *, is_shared: bool, sequence_first: bool
    ) -> Positions:
        """Draws ``count`` distinct positions out of ``length`` for each sample, from torch's generator."""
        noise = torch.rand(1 if is_shared else batch, length, device=device)
        kept = noise.topk(count, dim=1).indices.sort(dim=1).values
        return cls(kept.expand(batch, count), length, is_shared, sequence_first)

    @property
    def axes(self) -> tuple[int, int]:
        """The axis of samples and the axis of positions in hidden states."""
        return (1, 0) if self.sequence_first else (0, 1)

    def of_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the kept positions of hidden states: ``[B, S, width]`` to ``[B, count, width]``.

        With ``sequence_first`` the first two axes are swapped.
        """
        return self._along(hidden, *self.axes)

    def put_back(self, hidden: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        """Returns ``hidden``, ``[B, S, width]``, with kept positions from ``output``, ``[B, count, width]``.

        With ``sequence_first`` the first two axes of both are swapped.
        """
        samples, positions = self.axes
        index = self._index(hidden.dim(), samples, positions).expand_as(output)
        return hidden.scatter(positions, index, output.to(hidden.dtype))

    def of_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """Returns a mask cut to the kept positions. Its shape is [B or 1, S], [S, S] or [B or 1, ..., S or 1, S].

        Raises:
            ValueError: The last dimension of the mask is not S.
        """
        if mask.dim() < 2 or mask.shape[-1] != self.length:
            raise ValueError(
                f"random-LTD: expected a mask with the {self.length} positions of the hidden states as its last "
                f"dimension, found shape {tuple(mask.shape)}; pass a mask of that length"
            )
        batch = len(self.kept)
        if mask.dim() == 2 and (mask.shape[0] in (1, batch)) and mask.shape[0] != self.length:
            return self._along(mask, 0, 1)
        if mask.dim() == 2:  # one mask for all samples
            mask = mask[None]
        columns = self._along(mask, 0, mask.dim() - 1)
        return self._along(columns, 0, mask.dim() - 2) if mask.shape[-2] == self.length else columns

    def of_table(self, table: torch.Tensor) -> torch.Tensor:
        """Returns the kept positions of a tensor of any shape (position ids, rotary tables), if it has positions."""
        shape, batch = table.shape, len(self.kept)
        if is_for_all_samples(table, self.length, batch, sequence_first=self.sequence_first):
            return table.index_select(0, self.kept[0])
        samples, positions = self.axes
        if len(shape) >= 2 and shape[positions] == self.length and shape[samples] in (1, batch):
            return self._along(table, samples, positions)
        if len(shape) == 4 and shape[2] == self.length and shape[0] in (1, batch):  # [B or 1, H or 1, S, D]
            return self._along(table, 0, 2)
        return table

    def _index(self, dims: int, samples: int, positions: int) -> torch.Tensor:
        shape = [1] * dims
        shape[samples], shape[positions] = self.kept.shape
        return (self.kept.t() if samples > positions else self.kept).reshape(shape)

    def _along(self, tensor: torch.Tensor, samples: int, positions: int) -> torch.Tensor:
        if self.is_shared:
            return tensor.index_select(positions, self.kept[0])
        shape = list(tensor.shape)
        shape[samples] = len(self.kept)
        whole = tensor.expand(shape)
        shape[positions] = self.kept.shape[1]
        return whole.gather(positions, self._index(len(shape), samples, positions).expand(shape))


def is_for_all_samples(table: torch.Tensor, length: int, batch: int, *, sequence_first: bool) -> bool:
    """Returns whether ``table`` has an axis of positions but none of samples: [S] or [S, D]."""
    if table.dim() == 0 or table.dim() > 2 or table.shape[0] != length:
        return False
    if table.dim() == 1:
        return True
    # If there are as many samples as positions, [S, S] is taken as [B, S].
    return not (table.shape[1] == length and batch == length) and not (sequence_first and table.shape[1] == batch)


def mapped(value: Any, change: Any) -> Any:
    """Applies ``change`` to every tensor in a value, which may be a (nested) tuple or list; returns the result."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = (mapped(part, change) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)  # a named tuple takes fields
    return value


_WRAPPED = ".random_ltd_layer"


def convert_to_random_ltd(model: Any, convert_type: type[nn.Module]) -> Any:
    """Converts layers of a class in a model or engine to drop tokens, see ``data_efficiency.data_routing.random_ltd``.

    Call it before or after ``deepspeed.initialize``. Names of parameters and checkpoints do not change, and each layer
    stays an instance of its class.

    Raises:
        ValueError: The model has no layer of that class.
    """
    inner = getattr(model, "module", model) if hasattr(model, "random_ltd_initialize") else model
    layers = [layer for layer in inner.modules() if isinstance(layer, convert_type)]
    if not layers:
        raise ValueError(
            f"convert_to_random_ltd: the model has no layer of the class {convert_type.__name__}; pass the class of "
            "its blocks"
        )
    for layer in layers:
        RandomLayerTokenDrop(layer)
    if inner is not model:
        model.random_ltd_initialize()
    return model


def attach(model: nn.Module, numbers: list[int], drop: TokenDrop) -> None:
    """Sets the state of converted layers by the last numbers in their names; ValueError where not exactly one fits."""
    converted = {name: layer for name, layer in model.named_modules() if isinstance(layer, RandomLayerTokenDrop)}
    by_number: dict[int, list[RandomLayerTokenDrop]] = {}
    for name, layer in converted.items():
        own = [int(part) for part in name.split(".") if part.isdigit()]
        by_number.setdefault(own[-1] if own else -1, []).append(layer)
    wrong = [number for number in numbers if len(by_number.get(number, [])) != 1]
    if wrong:
        raise ValueError(
            f"data_efficiency.data_routing.random_ltd.random_ltd_layer_id: expected numbers that identify one "
            f"converted layer each, found {wrong}; converted layers are {', '.join(converted) or 'none'}"
        )
    for number in numbers:
        by_number[number][0]._token_drop = drop


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state dict of upstream DeepSpeed with the names of its wrapper modules removed.

    A state dict of this package has no such names and is returned as a copy.
    """
    return {name.replace(_WRAPPED, ""): value for name, value in state_dict.items()}


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Returns the model's state dict under its own names."""
    return remove_random_ltd_state_dict(model.state_dict())


class RandomLTDScheduler:
    """Grows the number of kept tokens per sequence linearly with the step, and counts the tokens of all layers.

    Args:
        config: ``total_layer_num``, ``random_ltd_layer_num``, ``random_ltd_schedule`` (``min_value``, ``max_value`` and
            ``schedule_config`` with ``require_steps`` and ``seq_per_step``) and ``global_batch_size`` (samples per
            update).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        schedule = config["random_ltd_schedule"]
        self.model_layer_num: int = config["total_layer_num"]
        self.random_ltd_layer_num: int = config["random_ltd_layer_num"]
        self.global_batch_size: int = config["global_batch_size"]
        self._min, self._max = schedule["min_value"], schedule["max_value"]
        self._steps = schedule["schedule_config"]["require_steps"]
        self._granularity = schedule["schedule_config"]["seq_per_step"]
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Resets the schedule to the state before the first step."""
        self._current = self._min
        self._consumed = 0
        self._step = -1

    def get_value(self, global_steps: int) -> int:
        """Returns the number of tokens kept at a step, without changing the state."""
        return grown(global_steps, low=self._min, high=self._max, steps=self._steps, granularity=self._granularity)

    def get_current_seq(self) -> int:
        """Returns the number of tokens kept now."""
        return self._current

    def set_current_seq(self, seq_length: int) -> None:
        """Sets the number of kept tokens until the next :meth:`update_seq`."""
        self._current = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Returns the number of layers that drop tokens."""
        return self.random_ltd_layer_num

    def update_seq(self, global_steps: int) -> None:
        """Sets the number of kept tokens for a step; counts the step's tokens at the first call with this step."""
        self._current = self.get_value(global_steps)
        if global_steps != self._step:
            dropping, whole = self.random_ltd_layer_num, self.model_layer_num - self.random_ltd_layer_num
            self._consumed += self.global_batch_size * (self._current * dropping + self._max * whole)
            self._step = global_steps

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Returns the tokens that all layers process in the first ``train_iters`` steps, without changing the state."""
        saved = self.state_dict()
        self.reset_to_init()
        for step in range(train_iters):
            self.update_seq(step)
        total = self._consumed
        self.load_state_dict(saved)
        return total

    def state_dict(self) -> dict[str, int]:
        """Returns the bounds, the number of kept tokens, the tokens of all layers so far, and the step."""
        return {
            "min_value": self._min,
            "max_value": self._max,
            "current_value": self._current,
            "consumed_layer_tokens": self._consumed,
            "current_steps": self._step,
        }

    def load_state_dict(self, state_dict: Mapping[str, int] | None) -> None:
        """Restores a :meth:`state_dict`; the bounds stay those of the configuration. None changes nothing."""
        if state_dict is None:
            return
        self._current = state_dict["current_value"]
        self._consumed = state_dict["consumed_layer_tokens"]
        self._step = state_dict["current_steps"]
