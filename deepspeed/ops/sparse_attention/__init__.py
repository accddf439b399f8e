"""Computes attention over selected blocks of a sequence, with memory and time linear in its length.

In reading order: ``sparsity_config`` (patterns), ``plan`` (a pattern compiled into units of equal size), ``attention``
(computes attention), ``bias`` (masks and relative positions). The interfaces: ``sparse_self_attention`` (a module),
``transformers_models`` (any Transformers model), ``bert_sparse_self_attention`` and ``sparse_attention_utils`` (for
older programs), ``matmul`` and ``softmax`` (the two halves of attention on block-sparse matrices).
"""

from deepspeed.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "deepspeed.ops.sparse_attention.sparsity_config": (
            "BSLongformerSparsityConfig BigBirdSparsityConfig DenseSparsityConfig FixedSparsityConfig "
            "LocalSlidingWindowSparsityConfig SparsityConfig VariableSparsityConfig"
        ),
        "deepspeed.ops.sparse_attention.sparse_self_attention": "BertSparseSelfAttention SparseSelfAttention",
        "deepspeed.ops.sparse_attention.matmul": "MatMul",
        "deepspeed.ops.sparse_attention.softmax": "Softmax",
        "deepspeed.ops.sparse_attention.sparse_attention_utils": "SparseAttentionUtils",
        "deepspeed.ops.sparse_attention.attention": "attend",
        "deepspeed.ops.sparse_attention.plan": "compile_layout",
        "deepspeed.ops.sparse_attention.transformers_models": "use_sparse_attention",
    },
    submodules=(
        "attention bert_sparse_self_attention bias matmul plan softmax "
        "sparse_attention_utils sparse_self_attention sparsity_config transformers_models"
    ),
)
