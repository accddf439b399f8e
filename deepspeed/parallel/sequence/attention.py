"""Attention over whole sequences for programs that cut activations along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from deepspeed.comm.job import backward_comm
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.exchange import exchange, one_after_another, shares_of_heads, transport_of
from deepspeed.parallel.sequence.saved_result import SavedResult
from deepspeed.uncompiled import uncompiled


class DistributedAttention(nn.Module):
    """Makes any attention sequence-parallel: each rank has all tokens of some heads (Ulysses, arXiv 2309.14509).

    Heads need not be divisible by the ranks, and there may be fewer key and value heads than ranks; see
    ``shares_of_heads``.

    Args:
        local_attention: Called with query, key, value ``[batch, all tokens, this rank's heads, width]`` (or the layout
            that ``batch_dim_idx`` names), contiguous, and the further arguments; returns the same layout.
        sequence_process_group: Torch process group of the ranks that share a sequence.
        scatter_idx: Axis of heads.
        gather_idx: Axis of tokens; ``batch_dim_idx`` overrules it.
        sp_stream: A stream for the exchanges, so that they overlap with the projections. Each starts when its input is
            ready: after the event ``done_event`` of the tensor if it has one, else after the current stream.
        num_kv_heads: If given, checked against the key.
        recompute_exchange: Save the result once for backward, in the next layer's layout, and repeat the exchange in
            backward (an addition to upstream); see ``SavedResult``. The result must not be changed in place.
    """

    def __init__(
        self,
        local_attention: Callable[..., torch.Tensor],
        sequence_process_group: Any,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
        *,
        recompute_exchange: bool = False,
    ) -> None:
        super().__init__()
        self.recompute_exchange = recompute_exchange
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx = scatter_idx
        self.gather_idx = gather_idx
        self.sp_stream = sp_stream
        self.sp_overlap_comm = sp_stream is not None
        self.num_kv_heads = num_kv_heads

    @partial(uncompiled, recursive=False)  # the local attention may be compiled
    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        batch_dim_idx: int,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Computes attention. Every rank of the group must call it, with the same shapes.

        The result is as ``query``. Further arguments are for the local attention.

        Args:
            query: 4-D; this rank's tokens, all heads.
            key: 4-D in the same order of dimensions, with as many heads or a divisor of them.
            value: As ``key``.
            batch_dim_idx: 0: ``[batch, tokens, heads, width]``; 1: ``[tokens, batch, heads, width]``.
            rotary_pos_emb: ``(cos, sin)`` of all tokens, ``[tokens, width]`` or broadcastable; applied to query and key
                after the exchange.

        Raises:
            DeepSpeedConfigError: The tensors are not as described, or there are too few heads for the ranks.
        """
        if query.dim() != 4 or batch_dim_idx not in (0, 1):
            raise DeepSpeedConfigError(
                f"DistributedAttention: expected 4-D tensors and batch_dim_idx 0 or 1, found {query.dim()}-D and "
                f"{batch_dim_idx}. Pass [batch, tokens, heads, head_dim] with 0, [tokens, batch, heads, head_dim] with "
                "1"
            )
        tokens = 1 - batch_dim_idx  # the axis
        transport = transport_of(self.spg, query.device)
        shares = shares_of_heads(query.size(self.scatter_idx), key.size(self.scatter_idx), transport.size)
        if self.num_kv_heads is not None and key.size(self.scatter_idx) != self.num_kv_heads:
            raise DeepSpeedConfigError(
                f"DistributedAttention: num_kv_heads is {self.num_kv_heads}, but the key has "
                f"{key.size(self.scatter_idx)} heads; give that number, or leave num_kv_heads out"
            )
        query, key, value = (
            self._in(tensor, tokens, heads).contiguous()
            for tensor, heads in ((query, shares.query), (key, shares.key), (value, shares.key))
        )
        if rotary_pos_emb is not None:
            query, key = (rotated(x, *rotary_pos_emb, tokens) for x in (query, key))
        once = SavedResult() if self.recompute_exchange and transport.size > 1 else None
        with nullcontext() if once is None else once.attending():
            context = self.local_attn(query, key, value, *args, **kwargs)
        with self._beside(context):
            out = exchange(context, self.spg, tokens, self.scatter_idx, back=True, heads=shares.query).contiguous()
        if once is not None:
            once.became(context, out, lambda result: self._in(result, tokens, shares.query))
        return out

    def _in(self, tensor: torch.Tensor, tokens: int, heads: Any) -> torch.Tensor:
        with self._beside(tensor):
            return exchange(tensor, self.spg, tokens, self.scatter_idx, heads=heads)

    def _beside(self, tensor: torch.Tensor) -> Any:
        """Returns a context that runs the exchange on its stream once ``tensor`` is ready.

        Work after the block waits for the exchange.
        """
        if self.sp_stream is None:
            return nullcontext()
        return _OnStream(self.sp_stream, tensor)


