"""The engine feature ``batch_invariant``: an output's bits do not depend on the batch that it is computed in.

A library's kernel for a product is chosen by the shapes of the whole batch, and kernels differ in the order of their
sums. Here products are computed for tiles of a fixed number of rows, attention in tiles of queries and keys, and
activations over whole vectors. A row's bits depend on nothing but its values then. What torch computes row by row
already (norms, softmax over the last dimension, lookups) stays as it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from deepspeed.engine_feature import EngineFeature, EngineHooks, EngineSetup
from deepspeed.errors import DeepSpeedConfigError, NotYetSupportedError
from deepspeed.logging import log_dist
from deepspeed.zero.group import Groups
from deepspeed.zero.runtime import ZeroRuntime

TILE = 32
"""Rows of a product, and queries and keys of a tile of attention."""

_aten = torch.ops.aten
_VECTOR = 64  # elements that every kernel for activations computes in whole vectors
_ALIGNMENT = 64  # bytes; a product's kernel may depend on the alignment of its rows
_ACTIVATIONS = frozenset(
    {
        _aten.silu.default,
        _aten.gelu.default,
        _aten.sigmoid.default,
        _aten.softplus.default,
        _aten.elu.default,
        _aten.mish.default,
        _aten.hardswish.default,
        _aten.tanh.default,
        _aten.exp.default,
        _aten.log.default,
        _aten.sin.default,
        _aten.cos.default,
        _aten.erf.default,
        _aten.pow.Tensor_Scalar,
    }
)
_REFUSED = frozenset(
    {
        "_grouped_mm",
        "_native_multi_head_attention",
        "_scaled_grouped_mm",
        "_scaled_mm",
        "addbmm",
        "addmv",
        "baddbmm",
        "convolution",
        "mkldnn_linear",
        "mv",
        "native_batch_norm",
        "native_group_norm",
    }
)


class BatchInvariantFeature(EngineFeature):
    """Forwards whose bits for a sample do not depend on the other samples, their number, or padding on the right."""

    title = "batch invariance"
    setting = "batch_invariant"

    @override
    def refuse(self, setup: EngineSetup) -> None:
        root = setup.root
        if not root.batch_invariant:
            return
        for found, is_used, instead in (
            (f"a {setup.device.type}", setup.device.type != "cpu", "its kernels choose sums by the size of the batch"),
            ("compile", root.compile.enabled, "fused kernels choose sums by the size of the batch"),
            ("fused_loss", root.fused_loss, "it computes no logits"),
            ("float8", root.float8 is not None, "scales are those of whole batches"),
            ("a pipeline", setup.has_stages, "its stages are no whole model"),
            (
                "ranks that share a layer or a sequence",
                setup.ranks.model_size * setup.ranks.sequence_size > 1,
                "sums over ranks depend on the size of what is sent",
            ),
        ):
            if is_used:
                raise DeepSpeedConfigError(
                    f"batch_invariant with {found}: {instead}. Leave one of the two out, or compute on a CPU"
                )

    @override
    def hooks(self, setup: EngineSetup, runtime: ZeroRuntime, groups: Groups, batch_size: int) -> EngineHooks | None:
        return _InvariantHooks(setup.model) if setup.root.batch_invariant else None


FEATURE = BatchInvariantFeature()


class _InvariantHooks(EngineHooks):
    """Opens the modes around each forward of the model, whoever calls it."""

    def __init__(self, model: nn.Module) -> None:
        self._open: list[ExitStack] = []
        self._price: _PriceCounter | None = _PriceCounter()
        self._handles = [
            model.register_forward_pre_hook(self._enter, prepend=True),
            model.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        stack = ExitStack()
        threads = torch.get_num_threads()
        if threads > 1:  # threads divide a product's rows, and a vector operation's elements, by their number
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        products = _InvariantProductMode(self._price)
        stack.enter_context(products)
        stack.enter_context(_InvariantAttentionMode(self._price, products))
        self._open.append(stack)

    def _leave(self, *_: Any) -> None:
        self._open.pop().close()
        if self._price is not None and not self._open:
            self._price.report()
            self._price = None

    @override
    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class _PriceCounter:
    """Measures, in one forward, what torch would have taken for the same operations."""

    def __init__(self) -> None:
        self._own = self._plain = 0.0

    def measure(self, own: Callable[[], Any], plain: Callable[[], Any]) -> Any:
        begin = time.thread_time()
        with torch.no_grad():
            plain()
        middle = time.thread_time()
        result = own()
        self._plain += middle - begin
        self._own += time.thread_time() - middle
        return result

    def report(self) -> None:
        if self._plain:
            log_dist(
                f"batch_invariant: products, attention and activations of the first forward took {self._own * 1e3:.2f} "
                f"ms, {self._own / self._plain:.1f} times as long as torch's on one thread"
            )


def _priced(price: _PriceCounter | None, own: Callable[[], Any], plain: Callable[[], Any]) -> Any:
    return own() if price is None else price.measure(own, plain)


class _InvariantProductMode(TorchDispatchMode):
    """Computes matrix products and activations below autograd; its backward stays that of torch."""

    def __init__(self, price: _PriceCounter | None) -> None:
        super().__init__()
        self.is_paused = False  # while attention is computed, in tiles of its own
        self._price = price

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            return func(*args, **kwargs)
        if func in (_aten.linear.default, _aten.matmul.default):  # seen whole in inference mode
            with self:
                return func.decompose(*args, **kwargs)
        plain = lambda: func(*args, **kwargs)  # noqa: E731 - for the measurement
        if func is _aten.mm.default:
            return _priced(self._price, lambda: tiled_product(*args), plain)
        if func is _aten.addmm.default:
            return _priced(self._price, lambda: _add_product(*args, **kwargs), plain)
        if func in _ACTIVATIONS and args[0].is_floating_point():
            return _priced(self._price, lambda: _in_whole_vectors(func, *args, **kwargs), plain)
        name = func.overloadpacket.__name__
        # A product over one element has no sum: rotary embeddings multiply positions and frequencies so.
        if name in _REFUSED or (name == "bmm" and args[0].shape[-1] > 1):
            raise NotYetSupportedError(
                f"batch_invariant: the model calls torch's {name}, whose sums depend on the batch. Use modules of "
                'nn.Linear and scaled_dot_product_attention (attn_implementation="sdpa"), or leave batch_invariant out'
            )
        return plain()


class _InvariantAttentionMode(TorchFunctionMode):
    """Computes ``scaled_dot_product_attention`` in tiles."""

    def __init__(self, price: _PriceCounter | None, products: _InvariantProductMode) -> None:
        super().__init__()
        self._price, self._products = price, products

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p > 0:
            raise NotYetSupportedError(
                f"batch_invariant with dropout_p={dropout_p} in attention: random places depend on the batch. Set the "
                "model's attention dropout to 0"
            )
        how = (attn_mask, is_causal, query.shape[-1] ** -0.5 if scale is None else scale)
        self._products.is_paused = True
        try:
            return _priced(
                self._price,
                lambda: _TiledAttention.apply(query, key, value, *how),
                lambda: _plain_attention(query, key, value, *how),
            )
        finally:
            self._products.is_paused = False


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, is_causal: bool, scale: float
) -> torch.Tensor:
    key, value = _of_all_heads(query, key, value)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)


class _TiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, is_causal: bool, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.how = (is_causal, scale)
        key, value = _of_all_heads(query, key, value)
        return tiled_attention(query, key, value, mask, is_causal, scale)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        is_causal, scale = ctx.how
        query, key, value, mask = ctx.saved_tensors
        with torch.enable_grad():
            query, key, value = (one.detach().requires_grad_() for one in (query, key, value))
            output = _plain_attention(query, key, value, mask, is_causal, scale)
            return (*torch.autograd.grad(output, (query, key, value), gradient), None, None, None)


def _of_all_heads(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns keys and values with the heads of the queries, which may share them in groups."""
    times = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)


