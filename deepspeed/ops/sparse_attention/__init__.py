"""Computes attention over selected blocks of a sequence, with memory and time linear in its length.

In reading order: ``sparsity_config`` (patterns), ``plan`` (a pattern compiled into units of equal size), ``attention``
(computes attention), ``bias`` (masks and relative positions). The interfaces: ``sparse_self_attention`` (a module),
``transformers_models`` (any Transformers model), ``bert_sparse_self_attention`` and ``sparse_attention_utils`` (for
older programs), ``matmul`` and ``softmax`` (the two halves of attention on block-sparse matrices).
"""

from deepspeed.lazy import TYPE_CHECKING, lazy_names

if TYPE_CHECKING:
    from deepspeed.ops.sparse_attention import attention as attention
    from deepspeed.ops.sparse_attention import bert_sparse_self_attention as bert_sparse_self_attention
    from deepspeed.ops.sparse_attention import bias as bias
    from deepspeed.ops.sparse_attention import matmul as matmul
    from deepspeed.ops.sparse_attention import plan as plan
    from deepspeed.ops.sparse_attention import softmax as softmax
    from deepspeed.ops.sparse_attention import sparse_attention_utils as sparse_attention_utils
    from deepspeed.ops.sparse_attention import sparse_self_attention as sparse_self_attention
    from deepspeed.ops.sparse_attention import sparsity_config as sparsity_config
    from deepspeed.ops.sparse_attention import transformers_models as transformers_models
    from deepspeed.ops.sparse_attention.attention import attend as attend
    from deepspeed.ops.sparse_attention.matmul import MatMul as MatMul
    from deepspeed.ops.sparse_attention.plan import compile_layout as compile_layout
    from deepspeed.ops.sparse_attention.softmax import Softmax as Softmax
    from deepspeed.ops.sparse_attention.sparse_attention_utils import SparseAttentionUtils as SparseAttentionUtils
    from deepspeed.ops.sparse_attention.sparse_self_attention import BertSparseSelfAttention as BertSparseSelfAttention
    from deepspeed.ops.sparse_attention.sparse_self_attention import SparseSelfAttention as SparseSelfAttention
    from deepspeed.ops.sparse_attention.sparsity_config import BigBirdSparsityConfig as BigBirdSparsityConfig
    from deepspeed.ops.sparse_attention.sparsity_config import BSLongformerSparsityConfig as BSLongformerSparsityConfig
    from deepspeed.ops.sparse_attention.sparsity_config import DenseSparsityConfig as DenseSparsityConfig
    from deepspeed.ops.sparse_attention.sparsity_config import FixedSparsityConfig as FixedSparsityConfig
    from deepspeed.ops.sparse_attention.sparsity_config import (
        LocalSlidingWindowSparsityConfig as LocalSlidingWindowSparsityConfig,
    )
    from deepspeed.ops.sparse_attention.sparsity_config import SparsityConfig as SparsityConfig
    from deepspeed.ops.sparse_attention.sparsity_config import VariableSparsityConfig as VariableSparsityConfig
    from deepspeed.ops.sparse_attention.transformers_models import use_sparse_attention as use_sparse_attention

lazy_names(__name__)