class _OnStream:
    """Runs a block on another stream, which waits for its input; the current stream then waits for the block.

    Backward needs no code: autograd runs a node on the stream of its forward.
    """

    def __init__(self, stream: Any, tensor: torch.Tensor) -> None:
        self._stream, self._done = stream, getattr(tensor, "done_event", None)
        self._outside = torch.accelerator.current_stream(tensor.device)
        tensor.record_stream(stream)

    def __enter__(self) -> None:
        if self._done is not None:
            self._stream.wait_event(self._done)
        else:
            self._stream.wait_stream(self._outside)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_error: Any) -> None:
        torch.accelerator.set_stream(self._outside)
        self._outside.wait_stream(self._stream)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tokens: int) -> torch.Tensor:
    """Applies rotary position embedding to the last axis of ``x``, in the split-halves form (arXiv 2104.09864).

    ``x`` is ``[..., width]``, with the axis ``tokens``; ``cos`` and ``sin`` are ``[..., rotated width]`` by token.
    """

    def like_tokens(part: torch.Tensor) -> torch.Tensor:
        shape = [1] * x.dim()
        shape[tokens], shape[-1] = part.size(0), part.size(-1)
        return (part if part.dim() == x.dim() else part.reshape(shape)).to(x.dtype)

    cos, sin = like_tokens(cos), like_tokens(sin)
    width = cos.size(-1)
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, rest), dim=-1) if rest.size(-1) else turned


class _SeqAllToAll(torch.autograd.Function):
    """The exchange, with the name and arguments that other projects use.

    ``apply(group, input, scatter_idx, gather_idx, batch_dim_idx, stream, handle, type, is_fwd)``: the larger of the two
    axes is that of heads. With uneven heads, the ranks exchange their counts on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any,
        group: Any,
        input: torch.Tensor,
        scatter_idx: int,
        gather_idx: int,
        batch_dim_idx: int,
        stream: Any = None,
        handle: Any = None,
        type: Any = None,
        is_fwd: bool = True,
    ) -> torch.Tensor:
        tokens, head_axis = sorted((scatter_idx, gather_idx))
        back = scatter_idx == tokens
        heads = None
        if back:
            transport = transport_of(group, input.device)
            mine = torch.tensor([input.size(head_axis)])
            counts = transport.gather_small(mine, channel="call", label="the numbers of heads (_SeqAllToAll)")
            heads = one_after_another(counts.flatten().tolist())
        ctx.arguments = group, scatter_idx, gather_idx, batch_dim_idx
        if ctx.needs_input_grad[1]:
            backward_comm.note_anywhere()
        return exchange(input.detach(), group, tokens, head_axis, back=back, heads=heads).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # type: ignore[override]
        group, scatter_idx, gather_idx, batch = ctx.arguments
        back = _SeqAllToAll.apply(group, gradients[0], gather_idx, scatter_idx, batch)
        return None, back, None, None, None, None, None, None, None
