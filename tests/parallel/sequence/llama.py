"""Tiny Transformers models, whole and shared, and batches for them."""

from typing import Any

import torch

from tests.harness.toy_models import causal_model
from tests.parallel.sequence.net import TOKENS, VOCABULARY


def llama(heads: int = 4, key_heads: int = 2, kind: str = "Llama", **more: Any) -> Any:
    """A causal model with the same values wherever it is asked for."""
    given = {
        "vocab_size": VOCABULARY, "hidden_size": 4 * heads, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "head_dim": 4,
        "max_position_embeddings": 64, "attn_implementation": "sdpa", "pad_token_id": 0,
    }  # fmt: skip
    return causal_model(kind, seed=heads, **{**given, **more})


def packed_batch(sample: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences: one of three documents, one of two; the next tokens are the labels."""
    generator = torch.Generator().manual_seed(97 * step + sample)
    ids = torch.randint(1, VOCABULARY, (2, TOKENS), generator=generator)
    lengths = ((5, 7, 4), (9, 7))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), -100)), 1)
    labels[:, :-1][positions[:, 1:] == 0] = -100  # what begins another document is not foretold
    return {"input_ids": ids, "position_ids": positions, "shift_labels": labels}


def padded_batch(sample: int, left: bool = False) -> dict[str, torch.Tensor]:
    """Two sequences of which one is padded by five tokens."""
    whole = packed_batch(sample)
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[1, : 5 if left else TOKENS] = 0 if left else 1
    if not left:
        mask[1, -5:] = 0
    labels = whole["shift_labels"].masked_fill(mask == 0, -100)
    labels[:, :-1][mask[:, 1:] == 0] = -100
    positions = torch.arange(TOKENS).expand(2, -1).contiguous()
    return {**whole, "attention_mask": mask, "position_ids": positions, "shift_labels": labels}


def plain_batch(sample: int, step: int = 0) -> dict[str, torch.Tensor]:
    """Two sequences of which each is one document."""
    whole = packed_batch(sample, step)
    labels = torch.cat((whole["input_ids"][:, 1:], torch.full((2, 1), -100)), 1)
    positions = torch.arange(TOKENS).expand(2, -1).contiguous()
    return {**whole, "position_ids": positions, "shift_labels": labels}
