"""Upstream's import path for names of ``ops.sparse_attention.sparse_self_attention``."""

from deepspeed.ops.sparse_attention.sparse_self_attention import BertSparseSelfAttention as BertSparseSelfAttention
