"""``sparse_attention`` as a feature of the engine: makes the attention layers of a Transformers model sparse."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from deepspeed.config.sections.sparse_attention import KEYS_OF_MODE, SparseAttention
from deepspeed.engine_feature import SEQUENCE_RANKS, STAGES, TENSOR_RANKS, Conflict, EngineFeature, EngineSetup
from deepspeed.logging import log_dist
from deepspeed.ops.sparse_attention import transformers_models
from deepspeed.ops.sparse_attention.sparsity_config import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)

_PART = 'sparse_attention.apply_to "model"'


def _is_on(setup: EngineSetup) -> bool:
    section = setup.root.sparse_attention
    return section is not None and section.apply_to == "model"


class SparseModelAttention(EngineFeature):
    """Block-sparse attention in every attention layer of a Transformers model."""

    title = "sparse attention of the model"
    setting = _PART
    conflicts = (
        Conflict(
            _PART,
            _is_on,
            STAGES,
            "a stage is not a Transformers model, so its attention layers are not known",
            "build SparseSelfAttention into the layers, or leave the section out",
        ),
        Conflict(
            _PART,
            _is_on,
            SEQUENCE_RANKS,
            "each rank would attend to its own tokens only",
            "leave the section out, or set sequence_parallel_size to 1",
        ),
        Conflict(
            _PART,
            _is_on,
            TENSOR_RANKS,
            "its pattern is for all heads, and each rank has some of them",
            "leave the section out, or set tensor_parallel.autotp_size to 1",
        ),
    )

    @override
    def reshape(self, setup: EngineSetup) -> Mapping[int, nn.Parameter]:
        section, model = setup.root.sparse_attention, setup.model
        if section is not None and section.apply_to == "model":
            heads = transformers_models.heads_of(model)
            transformers_models.use_sparse_attention(model, pattern_of(section, heads))
            log_dist(f"sparse_attention: every attention layer of {type(model).__name__} follows {section.mode}")
        return {}


FEATURE = SparseModelAttention()


_CLASSES: dict[str, type[SparsityConfig]] = {
    "dense": DenseSparsityConfig,
    "fixed": FixedSparsityConfig,
    "variable": VariableSparsityConfig,
    "bigbird": BigBirdSparsityConfig,
    "bslongformer": BSLongformerSparsityConfig,
}


def pattern_of(section: SparseAttention, num_heads: int) -> SparsityConfig:
    """Returns the pattern that a section describes. Raises ValueError: values of the section contradict each other."""
    return _CLASSES[section.mode](num_heads, **{name: getattr(section, name) for name in KEYS_OF_MODE[section.mode]})
