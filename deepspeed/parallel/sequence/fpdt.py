"""Megatron-style layers for sequences of millions of tokens, computed chunk by chunk (FPDT, arXiv 2408.16978).

Names and signatures match upstream. A chunk is a run of tokens of the whole sequence. Every rank has
an equal part of each chunk (see ``FPDT_InputConstruct``). So the exchange of a chunk gathers consecutive
tokens, and causal work is equal on all ranks. No GPU is needed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.axes import SEQUENCE
from deepspeed.comm.job.job import axis_of, size_of
from deepspeed.errors import DeepSpeedConfigError
from deepspeed.parallel.sequence.attention import rotated
from deepspeed.parallel.sequence.exchange import exchange, shares_of_heads
from deepspeed.parallel.sequence.host_chunks import HostChunks, attend_to_chunks
from deepspeed.parallel.sequence.online import MaskRule
from deepspeed.parallel.sequence.tiled import run_again
from deepspeed.parallel.sequence.vocabulary import chunked_cross_entropy, gather_tokens
from deepspeed.uncompiled import uncompiled


class FPDT_InputConstruct(nn.Module):  # noqa: N801 - upstream's name
    """Splits the tokens of whole sequences over the ranks that share them, an equal part of every chunk to each.

    Args:
        tokens: ``[batch, tokens]``.
        labels: ``[batch, tokens]``, or None.
        loss_mask: Returned whole, as losses are gathered (``FPDT_LogitsLoss``).
        attention_mask: Returned unchanged.
        position_ids: ``[batch, tokens]``, or None.
        args: Namespace with ``ds_sequence_parallel_fpdt_chunk_size``, tokens per chunk of the whole sequence.
        sp_size: Ranks that share a sequence.
        sp_rank: This rank's place among them.

    Raises:
        DeepSpeedConfigError: The sizes are not divisible.
    """

    def __init__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor | None,
        loss_mask: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        super().__init__()
        self.tokens, self.labels, self.position_ids = tokens, labels, position_ids
        self.loss_mask, self.attention_mask = loss_mask, attention_mask
        self.sp_size, self.sp_rank = sp_size, sp_rank
        length = tokens.size(1)
        self.chunk_size = min(int(args.ds_sequence_parallel_fpdt_chunk_size), length)
        if self.chunk_size < 1 or length % self.chunk_size or self.chunk_size % sp_size:
            raise DeepSpeedConfigError(
                f"FPDT_InputConstruct: {length} tokens in chunks of {self.chunk_size} over {sp_size} ranks; expected "
                "chunks (ds_sequence_parallel_fpdt_chunk_size) that divide the sequence and that the ranks divide"
            )

    def generate(self) -> tuple[torch.Tensor | None, ...]:
        """Returns ``(tokens, labels, loss_mask, attention_mask, position_ids)``.

        All but the two masks are this rank's part.
        """
        chunks = (-1, self.sp_size, self.chunk_size // self.sp_size)
        tokens, labels, positions = (
            None if whole is None else whole.unflatten(1, chunks)[:, :, self.sp_rank].flatten(1)
            for whole in (self.tokens, self.labels, self.position_ids)
        )
        return tokens, labels, self.loss_mask, self.attention_mask, positions


class FPDT_Attention(nn.Module):  # noqa: N801
    """Projections and causal attention, chunk by chunk, with keys and values in host memory.

    Args:
        config: Has ``hidden_size``, ``num_attention_heads``, ``num_key_value_heads``, ``kv_channels`` (width of a head)
            and ``attention_dropout``, which must be 0.
        first_weight: ``[(heads + 2 key heads) * kv_channels, hidden]``: queries, then keys, then values.
        first_bias: Its bias, or None.
        second_weight: ``[hidden, heads * kv_channels]``.
        second_bias: Its bias, or None.
        sequence_process_group: Torch process group of the ranks that share a sequence.
        gather_idx: Axis of tokens; 0.
        scatter_idx: Axis of heads; 2.
        return_bias: Return ``(output, second_bias)`` without adding the bias; False: add it.
        chunk_size: Tokens of a chunk of the whole sequence.
        enable_offloading: Keep keys and values in host memory.

    Raises:
        DeepSpeedConfigError: The layout is not supported, or dropout is not 0.
    """

    def __init__(
        self,
        config: Any,
        first_weight: torch.Tensor,
        first_bias: torch.Tensor | None,
        second_weight: torch.Tensor,
        second_bias: torch.Tensor | None,
        sequence_process_group: Any,
        gather_idx: int = 0,
        scatter_idx: int = 2,
        return_bias: bool = True,
        chunk_size: int = 65536,
        enable_offloading: bool = True,
    ) -> None:
        super().__init__()
        if (gather_idx, scatter_idx) != (0, 2):
            raise DeepSpeedConfigError(
                f"FPDT_Attention: gather_idx {gather_idx} and scatter_idx {scatter_idx}; expected 0 and 2, as its "
                "input is [tokens, batch, hidden]. Leave both out"
            )
        if config.attention_dropout:
            raise DeepSpeedConfigError(
                f"FPDT_Attention: attention_dropout is {config.attention_dropout}; its blocks drop no probabilities. "
                "Set it to 0"
            )
        # Not registered here: the parameters belong to other layers.
        self._weights = first_weight, first_bias, second_weight, second_bias
        self.width = config.kv_channels
        self.heads, self.key_heads = (
            config.num_attention_heads,
            config.num_key_value_heads or config.num_attention_heads,
        )
        self.group = sequence_process_group
        self.return_bias = return_bias
        self.chunk_size = chunk_size
        self.enable_offloading = enable_offloading

    @uncompiled
    def forward(
        self,
        layernorm_output: torch.Tensor,
        attention_mask: torch.Tensor | None,
        inference_params: Any,
        rotary_pos_emb: tuple[torch.Tensor, torch.Tensor] | None,
        cpu_offloading: bool = True,
    ) -> Any:
        """Computes attention. Every rank of the group must call it, and run its backward.

        Args:
            layernorm_output: ``[this rank's tokens, batch, hidden]``, split as ``FPDT_InputConstruct`` does.
            attention_mask: None: attention is causal.
            inference_params: None.
            rotary_pos_emb: ``(cos, sin)`` of all tokens in the order of the sequence, ``[tokens, width]`` or
                ``[tokens, 1, 1, width]``.
            cpu_offloading: False: as ``enable_offloading=False``.

        Returns:
            ``[this rank's tokens, batch, hidden]``, with the bias beside it where ``return_bias``.

        Raises:
            DeepSpeedConfigError: A mask or generation is requested, or the tokens are not divisible into chunks.
        """
        for name, value in (("attention_mask", attention_mask), ("inference_params", inference_params)):
            if value is not None:
                raise DeepSpeedConfigError(
                    f"FPDT_Attention: {name} is {type(value).__name__}; expected None, as it computes causal attention "
                    "in training"
                )
        first, first_bias, second, second_bias = self._weights
        ranks = size_of(self.group)
        tokens = min(self.chunk_size // ranks, layernorm_output.size(0))
        if tokens < 1 or layernorm_output.size(0) % tokens:
            raise DeepSpeedConfigError(
                f"FPDT_Attention: {layernorm_output.size(0)} tokens on this rank in chunks of {self.chunk_size} over "
                f"{ranks} ranks; expected chunks that divide the sequence and that the ranks divide"
            )
        shares = shares_of_heads(self.heads, self.key_heads, ranks)
        rule = MaskRule(is_causal=True, window=None, scale=1 / math.sqrt(self.width))
        chunks, outputs, copies = [], [], HostChunks(layernorm_output.device)
        for number, part in enumerate(layernorm_output.split(tokens)):
            start = number * tokens * ranks
            made = functional.linear(part, first, first_bias).unflatten(-1, (-1, self.width))
            cut = made.split([self.heads, self.key_heads, self.key_heads], dim=2)
            inside = [
                exchange(x, self.group, 0, 2, heads=heads)
                for x, heads in zip(cut, (shares.query, shares.key, shares.key), strict=True)
            ]
            if rotary_pos_emb is not None:
                cos, sin = (angles[start : start + tokens * ranks] for angles in rotary_pos_emb)
                inside[:2] = [rotated(x, cos, sin, 0) for x in inside[:2]]
            query, key, value = (x.permute(1, 2, 0, 3) for x in inside)
            if self.enable_offloading and cpu_offloading:
                key, value = copies.on_host(key), copies.on_host(value)
            chunks.append((key, value))
            seen = attend_to_chunks(query, start, chunks, rule, copies).permute(2, 0, 1, 3)
            seen = exchange(seen, self.group, 0, 2, back=True, heads=shares.query).flatten(2)
            outputs.append(functional.linear(seen, second, None if self.return_bias else second_bias))
        output = torch.cat(outputs)
        return (output, second_bias) if self.return_bias else output


class FPDT_FFN:  # noqa: N801
    """``FPDT_FFN.apply(x, w1, b1, w2, b2, add_bias, chunk_size)``: an MLP with GELU, a chunk of tokens at a time."""

    @staticmethod
    def apply(
        x: torch.Tensor,
        w1: torch.Tensor,
        b1: torch.Tensor | None,
        w2: torch.Tensor,
        b2: torch.Tensor | None,
        add_bias: bool,
        chunk_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns ``[tokens, batch, hidden]``, as ``x``, and ``b2`` unless it was added.

        Backward computes each chunk again. Weights are ``[inner, hidden]`` and ``[hidden, inner]``, biases ``[inner]``
        and ``[hidden]``, or None.
        """

        def of_chunk(part: torch.Tensor) -> torch.Tensor:
            inner = functional.gelu(functional.linear(part, w1, b1), approximate="tanh")
            return functional.linear(inner, w2, b2 if add_bias else None)

        out = torch.cat([run_again(of_chunk, part) for part in x.split(max(chunk_size, 1))])
        return out, None if add_bias else b2


class FPDT_LogitsLoss:  # noqa: N801
    """``FPDT_LogitsLoss.apply(lm_output, labels, logit_weights, rank, spg_size, spg, num_chunk)``."""

    @staticmethod
    def apply(
        lm_output: torch.Tensor,
        labels: torch.Tensor,
        logit_weights: torch.Tensor,
        rank: int,
        spg_size: int,
        spg: Any,
        num_chunk: int,
        *,
        own_share: bool = False,
    ) -> torch.Tensor:
        """Returns the losses of all tokens; logits exist for one chunk of this rank's tokens at a time.

        Every rank must call it. They are ``[all tokens, batch]`` in fp32, rank after rank.

        Args:
            lm_output: ``[this rank's tokens, batch, hidden]``.
            labels: ``[batch, this rank's tokens]``; -100 is ignored, with loss 0.
            logit_weights: ``[vocabulary, hidden]``.
            rank: This rank's place in the group; not used.
            spg_size: Ranks of the group; checked.
            own_share: See :func:`deepspeed.sequence.mean_loss`.

        Raises:
            DeepSpeedConfigError: ``spg_size`` is not the group's size.
        """
        if spg_size != size_of(spg):
            raise DeepSpeedConfigError(
                f"FPDT_LogitsLoss: spg_size is {spg_size}, but the group has {size_of(spg)} ranks; give that number"
            )
        tile = -(-labels.numel() // max(num_chunk, 1))
        wanted = labels.t().contiguous()
        losses = chunked_cross_entropy(
            lm_output, lambda part: functional.linear(part, logit_weights), wanted, tile_tokens=tile, reduction="none"
        )
        return gather_tokens(losses, axis_of(spg, SEQUENCE), own_share=own_share)
