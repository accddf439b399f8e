"""Tiled computation along the sequence (ALST, arXiv 2506.13996).

Token-wise functions (an MLP, a head with its loss) need not be computed for all tokens at once. Forward saves only the
inputs and backward recomputes each tile, so intermediate values exist for one tile at a time. This is ordinary
autograd: a factor applied to the loss later reaches every gradient, and each weight gets its gradient once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.exchange import in_equal_parts, length_of
from deepspeed.parallel.sequence.loss import IGNORED


def tiled(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, tiles: int, axis: int = -2
) -> torch.Tensor:
    """Computes ``function(x)`` (any shape) tile by tile along ``axis``; fewer tiles if there are fewer positions.

    The function is pure, and treats each position along the axis, which its result has too, independently.
    """
    parts = x.split(tile_lengths(x.size(axis), tiles), dim=axis)
    if len(parts) == 1:
        return function(x)
    return torch.cat([run_again(function, part) for part in parts], dim=axis)


def tile_lengths(tokens: int, tiles: int) -> list[int]:
    """Returns the number of tokens of each tile, as equal as possible.

    The number of tiles is as requested, unless there are fewer tokens: ranks with sequences of different lengths then
    run a function equally often, which sharded parameters require.

    Raises:
        DeepSpeedConfigError: ``tiles`` is below 1.
    """
    if tiles < 1:
        raise DeepSpeedConfigError(f"tiled computation: expected at least 1 tile, found {tiles}")
    return [length_of(share) for share in in_equal_parts(tokens, max(min(tiles, tokens), 1))]


def run_again(function: Callable[..., Any], *tensors: Any) -> Any:
    """Runs ``function``; backward runs it again.

    Under autocast each tile casts the weights again: a shared cast would sum the tiles' gradients in the lower
    precision, with an error that grows with the number of tiles.
    """
    if not torch.is_grad_enabled():
        return function(*tensors)
    kind = next((x.device.type for x in tensors if isinstance(x, torch.Tensor)), "cpu")
    if torch.is_autocast_enabled(kind):
        function = torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)(function)
    return checkpoint(function, *tensors, use_reentrant=False)


class TiledMLP:
    """``TiledMLP.apply(fn, self, x, shards, compute_params)``: ``fn(self, x)`` tile by tile along axis -2."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Computes the result for ``x``, ``[..., tokens, width]``; ``fn`` is pure and token-wise.

        ``compute_params`` have no effect: weights get their gradients as in any other module.
        """
        return tiled(lambda part: fn(self, part), x, shards)


class TiledFusedLogitsLoss:
    """``TiledFusedLogitsLoss.apply(fn, self, x, y, mask, shards, compute_params, output_reduction)``."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
        output_reduction: Literal["mean", "sum"] = "mean",
    ) -> torch.Tensor:
        """Returns the loss of hidden states whose logits exist for one tile at a time.

        Args:
            fn: Called with the module, a tile of ``x``, one of ``y`` and, where there is a mask, one of that: 0-dim,
                the mean (or sum) over what counts in the tile. Tiles are rows of all sequences: ``[tokens, width]``,
                ``[tokens]``.
            x: Hidden states ``[batch, tokens, width]``.
            y: Labels ``[batch, tokens]``, where -100 is ignored, or floating values ``[batch, tokens, ...]`` (a
                teacher's hidden states), which all count.
            mask: ``[batch, tokens]``, for ``fn``; labels where it is 0 do not count. None: there is none.
            compute_params: Accepted without effect.
            output_reduction: ``mean`` over all tokens that count (not over tiles), or ``sum``.

        Returns:
            0-dim; 0 where nothing counts.
        """
        _check_reduction(output_reduction)
        given = [tensor.flatten(0, 1) for tensor in (x, y, mask) if tensor is not None]
        lengths = tile_lengths(given[0].size(0), shards)
        total, count = x.new_zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.int64, device=x.device)
        for tile in zip(*(tensor.split(lengths) for tensor in given), strict=True):
            found, counted = run_again(_tile_loss, fn, self, output_reduction, *tile)
            total, count = total + found, count + counted
        return total if output_reduction == "sum" else total / count.clamp(min=1)


