"""Cross entropy of tokens and vocabularies that are cut; see :mod:`deepspeed.parallel.sequence.vocabulary`."""

from __future__ import annotations

from deepspeed.lazy import lazy_names

_HOME = "deepspeed.parallel.sequence.vocabulary"
__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"chunked_cross_entropy": _HOME, "vocab_sequence_parallel_cross_entropy": _HOME}
)
