"""Helpers for sparse models: extend position tables, replace attention layers, pad to the block size."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from deepspeed.models.layers import is_of_library
from deepspeed.ops.sparse_attention.sparse_self_attention import (
    BertSparseSelfAttention,
    BertSparseSelfAttentionInTransformers,
)
from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig
from deepspeed.ops.sparse_attention.transformers_models import use_sparse_attention


class SparseAttentionUtils:
    """Static methods only."""

    @staticmethod
    def extend_position_embedding(model: nn.Module, max_position: int) -> nn.Module:
        """Makes a model's position table longer, in place, by repeating it; buffers that are as long grow with it.

        Works on models whose embeddings module has ``position_embeddings``, such as BERT and RoBERTa (whose first
        ``padding_idx + 1`` rows mean no position and stay once at the front). Call it before ``deepspeed.initialize``.

        Raises:
            ValueError: There is no such table, or it is longer already.
        """
        tables = [
            module
            for module in model.modules()
            if isinstance(getattr(module, "position_embeddings", None), nn.Embedding)
        ]
        if not tables:
            raise ValueError(
                f"extend_position_embedding: {type(model).__name__} has no module with position_embeddings; models "
                "with rotary or relative positions need no longer table"
            )
        config = getattr(model, "config", None)
        for owner in tables:
            table: nn.Embedding = owner.position_embeddings  # type: ignore[assignment]
            front = _front_of(table)
            known = table.num_embeddings - front
            if max_position < known:
                raise ValueError(
                    f"extend_position_embedding({max_position}): the model has {known} positions already; "
                    "give a larger number"
                )
            rows = torch.arange(max_position, device=table.weight.device) % known + front
            weight = torch.cat([table.weight[:front], table.weight[rows]]).detach().clone()
            table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
            table.num_embeddings = weight.size(0)
            _extend_buffers(owner, known + front, weight.size(0))
            if config is not None:
                config.max_position_embeddings = weight.size(0)
        return model

    @staticmethod
    def update_tokenizer_model_max_length(tokenizer: Any, max_position: int) -> Any:
        """Lets a tokenizer cut at ``max_position`` tokens; returns it."""
        tokenizer.model_max_length = max_position
        tokenizer.init_kwargs["model_max_length"] = max_position
        return tokenizer

    @staticmethod
    def replace_model_self_attention_with_sparse_self_attention(
        model: nn.Module, max_position: int, sparsity_config: SparsityConfig
    ) -> nn.Module:
        """Makes a model sparse and its position table ``max_position`` long, in place: :func:`use_sparse_attention`.

        Raises:
            DeepSpeedConfigError: The model cannot be switched.
        """
        use_sparse_attention(model, sparsity_config)
        tables = [getattr(module, "position_embeddings", None) for module in model.modules()]
        known = [table.num_embeddings - _front_of(table) for table in tables if isinstance(table, nn.Embedding)]
        if known and max_position > max(known):
            SparseAttentionUtils.extend_position_embedding(model, max_position)
        return model

    @staticmethod
    def replace_self_attention_layer_with_sparse_self_attention_layer(
        config: Any, layers: Any, sparsity_config: SparsityConfig
    ) -> Any:
        """Replaces ``layer.attention.self`` of each layer, keeping its three linear layers; returns the layers."""
        for layer in layers:
            former = layer.attention.self
            in_library = is_of_library(type(former))
            kind = BertSparseSelfAttentionInTransformers if in_library else BertSparseSelfAttention
            block = sparsity_config.block
            longest = -(-getattr(config, "max_position_embeddings", 2048) // block) * block
            sparse = kind(config, sparsity_config, max_seq_length=longest)
            sparse.query, sparse.key, sparse.value = former.query, former.key, former.value
            layer.attention.self = sparse
        return layers

    @staticmethod
    def pad_to_block_size(
        block_size: int,
        input_ids: torch.Tensor | None,
        attention_mask: torch.Tensor | None,
        token_type_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        inputs_embeds: torch.Tensor | None,
        pad_token_id: int,
        model_embeddings: Any,
    ) -> tuple[
        int, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None
    ]:
        """Pads a batch at its end to a multiple of the block size.

        Args:
            input_ids: ``[batch, length]``, or None with ``inputs_embeds``.
            attention_mask: ``[..., length]`` of 0 and 1 (or bool), padded with 0; or of values added to scores,
                padded with the minimum of their dtype; None: a mask is made if padding is needed.
            token_type_ids: ``[batch, length]`` or None; padded with 0.
            position_ids: ``[batch, length]`` or None; the count continues.
            inputs_embeds: ``[batch, length, hidden]`` or None.
            model_embeddings: Called with ids of padding to make embeddings for ``inputs_embeds``.

        Returns:
            ``(padding, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)``.

        Raises:
            ValueError: There are neither ids nor embeddings.
        """
        inputs = input_ids if input_ids is not None else inputs_embeds
        if inputs is None:
            raise ValueError("pad_to_block_size: expected input_ids or inputs_embeds; found neither")
        batch, length = inputs.shape[:2]
        padding = -length % block_size
        if padding == 0:
            return 0, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds
        if inputs_embeds is not None:
            ids = inputs.new_full((batch, padding), pad_token_id, dtype=torch.long)
            inputs_embeds = torch.cat([inputs_embeds, model_embeddings(ids).to(inputs_embeds.dtype)], dim=1)
        if input_ids is not None:
            input_ids = functional.pad(input_ids, (0, padding), value=pad_token_id)
        if attention_mask is None:
            attention_mask = inputs.new_ones((batch, length), dtype=torch.long)
        attention_mask = functional.pad(attention_mask, (0, padding), value=_hidden_value(attention_mask))
        if token_type_ids is not None:
            token_type_ids = functional.pad(token_type_ids, (0, padding), value=0)
        if position_ids is not None:
            more = position_ids[:, -1:] + torch.arange(1, padding + 1, device=position_ids.device)
            position_ids = torch.cat([position_ids, more], dim=1)
        return padding, input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds

    @staticmethod
    def unpad_sequence_output(pad_len: int, sequence_output: torch.Tensor) -> torch.Tensor:
        """Cuts the padding off ``[batch, length, ...]``."""
        return sequence_output[:, :-pad_len] if pad_len > 0 else sequence_output


def _front_of(table: nn.Embedding) -> int:
    """Returns how many rows of a position table come before that of position 0; RoBERTa has ``padding_idx + 1``."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def _extend_buffers(owner: nn.Module, known: int, length: int) -> None:
    for name, buffer in list(owner.named_buffers(recurse=False)):
        if buffer.dim() == 2 and buffer.size(1) == known and not buffer.is_floating_point():
            is_count = bool((buffer[0] == torch.arange(known, device=buffer.device)).all())
            longer = torch.arange(length, device=buffer.device) if is_count else buffer[0, -1:].expand(length)
            setattr(owner, name, longer.to(buffer.dtype).expand(buffer.size(0), -1).clone())


def _hidden_value(mask: torch.Tensor) -> float:
    """Returns what hides a key in a mask like this one: its dtype's least where it is added to scores, else 0."""
    if mask.is_floating_point() and not bool(((mask == 0) | (mask == 1)).all() and bool((mask == 1).any())):
        return torch.finfo(mask.dtype).min
    return 0