def _tile_loss(
    fn: Callable[..., torch.Tensor],
    module: Any,
    reduction: str,
    x: torch.Tensor,
    y: torch.Tensor,
    *mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the sum over the counted tokens of a tile, and their number.

    ``fn`` runs even if no token counts, so that all ranks call it equally often. Then it gets labels of 0 and a mask of
    ones, because a mean of nothing would make its gradients NaN, and its result is dropped.
    """
    counted = torch.ones_like(y, dtype=torch.bool) if y.is_floating_point() else y != IGNORED
    if mask and mask[0].shape == y.shape and not y.is_floating_point():
        counted = counted & mask[0].bool()
    count = counted.sum()
    if not y.is_floating_point():
        y = y.where(count > 0, torch.zeros_like(y))
        mask = tuple(one.where(count > 0, torch.ones_like(one)) for one in mask)
    loss = fn(module, x, y, *mask).float()
    loss = torch.where(count > 0, loss, torch.zeros_like(loss))
    return (loss if reduction == "sum" else loss * count), count


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise DeepSpeedConfigError(f'tiled computation: output_reduction is "{reduction}"; expected "mean" or "sum"')


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int | None = 1,
    output_reduction: Literal["mean", "sum"] | None = "mean",
) -> torch.Tensor:
    """Returns ``fn(**kwargs)``, tile by tile along axis 1 of some of its arguments.

    Args:
        fn: Pure. Returns tokens along ``output_unshard_dimension``, or 0-dim values to be reduced.
        kwargs_to_shard: Arguments to cut along axis 1; None stays None.
        kwargs_to_pass: Arguments that every tile gets.
        grad_requiring_tensor_key: Name of an argument with a gradient; others that require one get theirs too.
        compute_params: Accepted without effect.
        output_unshard_dimension: Axis along which the tiles' results are concatenated; not used for 0-dim results.
        output_reduction: For 0-dim results: their sum, or their mean weighted by the tokens of each tile.

    Raises:
        DeepSpeedConfigError: An argument has other than ``seqlen`` tokens, or the reduction is unknown.
    """
    if grad_requiring_tensor_key not in {**kwargs_to_shard, **kwargs_to_pass}:
        raise DeepSpeedConfigError(
            f"sequence_tiled_compute: grad_requiring_tensor_key {grad_requiring_tensor_key!r} is none of the arguments "
            f"{', '.join([*kwargs_to_shard, *kwargs_to_pass])}; name one of them"
        )
    for name, value in kwargs_to_shard.items():
        if value is not None and value.size(1) != seqlen:
            raise DeepSpeedConfigError(
                f"sequence_tiled_compute: {name} has {value.size(1)} tokens along axis 1, and seqlen is {seqlen}; "
                "give tensors of seqlen tokens"
            )
    lengths, names = tile_lengths(seqlen, shards), list(kwargs_to_shard)
    cut = [
        [None] * len(lengths) if value is None else value.split(lengths, dim=1) for value in kwargs_to_shard.values()
    ]
    results = [
        run_again(lambda *tile: fn(**dict(zip(names, tile, strict=True)), **kwargs_to_pass), *tile)
        for tile in zip(*cut, strict=True)
    ]
    if results[0].dim() and output_unshard_dimension is not None:
        return torch.cat(results, dim=output_unshard_dimension)
    _check_reduction(str(output_reduction))
    if output_reduction == "sum":
        return torch.stack(results).sum()
    return (torch.stack(results) * torch.tensor(lengths, device=results[0].device)).sum() / seqlen


class SequenceTiledCompute:
    """:func:`sequence_tiled_compute` with positional arguments."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int | None,
        output_reduction: Literal["mean", "sum"] | None,
        *values: Any,
    ) -> torch.Tensor:
        """Computes the result; ``values`` are those of ``keys_to_shard``, then those of ``keys_to_pass``."""
        count = len(keys_to_shard)
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, values[:count], strict=True)),
            dict(zip(keys_to_pass, values[count:], strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )
