"""The pattern of the configuration's ``sparse_attention`` section."""

from __future__ import annotations

from deepspeed.config.sections.sparse_attention import KEYS_OF_MODE, SparseAttention
from deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

_CLASSES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
}


def pattern_of(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """Returns the pattern that a section describes.

    Args:
        section: ``sparse_attention``.
        num_heads: Of the model.

    Raises:
        ValueError: The numbers do not go together.
    """
    return _CLASSES[section.mode](num_heads, **{name: getattr(section, name) for name in KEYS_OF_MODE[section.mode]})