def tiled_product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns ``rows @ weight`` for ``[n, k]`` and ``[k, m]``; the bits of a row depend on itself and the weight."""
    rows = rows.contiguous()
    if rows.data_ptr() % _ALIGNMENT:
        rows = rows.clone()
    count = rows.shape[0]
    product = rows.new_empty(-(-count // TILE) * TILE, weight.shape[1])
    whole = count - count % TILE
    for start in range(0, whole, TILE):
        torch.mm(rows[start : start + TILE], weight, out=product[start : start + TILE])
    if whole < count:
        last = rows.new_zeros(TILE, rows.shape[1])
        last[: count - whole] = rows[whole:]
        torch.mm(last, weight, out=product[whole:])
    return product[:count]


def _add_product(
    added: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = tiled_product(rows, weight)
    if alpha != 1:
        product = product * alpha
    return product + (added if beta == 1 else added * beta)


def _in_whole_vectors(func: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Returns ``func(values)``. torch computes the elements after the last whole vector by other instructions."""
    flat = values.reshape(-1)
    padded = functional.pad(flat, (0, -flat.numel() % _VECTOR), value=1.0)
    return func(padded, *args, **kwargs)[: flat.numel()].view(values.shape)


def tiled_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, is_causal: bool, scale: float
) -> torch.Tensor:
    """Computes attention tile by tile and returns ``[..., queries, width]`` in the dtype of the queries.

    A sum over keys goes tile by tile (`Milakov & Gimelshein <https://arxiv.org/abs/1805.02867>`_). A key that is masked
    adds 0, so keys of padding on the right change nothing.

    Args:
        query: ``[..., queries, width]``.
        key: ``[..., keys, width]``, with as many heads.
        value: ``[..., keys, width of values]``.
        mask: Broadcastable to ``[..., queries, keys]``: bool, True for keys that count, or what is added to scores.
        is_causal: Query i sees keys up to i.
        scale: Factor on scores.
    """
    lead, queries, keys = query.shape[:-2], query.shape[-2], key.shape[-2]
    tiles_of_queries, tiles_of_keys = (-(-count // TILE) for count in (queries, keys))
    q, k, v = (
        functional.pad(one.float(), (0, 0, 0, -one.shape[-2] % TILE)).flatten(0, -3) for one in (query, key, value)
    )
    bias = q.new_zeros(queries, keys)
    if mask is not None:
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else mask.float()
    if is_causal:
        bias = bias.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
    bias = functional.pad(bias, (0, -keys % TILE, 0, -queries % TILE), value=-torch.inf)
    bias = bias.expand(*lead, *bias.shape[-2:]).flatten(0, -3)
    outputs = []
    for row in range(0, tiles_of_queries * TILE, TILE):
        rows = slice(row, row + TILE)
        greatest = q.new_full((q.shape[0], TILE, 1), -torch.inf)
        total = q.new_zeros(q.shape[0], TILE, 1)
        summed = q.new_zeros(q.shape[0], TILE, v.shape[-1])
        for column in range(0, tiles_of_keys * TILE, TILE):
            columns = slice(column, column + TILE)
            scores = torch.bmm(q[:, rows].contiguous(), k[:, columns].transpose(1, 2).contiguous()) * scale
            scores = scores + bias[:, rows, columns]
            now = torch.maximum(greatest, scores.amax(-1, keepdim=True))
            base = now.masked_fill(now == -torch.inf, 0.0)  # no key so far
            weights, shrunk = (scores - base).exp(), (greatest - base).exp()
            total = total * shrunk + weights.sum(-1, keepdim=True)
            summed = summed * shrunk + torch.bmm(weights, v[:, columns].contiguous())
            greatest = now
        outputs.append(summed / total.masked_fill(total == 0, 1.0))
    return torch.cat(outputs, 1)[:, :queries].to(query.dtype).unflatten(0, lead)
