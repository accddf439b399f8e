"""Block-sparse attention: attention over selected blocks of a sequence, with memory and time linear in its length.

In reading order: ``sparsity_config`` (patterns), ``plan`` (a pattern compiled into units of equal size), ``attention``
(computes attention), ``bias`` (masks and relative positions). The interfaces: ``sparse_self_attention`` (a module),
``transformers_models`` (any Transformers model), ``bert_sparse_self_attention`` and ``sparse_attention_utils`` (for
older programs), ``matmul`` and ``softmax`` (the two halves of attention on block-sparse matrices).
"""

from deepspeed.lazy import lazy_names

_HERE = "deepspeed.ops.sparse_attention"

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(
            (
                "BSLongformerSparsityConfig",
                "BigBirdSparsityConfig",
                "DenseSparsityConfig",
                "FixedSparsityConfig",
                "LocalSlidingWindowSparsityConfig",
                "SparsityConfig",
                "VariableSparsityConfig",
            ),
            f"{_HERE}.sparsity_config",
        ),
        "BertSparseSelfAttention": f"{_HERE}.sparse_self_attention",
        "MatMul": f"{_HERE}.matmul",
        "Softmax": f"{_HERE}.softmax",
        "SparseAttentionUtils": f"{_HERE}.sparse_attention_utils",
        "SparseSelfAttention": f"{_HERE}.sparse_self_attention",
        "attend": f"{_HERE}.attention",
        "compile_layout": f"{_HERE}.plan",
        "use_sparse_attention": f"{_HERE}.transformers_models",
    },
    submodules=[
        *("attention", "bert_sparse_self_attention", "bias", "matmul", "plan", "softmax"),
        *("sparse_attention_utils", "sparse_self_attention", "sparsity_config", "transformers_models"),
    ],
)
